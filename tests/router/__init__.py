# SPDX-License-Identifier: Apache-2.0
"""The router before real sockets: fake_instances.py has the servers, each test file one part's promises."""
