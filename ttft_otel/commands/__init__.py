# SPDX-License-Identifier: Apache-2.0
"""The command line: the commands of ttft-otel, which parse flags and call the other rooms."""
