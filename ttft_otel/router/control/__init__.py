# SPDX-License-Identifier: Apache-2.0
"""Everything beside the data path: the ASGI application, admin API, registration, metrics, the server
process."""
