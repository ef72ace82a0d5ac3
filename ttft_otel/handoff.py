# SPDX-License-Identifier: Apache-2.0
"""Hand a Record's bytes to the exporter process: one non-blocking send, dropped and counted when full."""
