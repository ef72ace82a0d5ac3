# SPDX-License-Identifier: Apache-2.0
"""What other products call our stages, as data: foreign_spans.py reads their traces by it.

docs/generate_reference.py makes docs/reference/vocabulary.md of it. A name is of a span, or of an attribute
with a length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

from ttft_otel.model.names import keys, metric_names

TOTAL: Final = "the TTFT"
_TIME_TO_FIRST_TOKEN: Final = "gen_ai.latency.time_to_first_token"
_TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """Names of another product for one of our stages.

    stage: ours, TOTAL, or "" for none. form: what has the name, a span or an attribute in such a unit.
    note: what it means beyond our stage. roles: of requests for which it stands for the stage; () for all.
    below: the role of requests below the span; "" where it tells none. alone: whether a span tells the stage
    without others of its trace, as metrics need it.
    """

    stage: str
    names: tuple[str, ...]
    note: str = ""
    form: Literal["span", "s", "ms", "ms text"] = "span"
    roles: tuple[str, ...] = ()
    below: str = ""
    alone: bool = True


@dataclass(frozen=True, slots=True)
class ForeignProduct:
    """Another product's names.

    read: where they were read, and how exact they are. scope: how the names of its instrumentation scopes
    begin; "" for any. requests: names of the spans of whole requests, which have TOTAL; a first group is the
    role. None: its traces are not read. role: the attribute with a request's role, in the words of `roles`.
    """

    name: str
    read: str
    rows: tuple[ForeignNames, ...]
    scope: str = ""
    requests: re.Pattern[str] | None = None
    role: str = ""
    roles: dict[str, str] = field(default_factory=dict)


PRODUCTS: Final = (
    ForeignProduct(
        "vLLM's own tracing",
        "span `llm_request`, 0.32 and 0.33",
        (
            ForeignNames(
                TOTAL, (_TIME_TO_FIRST_TOKEN,), "without `receive` and `egress`", form="s"
            ),
            ForeignNames(
                "prefill.queue",
                (_TIME_IN_QUEUE,),
                "without the wait for the running step, with `encoder.queue` and waits for connectors",
                form="s",
            ),
            ForeignNames(
                "prefill.compute",
                ("gen_ai.latency.time_in_model_prefill",),
                "with all from `dispatch` to the engine's part of `output`",
                form="s",
            ),
        ),
        scope="vllm",
        requests=re.compile("llm_request"),
    ),
    ForeignProduct(
        "vLLM, proposed",
        "pull request 44402, open, not run, not in metrics",
        (
            ForeignNames("prefill.queue", ("vllm_queue",)),
            ForeignNames(
                "kv.transfer", ("vllm_async_kv_transfer",), "the wait, not loads inside a step"
            ),
            ForeignNames("prefill.compute", ("vllm_prefill",), "as above"),
        ),
        scope="vllm",
    ),
    ForeignProduct(
        "SGLang",
        "`req_time_stats.py` of 0.5.23, without an engine; a host's times, also of a GPU",
        (
            ForeignNames(TOTAL, (_TIME_TO_FIRST_TOKEN,), form="s"),
            ForeignNames("preprocess", ("tokenize",)),
            ForeignNames(
                "ipc",
                (
                    "api_server_dispatch", "dpc_dispatch", "request_process", "prefill_prepare",
                    "decode_prepare",
                ),
            ),
            ForeignNames("prefill.queue", ("prefill_waiting",)),
            ForeignNames(
                "prefill.queue",
                ("decode_waiting",),
                "of decode instances; not in metrics",
                roles=("decode",),
                alone=False,
            ),
            ForeignNames("encoder.compute", ("mm_encode",)),
            ForeignNames(
                "prefill.compute",
                ("prefill_forward",),
                "with `dispatch`, `sample`, `prefill.stall`",
            ),
            ForeignNames(
                "prefill.compute",
                ("chunked_prefill",),
                "inside of it; not in metrics",
                alone=False,
            ),
            ForeignNames(
                "kv.transfer",
                (
                    "prefill_bootstrap", "prefill_transfer_kv_cache", "decode_bootstrap",
                    "decode_transferred",
                ),
            ),
            ForeignNames(
                "",
                ("gen_ai.latency.time_in_model_prefill",),
                "unlike vLLM's it has the queue in it",
                form="s",
            ),
        ),
        scope="sglang",
        requests=re.compile(r"(prefill|decode|) ?Req .*"),
    ),
    ForeignProduct(
        "TensorRT-LLM",
        "its pull request 5897, not run",
        (
            ForeignNames(TOTAL, (_TIME_TO_FIRST_TOKEN,), form="s"),
            ForeignNames("prefill.queue", (_TIME_IN_QUEUE,), form="s"),
            ForeignNames("kv.transfer", ("gen_ai.latency.kv_cache_transfer_time",), form="s"),
        ),
        scope="trt",
        requests=re.compile(".*"),
    ),
    ForeignProduct(
        "Dynamo",
        "1.6.1; `engine.generate` by its pull requests 9543, 9327, not run",
        (
            ForeignNames(
                TOTAL,
                ("ttft_ms",),
                "of `http-request`, or of an instance's `engine.generate`",
                "ms text",
            ),
            ForeignNames("", ("router.route_request", "handle_payload"), "to the last token"),
        ),
        requests=re.compile(r"http-request|engine\.generate"),
        role="disagg_role",
        roles={"agg": "mono", "prefill": "prefill", "decode": "decode", "encode": "encode"},
    ),
    ForeignProduct(
        "llm-d",
        "its router's source, not run, not in metrics; the TTFT is the engine's",
        (
            ForeignNames("router.route", ("gateway.request_orchestration",)),
            ForeignNames("", ("prefill", "llm_d.pd_proxy.prefill"), "legs", below="prefill"),
            ForeignNames("", ("decode", "llm_d.pd_proxy.decode"), "legs", below="decode"),
            ForeignNames("", ("gateway.request", "forward_request"), "the request"),
            ForeignNames("", ("llm_d.pd_proxy.true_ttft_ms",), "ends where decode begins", "ms"),
        ),
        scope="llm-d",
    ),
    ForeignProduct(
        "GenAI conventions",
        "we emit both; not read of others",
        (
            ForeignNames(
                TOTAL,
                (keys.TIME_TO_FIRST_CHUNK, metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN),
                form="s",
            ),
        ),
    ),
)  # fmt: skip
