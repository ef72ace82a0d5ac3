# SPDX-License-Identifier: Apache-2.0
"""Hooks in the engine core: arrival, scheduler, waits, connectors on the scheduler's side."""
