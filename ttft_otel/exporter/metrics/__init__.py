# SPDX-License-Identifier: Apache-2.0
"""Records and measurements become OTLP metrics."""
