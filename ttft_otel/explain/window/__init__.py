# SPDX-License-Identifier: Apache-2.0
"""The requests of a window, and what the analyses need of each."""
