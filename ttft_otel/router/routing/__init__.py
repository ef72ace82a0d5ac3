# SPDX-License-Identifier: Apache-2.0
"""Choosing the instance of a request, and sending it: policies, prompt readers, prefix sources, retries."""
