# SPDX-License-Identifier: Apache-2.0
"""Windows of known truth, and how many answers of `explain`, `diff` and `whatif` about them are right."""
