# SPDX-License-Identifier: Apache-2.0
"""A connector that loads KV blocks inside the step, from files: the worker's own pairs are kv.transfer.

Long: it runs with `scripts/test --full`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.live import test_injected, test_targets
from tests.live.bench import Bench, again, breakdown
from tests.live.conftest import Deck
from tests.live.test_alone import alone
from tests.live.test_injected import compare
from tests.live.test_targets import BY_FILES, DELAYED, paired
from ttft_otel import stages

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
Sample = dict[str, int]


@pytest.fixture(scope="module")
def files(deck: Deck, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server that saves each prompt's blocks to files, and loads them for the next one like it."""
    folder = tmp_path_factory.mktemp("files")
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "blocks")},
    }
    extra = ("--kv-transfer-config", json.dumps(config), "--no-enable-prefix-caching")
    with alone(deck, folder, extra) as bench:
        yield bench


def loading(bench: Bench) -> Callable[[], Sample]:
    """A new prompt, then the same again: the second one's breakdown."""

    def once() -> Sample:
        prompt = str(bench.fresh())
        bench.ask(bench.front, prompt=prompt, words=300, max_tokens=1)
        return breakdown(bench.ask(bench.front, prompt=prompt, words=300, max_tokens=1))

    return once


@again
def test_a_slow_load_shows_in_kv_transfer(files: Bench) -> None:
    """80 ms while a file is read: in kv.transfer, nowhere else, and nothing is left over."""
    once = loading(files)
    assert once()[stages.UNATTRIBUTED] == 0

    test_injected.check(compare(files, "kv_load", once), "kv.transfer")


@pytest.mark.parametrize("target", BY_FILES)
@again
def test_a_lost_target_costs_its_stages_with_files(files: Bench, target: str) -> None:
    """Without the hook around loads, or saves, the step's time before or after is unattributed."""
    full, found = paired(files, loading(files), target, DELAYED[target])

    test_targets.check(target, False, full, found)
