# SPDX-License-Identifier: Apache-2.0
"""The original report's field names, made from microsecond sums per role."""

from __future__ import annotations

from ttft_otel.model.ttft_report import StageSums, build_ttft_report

ENCODE: StageSums = {
    "stages": {"encoder.queue": 1500, "encoder.compute": 7000, "ec.transfer": 400},
    "unattributed": 100,
    "ttft": 9000,
}
DECODE: StageSums = {
    "stages": {"prefill.queue": 2000, "ec.transfer": 600, "prefill.compute": 30001},
    "unattributed": 0,
    "ttft": 32601,
}
CLIENT: StageSums = {
    "stages": {
        "router.receive": 50,
        "router.hop.encode": 300,
        **{f"encode.{name}": us for name, us in ENCODE["stages"].items()},
        **{f"prefill_decode.{name}": us for name, us in DECODE["stages"].items()},
    },
    "unattributed": 120,
    "ttft": 41971,
}


def test_combined() -> None:
    """The combined entry sums the legs' stages under the original names, transfers of both legs."""
    report = build_ttft_report("r1", {"encode": ENCODE, "prefill_decode": DECODE}, CLIENT)
    combined = report["combined"]
    assert {name: value for name, value in combined.items() if name != "stages"} == {
        "enc_queue_time_ms": 1.5,
        "enc_compute_time_ms": 7.0,
        "emb_cache_transfer_time_ms": 1.0,
        "prefill_queue_time_ms": 2.0,
        "prefill_compute_time_ms": 30.001,
        "ttft_ms": 41.971,
        "unattributed_ms": 0.12,
    }
    assert report["by_role"]["encode"]["emb_cache_transfer_time_ms"] == 0.4
    assert "prefill_queue_time_ms" not in report["by_role"]["encode"]
    assert combined["stages"]["prefill_decode.prefill.compute"] == 30.001


def test_router_share() -> None:
    """The router's entry is what no leg accounts for, and it closes like every other entry."""
    report = build_ttft_report("r1", {"encode": ENCODE, "prefill_decode": DECODE}, CLIENT)
    assert report["by_role"]["router"] == {
        "ttft_ms": 0.37,
        "unattributed_ms": 0.02,
        "stages": {"router.receive": 0.05, "router.hop.encode": 0.3},
    }


def test_without_router() -> None:
    """Legs alone are added up; one server alone keeps its stages' own names."""
    both = build_ttft_report("r1", {"encode": ENCODE, "prefill_decode": DECODE})["combined"]
    assert both["ttft_ms"] == 41.601
    assert both["stages"]["encode.encoder.compute"] == 7.0
    alone = build_ttft_report("r2", {"mono": DECODE})
    assert alone["combined"]["stages"] == alone["by_role"]["mono"]["stages"]
    assert alone["combined"]["enc_queue_time_ms"] == 0.0
