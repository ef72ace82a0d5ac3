# SPDX-License-Identifier: Apache-2.0
"""The functions of stages.py."""

from __future__ import annotations

import pytest

from ttft_otel.model import stages


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("prefill.queue", ("", "prefill.queue")),
        ("prefill.prefill.queue", ("prefill", "prefill.queue")),
        ("encode.encoder.compute", ("encode", "encoder.compute")),
        ("prefill_decode.output", ("prefill_decode", "output")),
        ("encode.unattributed", ("encode", "unattributed")),
        ("router.hop.encode", ("", "router.hop.encode")),
        ("encode", ("", "encode")),
        ("", ("", "")),
    ],
)
def test_split(name: str, split: tuple[str, str]) -> None:
    """A leg's prefix is told from a stage's own dot."""
    assert stages.split_stage(name) == split


@pytest.mark.parametrize(
    "name",
    [
        *stages.STAGE_NAMES,
        *stages.ROUTER_STAGES,
        "router.hop.decode",
        "mono.sample",
        "unattributed",
    ],
)
def test_known(name: str) -> None:
    """Stages, the router's own, and a leg's belong to the vocabulary."""
    assert stages.is_known_stage(name)


@pytest.mark.parametrize("name", ["", "ttft", "queue", "router.hop.other", "other.sample", "rest"])
def test_unknown(name: str) -> None:
    """Nothing else does."""
    assert not stages.is_known_stage(name)


def test_rows() -> None:
    """Every stage has a sentence, roles that exist, and parts that lie in stages that exist."""
    for stage in stages.STAGES:
        assert stage.says.endswith(".") and set(stage.roles) <= set(stages.ROLES)
        assert "router" not in stage.roles
    assert set(stages.STAGE_PARTS) <= set(stages.STAGE_NAMES)
    assert set(stages.SERVICE_NAMES) == set(stages.ROLES)
