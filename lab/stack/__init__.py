# SPDX-License-Identifier: Apache-2.0
"""The observability stack on this machine: build, start, check and stop it; `scripts/stack` runs it.

program_pins lists the programs, go_builds and binaries build and find them, stack_parts has their
commands with our configurations, native_stack runs all of them, command has the subcommands.
"""
