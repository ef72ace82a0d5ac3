# SPDX-License-Identifier: Apache-2.0
"""The benchmark against a server that keeps to a script and notes what it really did: server.py."""
