# SPDX-License-Identifier: Apache-2.0
"""Why requests were late: what differs, causes that were looked at, and the answer."""
