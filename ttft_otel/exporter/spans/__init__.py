# SPDX-License-Identifier: Apache-2.0
"""Records become OTLP spans."""
