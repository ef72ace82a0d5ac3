# SPDX-License-Identifier: Apache-2.0
"""The observability stack without a checkout: its files, its containers, its check; for commands/stack.py."""
