# SPDX-License-Identifier: Apache-2.0
"""Peers of the router and the receiver as attackers, over real sockets."""
