# SPDX-License-Identifier: Apache-2.0
"""A connector that loads KV blocks from files inside the step: loads and saves show in kv.transfer.

It takes minutes and runs only with `scripts/test --full`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.live.bench import LiveDeployment, read_breakdown
from tests.live.conftest import DeploymentDeck
from tests.live.test_alone import run_alone
from tests.live.test_injected import check_stage
from tests.live.test_targets import BY_FILES, DELAYED, check_loss
from ttft_otel.model import stages

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
Sample = dict[str, int]


@pytest.fixture(scope="module")
def files(
    deck: DeploymentDeck, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveDeployment]:
    """A server that saves each prompt's blocks to files and loads them when the prompt comes again."""
    folder = tmp_path_factory.mktemp("files")
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "blocks")},
    }
    extra = ("--kv-transfer-config", json.dumps(config), "--no-enable-prefix-caching")
    with run_alone(deck, folder, extra) as bench:
        yield bench


def prepare_file_load(bench: LiveDeployment) -> Callable[[], Sample]:
    """A function that sends a new prompt twice and gives the second one's breakdown."""

    def once() -> Sample:
        prompt = str(bench.new_picture_seed())
        bench.send_request(bench.front_url, prompt=prompt, words=300, max_tokens=1)
        return read_breakdown(
            bench.send_request(bench.front_url, prompt=prompt, words=300, max_tokens=1)
        )

    return once


def test_a_slow_load_shows_in_kv_transfer(files: LiveDeployment) -> None:
    """A delay of 80 ms while a file is read shows in kv.transfer and nowhere else."""
    once = prepare_file_load(files)
    assert once()[stages.UNATTRIBUTED] == 0

    check_stage(files, "kv_load", "kv.transfer", once)


@pytest.mark.parametrize("target", BY_FILES)
def test_a_lost_target_costs_its_stages_with_files(files: LiveDeployment, target: str) -> None:
    """Without the hook around loads or saves, the step's time before or after them is unattributed."""
    check_loss(files, prepare_file_load(files), target, DELAYED[target])
