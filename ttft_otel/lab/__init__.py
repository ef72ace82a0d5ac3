# SPDX-License-Identifier: Apache-2.0
"""The laboratory: tiny models, local servers, injection, the stack; only cli, tests and scripts import it."""
