# SPDX-License-Identifier: Apache-2.0
"""Answers from stored requests: which stages changed between two windows, and by how much."""
