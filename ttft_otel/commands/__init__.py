# SPDX-License-Identifier: Apache-2.0
"""The command line: one file for each command of ttft-otel, which parses flags and calls the other rooms."""
