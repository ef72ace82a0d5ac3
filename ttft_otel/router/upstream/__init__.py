# SPDX-License-Identifier: Apache-2.0
"""The vLLM instances: pool with circuit breakers, health probes, capabilities, HTTP client, retries."""
