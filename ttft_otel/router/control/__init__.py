# SPDX-License-Identifier: Apache-2.0
"""Everything beside the data path: the ASGI application, admin API, metrics, the server
process."""
