# SPDX-License-Identifier: Apache-2.0
"""Spans in over OTLP, kept in SQLite, out as a page, a terminal table and JSON; vLLM is not needed.

otlp -> receiver -> store | query -> assemble -> pages, terminal, export
"""
