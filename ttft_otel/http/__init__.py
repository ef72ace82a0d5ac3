# SPDX-License-Identifier: Apache-2.0
"""What the HTTP servers and clients of several rooms share."""
