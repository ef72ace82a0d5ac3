# SPDX-License-Identifier: Apache-2.0
"""What changed between two windows."""
