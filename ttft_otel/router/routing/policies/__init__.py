# SPDX-License-Identifier: Apache-2.0
"""Routing policies, free of I/O, with the time as an argument; policy_registry.py has them by name.

load_policies.py compares requests, session_ring.py follows sessions, prefix_policies.py follows cached
prefixes, and least_ttft.py predicts. They share one PolicyState per leg (policy_state.py). It combines the
pending requests of each instance (pending_load.py), the prompt blocks that each has cached (block_index.py,
numbered by block_keys.py), and a model of prefill time (prefill_model.py).
"""
