# SPDX-License-Identifier: Apache-2.0
"""Requests as pages, terminal tables, JSON and Perfetto traces."""
