# SPDX-License-Identifier: Apache-2.0
"""Answers from stored requests: why some were late, what changed, and what other settings would bring."""
