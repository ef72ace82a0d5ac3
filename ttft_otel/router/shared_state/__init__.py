# SPDX-License-Identifier: Apache-2.0
"""`--shared-state`: what replicas of the router know of one another's load, through Valkey or Redis."""
