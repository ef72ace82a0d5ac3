# SPDX-License-Identifier: Apache-2.0
"""Routing policies compared: simulated on published traces, and measured on real vLLM servers."""
