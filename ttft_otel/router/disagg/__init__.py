# SPDX-License-Identifier: Apache-2.0
"""Requests served by several instances: encoders, prefill and decode, and one response made of theirs."""
