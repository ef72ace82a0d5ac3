# SPDX-License-Identifier: Apache-2.0
"""Requests read from Tempo instead of the embedded store."""
