# SPDX-License-Identifier: Apache-2.0
"""The laboratory: tiny models, local vLLM servers, injected delays, demo, release checks.

Used by tests, scripts and benchmarks only; not part of the wheel.
"""
