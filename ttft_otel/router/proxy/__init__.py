# SPDX-License-Identifier: Apache-2.0
"""The data path: admission of requests, responses relayed to clients, errors in OpenAI's form."""
