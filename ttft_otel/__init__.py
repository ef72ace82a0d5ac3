# SPDX-License-Identifier: Apache-2.0
"""Measure where each vLLM request's time to first token (TTFT) went.

The modules, in the order in which to read them:

vocabulary    stages names endpoints clock           names of everything; clock; settings; error handling
              settings guard otlp_exporter child_command metric_labels
record        record                                 the data that crosses the process boundary
hot path      context carrier clock_offsets          runs per request inside vLLM and the router
              media_items request_trace roles
              record_parts measurement recorder kept_spans
              first_chunk asgi meter handoff
pure          breakdown byte_budget wait_reasons     marks -> stages; Server-Timing; JSON report; colours
              held_waits failed_stage leg_partition
              timing ttft_report palette
vLLM          hooks/                                 the only package that knows vLLM and torch
spans         exporter/                              child process: records -> OTLP
HTTP          router/ report/                        in front of the servers; receiver and pages for spans
load          bench/                                 sends requests, joins their TTFT with breakdowns
answers       explain/                               why requests were late; what changed between two windows
entry points  plugin cli doctor doctor_clock doctor_media doctor_metrics size testing
"""

# The only place of the version: pyproject.toml reads it from here when a wheel is built.
__version__ = "0.1.0"
