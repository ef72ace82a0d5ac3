# SPDX-License-Identifier: Apache-2.0
"""Measure where each vLLM request's time to first token (TTFT) went.

The folders, in the order in which to read them; each imports only from those above it:

model      stages, names, the record, and how marks become stages that add up; pure
tracing    what runs per request inside vLLM and the router, up to the exporter process; no OpenTelemetry
http       what several HTTP servers and clients share
exporter   the child process that turns records into OTLP spans and metrics
hooks      the patches of vLLM, and the only folder that knows vLLM and torch
report     receiver, store, pages and terminal output of `serve` and `report`
router     the router in front of vLLM servers
bench      sends load, and joins its TTFT with breakdowns
explain    why requests were late, what changed, and what other settings would bring
commands   the command line
plugin     what vLLM loads; distro: what opentelemetry-instrument does; testing: what users' tests may import
"""

# The only place of the version: pyproject.toml reads it from here when a wheel is built.
__version__ = "0.1.0"
