# SPDX-License-Identifier: Apache-2.0
"""Decide which legs a request needs and how its first token travels; forward.py asks, pure."""

from __future__ import annotations

from typing import Final

OFF: Final = "off"
STRIP: Final = "strip"
CONTINUE: Final = "continue"
MODES: Final = (OFF, STRIP, CONTINUE)
