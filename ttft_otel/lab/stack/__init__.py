# SPDX-License-Identifier: Apache-2.0
"""The observability stack on this machine: builds, starts, checks and stops it; `scripts/stack` runs it.

pins says which programs, golang and binaries build and find them, parts how each is started with our
configurations, native and docker run all of them, smoke sends one trace through, command is the door.
"""
