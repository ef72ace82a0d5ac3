# SPDX-License-Identifier: Apache-2.0
"""The exporter's worker: records from the inbox become spans and go out, until the inbox has ended."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from ttft_otel import record
from ttft_otel.exporter import spans
from ttft_otel.exporter.identity import Resources
from ttft_otel.exporter.inbox import Inbox
from ttft_otel.exporter.ship import Ship, exporter
from ttft_otel.guard import Guard
from ttft_otel.settings import read

GATHER: Final = 1.0  # seconds until a batch that is not full goes
RECORDS: Final = 64  # taken at once; about 16 spans each


def work(inbox: Inbox, pid: int) -> None:
    """Everything between inbox and collector; `pid` is the host's, whose spans they are."""
    settings = read()
    ship = Ship(exporter(settings), inbox.health, settings.endpoint, inbox.ended)
    pump(inbox, ship, Resources(pid))


def pump(inbox: Inbox, ship: Ship, resources: Resources) -> None:
    """Take, translate, export; one bad record is counted and costs no other."""
    while batch := inbox.take(RECORDS, GATHER):
        made: list[ReadableSpan] = []
        for data in batch:
            with Guard("exporter.spans"):
                try:
                    found = record.decode(data)
                    made += spans.build(found, resources.get(found.service))
                except ValueError:  # not a record of this version, or with broken ids
                    ship.health.add("foreign")
        ship.send(made)
        if not ship.failing:  # during an outage its one line is enough
            ship.health.tell()
