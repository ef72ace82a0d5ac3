# SPDX-License-Identifier: Apache-2.0
"""The exporter process: records come in from handoff.py's socket, spans go out over OTLP.

inbox.py reads, spans.py translates, ship.py exports, health.py counts, main.py ties them together.
"""
