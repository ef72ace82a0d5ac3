# SPDX-License-Identifier: Apache-2.0
"""KV blocks from two places at once, another instance and a CPU tier: which one answered is told.

It takes minutes and runs only with `scripts/test --full`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from lab import tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan, start_deployment
from lab.server_commands import VllmOptions
from tests.live.bench import LiveDeployment, make_parent_header, make_trace_id
from tests.live.conftest import DeploymentDeck
from tests.live.server_plans import BLOCK_TOKENS
from tests.live.test_pd import LEGS, get_trunks_by_role
from ttft_otel.model.names import keys, span_names

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 2**27,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "ttft_inject.host_offload",
    },
}
BOTH = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, OFFLOAD]},
}


@pytest.fixture(scope="module")
def tiers(
    deck: DeploymentDeck, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveDeployment]:
    """Prefill and decode over NIXL; each offloads its blocks to memory, too."""
    deck.stop_running()
    folder = tmp_path_factory.mktemp("tiers")
    control = InjectionControl(folder / "control.json")
    options = VllmOptions(
        model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
        control=control.path,
        extra=("--kv-transfer-config", json.dumps(BOTH)),
        env={"VLLM_SERVER_DEV_MODE": "1"},  # its own cache can be reset
    )
    plan = DeploymentPlan("pd", options, folder=folder, env={"TTFT_OTEL_GUARD": "keep"})
    with start_deployment(plan) as running:
        bench = LiveDeployment(running, control)
        bench.prefill_then_decode()
        yield bench


def test_another_instance_is_told(tiers: LiveDeployment) -> None:
    """Blocks that decode fetches from prefill came from an instance, by NIXL, with the bytes of its read."""
    trace = make_trace_id()
    tiers.prefill_then_decode(headers=make_parent_header(trace))
    found = get_trunks_by_role(tiers.wait_for_roles(trace, *LEGS, also=span_names.KV_KEPT))

    own = found["decode"]
    assert own[keys.UNATTRIBUTED_US] == 0 < own[keys.name_stage_attribute("kv.transfer")]
    assert own[keys.KV_CONNECTOR].startswith("Nixl") and own[keys.KV_SOURCE] == "p2p"
    assert own[keys.KV_BYTES] > 0 and own[keys.KV_MOVE_US] > 0
    assert keys.KV_SOURCE not in found["prefill"]


def test_cpu_tier_is_told(tiers: LiveDeployment) -> None:
    """Blocks that this instance had offloaded came from its host, by OffloadingConnector."""
    prompt, url = str(tiers.new_picture_seed()), tiers.fleet.get_url("prefill")
    for _ in range(2):
        answer, trace = tiers.send_traced(url, prompt=prompt, words=300, max_tokens=4, stream=False)
        assert answer.status == 200
        urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"", timeout=10).close()
    own = tiers.fetch_ttft(trace)

    assert own[keys.UNATTRIBUTED_US] == 0 < own[keys.name_stage_attribute("kv.transfer")]
    assert (own[keys.KV_CONNECTOR], own[keys.KV_SOURCE]) == ("OffloadingConnector", "host")
    assert own[keys.KV_TOKENS] == own[keys.CACHED_TOKENS] == own[keys.KV_BLOCKS] * BLOCK_TOKENS
    assert own[keys.KV_BYTES] > 0 and own[keys.KV_MOVE_US] > 0
