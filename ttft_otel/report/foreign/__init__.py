# SPDX-License-Identifier: Apache-2.0
"""Spans of other products: which of our stages their names stand for, and `ttft` spans made of them."""
