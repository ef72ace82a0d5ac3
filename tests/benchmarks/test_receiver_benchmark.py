# SPDX-License-Identifier: Apache-2.0
"""The receiver's benchmark sends what exporters send, and stops where something is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import receiver
from benchmarks.exporter_records import SPANS_PER_REQUEST
from ttft_otel.report.receive import otlp_decoder


def test_bodies() -> None:
    """All spans of each request are there once, and some requests' halves are in different bodies."""
    exports = [
        otlp_decoder.decode_export(body).spans for body in receiver.build_export_bodies(1, 200)
    ]
    sizes = Counter(span.trace_id for spans in exports for span in spans)
    assert len(sizes) == 200 and set(sizes.values()) == {SPANS_PER_REQUEST}
    places = [{span.trace_id for span in spans} for spans in exports]
    assert places[0] & places[1]


@pytest.mark.parametrize("protocol", receiver.PROTOCOLS)
def test_whole_round(tmp_path: Path, protocol: str) -> None:
    """A round with a real receiver gives all figures; a body that it refuses ends the benchmark."""
    costs = receiver.ReceiverCosts()
    with (
        receiver.run_receiver(tmp_path / "spans.db") as (pid, http_port, grpc_port),
        receiver.connect(protocol, http_port, grpc_port) as send,
    ):
        assert receiver.measure_round(pid, send, 1, 50.0, 0.4, costs) == 41
        figures = receiver.build_receiver_figures(protocol, costs)
        assert all(figure["value"] >= 0 for figure in figures.values())
        assert figures[f"{protocol}_flood_request_us"]["value"] > 0
        with pytest.raises(Exception, match=r"refused|INVALID_ARGUMENT"):
            send(b"no protobuf")
