# SPDX-License-Identifier: Apache-2.0
"""A database with as many plain requests as a test names, row by row: the receiver would take minutes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from tests.explain.stored_records import BEGIN_S
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.store.span_store import SpanStore

RESOURCE = {"service.name": "vllm", "service.instance.id": "chat-1"}
pack = msgspec.msgpack.Encoder().encode


def store_lengths(
    path: Path, ttfts_us: Sequence[int], every_us: int, trace_state: str = "", error_every: int = 0
) -> Path:
    """Requests with these TTFTs, `every_us` after one another; returns `path`.

    error_every: the last of so many has no first token, 0: all have one.
    """
    SpanStore(path).close()

    def get_error(number: int) -> str:
        return "timeout" if error_every and (number + 1) % error_every == 0 else ""

    def list_chunks() -> Iterator[tuple[object, ...]]:
        for number, us in enumerate(ttfts_us):
            start_ns = BEGIN_S * 10**9 + number * every_us * 1000
            end_ns = start_ns + us * 1000
            attributes: dict[str, Any] = {
                keys.ROLE: "mono",
                keys.OUTERMOST: True,
                keys.TOTAL_US: us,
                keys.UNATTRIBUTED_US: 0,
                "ttft.prefill.compute_us": us,
                keys.MODEL: "tiny",
                keys.REQUEST_ID: f"r{number}",
                keys.INPUT_TOKENS: 500,
                keys.ERROR_TYPE: get_error(number),
            }
            trunk = ("ttft", 1, start_ns, end_ns, 0, "", attributes, 0, trace_state)
            server = (
                "POST /v1/completions",
                2,
                start_ns,
                end_ns + 10**9,
                0,
                "",
                {},
                0,
                trace_state,
            )
            span, parent = ((2 * number + each).to_bytes(8, "big") for each in (1, 2))
            content = pack([trunk, server])
            yield number + 1, 1, 2, 2, 1, span + parent, parent + bytes(8), content

    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        for number, shared in ((1, RESOURCE), (2, span_names.SCOPE)):
            row = number, bytes([number]) * 16, pack(shared), len(ttfts_us)
            connection.execute("INSERT INTO shared VALUES (?,?,?,?)", row)
        connection.executemany(
            "INSERT INTO chunks (trace, resource, scope, spans, trunks, span_ids, parent_ids, content) "
            "VALUES (?,?,?,?,?,?,?,?)",
            list_chunks(),
        )
        connection.executemany(
            "INSERT INTO traces VALUES (?,?,?,2,1)",
            (
                (number + 1, (number + 1).to_bytes(16, "big"), number)
                for number in range(len(ttfts_us))
            ),
        )
        connection.executemany(
            "INSERT INTO requests (trace, number, request_id, start_ns, model, roles, ttft_us, error, "
            "pending) VALUES (?,0,?,?,'tiny','mono',?,?,0)",
            (
                (
                    number + 1,
                    f"r{number}",
                    BEGIN_S * 10**9 + number * every_us * 1000,
                    us,
                    get_error(number),
                )
                for number, us in enumerate(ttfts_us)
            ),
        )
        connection.execute("COMMIT")
    return path
