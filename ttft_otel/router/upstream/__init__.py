# SPDX-License-Identifier: Apache-2.0
"""The vLLM instances: pool with circuit breakers, health probes, connections, whose fault a failure is."""
