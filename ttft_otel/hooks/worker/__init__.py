# SPDX-License-Identifier: Apache-2.0
"""Hooks in the worker: both model runners, their clock, connectors on the worker's side."""
