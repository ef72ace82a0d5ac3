# SPDX-License-Identifier: Apache-2.0
"""Where each vLLM request's time to first token went: read the package in this order.

words    stages  names  clock  settings  guard     what everything is called, and who may fail
shape    record                                    the only thing that crosses a process boundary
hot      context  carrier  trip  recorder          runs inside vLLM and the router, microseconds
         asgi  meter  handoff
pure     breakdown  timing  original  palette      marks -> stages that add up; Server-Timing text; colours
vLLM     hooks/                                    what knows vLLM and torch (the laboratory apart)
spans    exporter/                                 a process of its own: records -> OTLP
clients  router/  report/                          before and behind the servers
load     bench/                                    sends requests, joins its TTFT with breakdowns
doors    plugin  cli  doctor  testing              what people call
lab/     tiny models, local servers, injected delays, the stack: for demo, tests and benchmarks
"""

__version__ = "0.1.0"
