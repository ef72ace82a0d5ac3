# SPDX-License-Identifier: Apache-2.0
"""The router on several cores: processes on one port, their supervisor, and what they share."""
