# SPDX-License-Identifier: Apache-2.0
"""Spans of a trace become requests with their legs and stages, and rows of a waterfall. Pure."""
