# SPDX-License-Identifier: Apache-2.0
"""JSON bodies of every kind, judged by vLLM's own models: what it accepts passes as it is."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from router import fake_instances, raw_http
from router.fake_instances import FakeInstance, InstancePlan, RunningRouter

from attack.openai_bodies import make_body
from attack.vllm_oracle import VllmOracle, run_oracle
from ttft_otel.router.disagg.request_body import MAX_LENIENT_JSON_BYTES

pytestmark = pytest.mark.slow

OWN_PARAMS = ("kv_transfer_params", "ec_transfer_params")
MODEL = "tiny"


@pytest.fixture(scope="module")
def oracle() -> Iterator[VllmOracle]:
    """vLLM's models, which take seconds to import."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with run_oracle() as running:
        yield running


def read_json(data: bytes) -> Any:
    """As vLLM reads it; None if it does not."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def list_own_params(fields: Any) -> list[dict[str, Any]]:
    """The objects in which vLLM looks for transfer parameters and that have some."""
    holders = [fields, fields.get("vllm_xargs")] if isinstance(fields, dict) else []
    return [
        each
        for each in holders
        if isinstance(each, dict) and any(name in each for name in OWN_PARAMS)
    ]


def strip_own_params(fields: Any) -> str:
    """What must be left of a body, as text: numbers that are none are not equal to themselves."""
    for holder in list_own_params(fields):
        for name in OWN_PARAMS:
            holder.pop(name, None)
    return json.dumps(fields)


def is_refused_by_us(data: bytes, fields: Any) -> bool:
    """Whether a documented limit of the router, or a model that nobody has, is a reason to refuse."""
    model = fields.get("model") if isinstance(fields, dict) else None
    if isinstance(model, str) and model and model != MODEL:
        return True
    return len(data) > MAX_LENIENT_JSON_BYTES  # then it must be JSON that every parser reads


async def judge_body(
    router: RunningRouter, one: FakeInstance, oracle: VllmOracle, path: str, data: bytes
) -> str:
    """Send one body and compare; what became of it."""
    accepted = oracle.accepts(path, data)
    one.received.clear()
    request = raw_http.encode_request(body=data, path=path)
    answer = await raw_http.send_bytes(router.url, request, timeout_s=60)
    status = raw_http.parse_status(answer)
    fields = read_json(data)
    if status != 200:
        assert status in (400, 404), (status, data[:500])
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert not one.received
        assert not accepted or is_refused_by_us(data, fields), (status, answer, data[:500])
        return f"refused, {'accepted' if accepted else 'refused'} by vLLM"
    (forwarded,) = one.received
    if fields is None:  # the router's parser lets some pass that Python's does not read
        assert read_json(forwarded.body) is None, data[:500]
        return "unreadable"
    own_params = list_own_params(fields)
    assert not list_own_params(read_json(forwarded.body)), data[:500]
    if own_params:
        assert json.dumps(read_json(forwarded.body)) == strip_own_params(fields), data[:500]
        return "stripped"
    assert forwarded.body == data, data[:500]
    return f"unchanged, {'accepted' if accepted else 'refused'} by vLLM"


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(300, id="some"),
        pytest.param(20_000, id="many", marks=(pytest.mark.full, pytest.mark.timeout(3600))),
    ],
)
async def test_bodies(oracle: VllmOracle, number: int) -> None:
    """Each is passed byte for byte, or stripped of transfer parameters and nothing else, or refused."""
    chance = random.Random(number)
    outcomes: Counter[str] = Counter()

    plan = InstancePlan(stages_ms={})
    async with fake_instances.run_routed_instances([plan]) as (router, one):
        for _ in range(number):
            path, data = make_body(chance)
            outcomes[await judge_body(router, one, oracle, path, data)] += 1
    # The generator meets all of these: else the comparison would say little.
    assert outcomes["unchanged, accepted by vLLM"] > number / 10, outcomes
    assert outcomes["unchanged, refused by vLLM"] > number / 50, outcomes
    assert outcomes["refused, refused by vLLM"] > number / 50, outcomes
    assert outcomes["stripped"] > number / 50, outcomes
