# SPDX-License-Identifier: Apache-2.0
"""What several instances are sent for one request, and one response of theirs: encoders, prefill, decode."""
