# SPDX-License-Identifier: Apache-2.0
"""Choosing the instance of a request: policies, prompt readers, sources of cached prefixes, load entries."""
