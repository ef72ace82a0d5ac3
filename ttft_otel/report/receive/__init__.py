# SPDX-License-Identifier: Apache-2.0
"""OTLP exports are accepted, bounded and decoded."""
