# SPDX-License-Identifier: Apache-2.0
"""Requests as pages, terminal tables and JSON."""
