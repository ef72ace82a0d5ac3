# SPDX-License-Identifier: Apache-2.0
"""The observability stack on real binaries: collector, Tempo, Prometheus, Grafana; all on loopback."""
