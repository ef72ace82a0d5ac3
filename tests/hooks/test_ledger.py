# SPDX-License-Identifier: Apache-2.0
"""The ledger of targets against the sources of every supported vLLM release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttft_otel.hooks import ledger
from ttft_otel.hooks.install import HOOKS
from ttft_otel.hooks.targets import BY_NAME, EVERYTHING, TARGETS, Place, Target
from ttft_otel.lab import releases
from ttft_otel.lab.models import cache_root
from ttft_otel.stages import NAMES

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger.json"

# A wheel of 336 MB, where its sources are not in the laboratory's cache yet.
BIG = "0.33.0"
SLOW = not (cache_root() / "sources" / BIG).is_dir()
VERSIONS = [
    pytest.param(version, marks=pytest.mark.full if version == BIG and SLOW else ())
    for version in releases.RELEASES
]


def package(version: str) -> Path:
    """The vllm package of a release; a release whose files are not where we think fails here."""
    root = releases.sources(version) / "vllm"
    assert (root / "v1" / "engine" / "core.py").is_file(), f"no sources of vLLM {version}"
    return root


def within(place: Place, version: str) -> bool:
    """Whether the ledger says that this release has the place."""
    now = number(version)
    return number(place.since) <= now and (not place.until or now < number(place.until))


def number(version: str) -> tuple[int, ...]:
    """A version for comparing; "" is before all others."""
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()


@pytest.mark.parametrize("version", VERSIONS)
def test_present(version: str) -> None:
    """Every target is there in every supported release."""
    states = ledger.check(package(version))

    assert not {name: what for name, what in states.items() if what}


@pytest.mark.parametrize("version", VERSIONS)
def test_places(version: str) -> None:
    """Each single place is there too, with the parameters that are read, but for its bounds."""
    root = package(version)

    for target in TARGETS:
        states = ledger.places(root, target)
        for place in target.places:
            if within(place, version):
                assert states[f"{place.module}:{place.name}"] == "", target.name


@pytest.mark.parametrize("version", VERSIONS)
def test_golden(version: str) -> None:
    """The table of places per release changes only together with the golden file."""
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[version]

    assert expected == table(version)


def table(version: str) -> dict[str, dict[str, str]]:
    """Target -> place -> present, or what is missing."""
    root = package(version)
    return {
        target.name: {
            place: f"missing {what}" if what else "present"
            for place, what in ledger.places(root, target).items()
        }
        for target in TARGETS
        if target.places
    }


def test_unknown_release() -> None:
    """A release nobody has laid out is an error, not an empty table."""
    with pytest.raises(KeyError):
        releases.sources("9.9.9")


def test_no_sources(tmp_path: Path) -> None:
    """A folder without vLLM in it has none of vLLM's targets."""
    states = ledger.check(tmp_path)
    found = {name for name, what in states.items() if not what}

    assert found == {"frontend.app"}  # fastapi's


def test_parameter(tmp_path: Path) -> None:
    """A target whose parameter was renamed is missing, and the parameter is named."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "thing.py").write_text("class Thing:\n    def run(self, other): ...\n")
    place = Place("vllm.v1.thing", "Thing.run")
    target = Target("x", "api", (place,), "", (), "", "", reads=("request",))

    assert ledger.places(tmp_path, target) == {
        "vllm.v1.thing:Thing.run": "vllm.v1.thing:Thing.run(request)"
    }


def test_rows() -> None:
    """Every row says why, what it costs and when it can go; its stages exist; it has a hook."""
    for target in TARGETS:
        lost = {*target.lost, *(target.lost_encode or ())}
        assert target.marks and target.why and target.drop_when
        assert bool(target.lost) != target.part
        assert lost <= set(NAMES)
        assert target.name in HOOKS
    assert set(HOOKS) == set(BY_NAME)
    assert set(EVERYTHING) == set(NAMES)


def test_installed() -> None:
    """The vLLM that is installed here has every target."""
    root = ledger.root()
    if root is None:
        pytest.skip("no vLLM in this environment")

    states = ledger.check(root)

    assert set(states) == {target.name for target in TARGETS if target.places}
    assert not any(states.values())
