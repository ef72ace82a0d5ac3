# SPDX-License-Identifier: Apache-2.0
"""Routing policies, free of I/O, with the time as an argument; policy_registry.py has them by name.

All share one PolicyState per leg (policy_state.py): the pending requests of each instance, the prompt blocks
that it has cached (block_index.py), and a model of prefill time (prefill_model.py).
"""
