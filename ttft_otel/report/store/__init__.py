# SPDX-License-Identifier: Apache-2.0
"""Spans in SQLite: written in chunks, read as traces and requests."""
