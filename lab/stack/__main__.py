# SPDX-License-Identifier: Apache-2.0
"""What scripts/stack starts: the commands of command.py."""

from __future__ import annotations

from lab.stack.command import main

main(prog_name="scripts/stack")
