# SPDX-License-Identifier: Apache-2.0
"""Sources of cached prefixes, which --prefix-index names.

prefix_source.py is their base, and estimates from the prompts sent. kv_events_source.py follows the KV events
that vLLM publishes, by kv_events.py.
"""
