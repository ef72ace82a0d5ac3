# SPDX-License-Identifier: Apache-2.0
"""Receive spans over OTLP, store them in SQLite, show them as pages, terminal tables and JSON.

receiver, otlp_decoder -> span_store | database_reader -> request_assembly -> pages, terminal, JSON
"""
