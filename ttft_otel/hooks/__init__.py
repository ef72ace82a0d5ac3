# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's processes: the only package that knows vLLM.

Rules: vLLM's own call is never inside a `try` of ours that catches; we change no argument and no result
(except our own key in `trace_headers` and private attributes `_ttft_...` on plain objects); we raise nothing;
a target that is missing makes its stages unattributed and does not affect the server.

What the hooks remember is owned by objects, which install.py makes once per process: EngineCoreTracer and its
parts, and WorkerTracer. Hooks are their bound methods, so that finding the state costs nothing.

targets                   all patched functions, as data
wrap                      Patcher: the only code that patches
api_server                arrival to first chunk
engine_core/tracer        EngineCoreTracer: a request from the engine core's input to its first output
engine_core/queue_reasons WaitingQueue: why requests wait
engine_core/held_steps    HeldRequests: whose work held them up
engine_core/step_log      StepLog: what steps computed meanwhile, and for whom
engine_core/transfers     waits for KV blocks, sources of media items, what is kept for others
worker/model_runners      WorkerTracer: both model runners
worker/device             host or device clock
vllm_fields               differences between releases and connectors
install                   makes all of them; hooks around KV and encoder-cache connectors
target_check              which targets a vLLM has
"""
