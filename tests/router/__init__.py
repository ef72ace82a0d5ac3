# SPDX-License-Identifier: Apache-2.0
"""Tests of the router over real sockets; fake_instances.py has servers, folders mirror router/'s."""
