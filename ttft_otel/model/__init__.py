# SPDX-License-Identifier: Apache-2.0
"""What a TTFT consists of: stages, names, records, and how marks become stages that add up. Pure."""
