# SPDX-License-Identifier: Apache-2.0
"""What runs per request inside vLLM and the router: contexts, marks, records, and how they are sent."""
