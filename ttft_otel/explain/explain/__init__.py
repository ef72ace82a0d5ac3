# SPDX-License-Identifier: Apache-2.0
"""Why requests were late: findings, rules and the answer."""
