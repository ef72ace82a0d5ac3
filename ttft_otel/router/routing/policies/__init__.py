# SPDX-License-Identifier: Apache-2.0
"""Routing policies: one file per policy, free of I/O, with the time as an argument.

Policies share one PolicyState per leg (policy_state.py). It combines the pending requests of each
instance (pending_load.py), the prompt blocks that each has cached (block_index.py, numbered by
block_keys.py), and a model of prefill time (prefill_model.py) over the work of a prefill
(prefill_work.py). policy_registry.py maps the names of --routing-logic to policies.
"""
