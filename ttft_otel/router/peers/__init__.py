# SPDX-License-Identifier: Apache-2.0
"""Replicas of the router on other hosts: what they tell one another of their load (`--peers`)."""
