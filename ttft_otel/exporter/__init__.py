# SPDX-License-Identifier: Apache-2.0
"""The exporter process: records come in from handoff.py's socket, spans go out over OTLP.

main.py lives: inbox.py reads, flow.py moves, identity.py and spans.py translate, ship.py exports,
health.py counts.
"""
