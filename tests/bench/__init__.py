# SPDX-License-Identifier: Apache-2.0
"""The benchmark against a server with scripted answers that records what it did (scripted_server.py)."""
