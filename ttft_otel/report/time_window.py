# SPDX-License-Identifier: Apache-2.0
"""Windows of time as users write them (`2h..1h`), for the option --since of report, diff, explain and whatif.

filter_window() makes the RequestFilter with which a BreakdownSource is read.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

import click

from ttft_otel.report.store.database_reader import RequestFilter

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
AGO_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
CLOCK_PATTERN: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
WINDOW_HELP: Final = (
    "SINCE..UNTIL, each 15m or 2h (ago), 14:05 or ISO 8601. Without UNTIL: until now."
)


def parse_window(text: str, now: datetime) -> tuple[int, int]:
    """The Unix nanoseconds between which `text` lies, the end excluded; see WINDOW_HELP.

    now: with its time zone, in which clock times are read. Raises ValueError with a sentence.
    """
    # Two dots, because ISO 8601 moments and clock times already have "-" and ":" in them.
    since_text, dots, until_text = text.partition("..")
    since = _parse_moment(since_text, now)
    # `now` is the same for both ends: 1h..30m is half an hour, however long parsing takes.
    until = _parse_moment(until_text, now) if dots and until_text else now
    if since >= until:
        raise ValueError(f"{text!r} ends before it begins")
    return _to_ns(since), _to_ns(until)


def _parse_moment(text: str, now: datetime) -> datetime:
    """One moment. Raises ValueError with a sentence."""
    text = text.strip()
    try:
        if ago := AGO_PATTERN.fullmatch(text):
            return now - timedelta(seconds=float(ago[1]) * UNIT_SECONDS[ago[2]])
        if CLOCK_PATTERN.fullmatch(text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
            moment = now.replace(
                hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0
            )
            # Shortly after midnight, 23:50 is yesterday's.
            return moment if moment <= now else moment - timedelta(days=1)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):  # years before the first one are none
        raise ValueError(f"{text!r} is not a time: 15m, 2h, 14:05 or 2026-01-31T14:05") from None
    # Without a zone it is the reader's own time, as a clock time is.
    return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)


def _to_ns(moment: datetime) -> int:
    """Unix nanoseconds; exact to the microsecond, which a float of seconds is not."""
    epoch = datetime.fromtimestamp(0, moment.tzinfo)
    return (moment - epoch) // timedelta(microseconds=1) * 1000


def filter_window(text: str, model: str, last: int) -> RequestFilter:
    """The conditions for the newest `last` requests of a window. Raises click.UsageError.

    text: an option's value, clock times in the local zone; "" for all times. model: "" for all models.
    """
    since_ns = until_ns = 0
    if text:
        try:
            since_ns, until_ns = parse_window(text, datetime.now().astimezone())
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    return RequestFilter(model=model, since_ns=since_ns, until_ns=until_ns, last=last)
