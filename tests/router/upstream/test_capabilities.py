# SPDX-License-Identifier: Apache-2.0
"""What the router reads of an instance's KV cache, and when it asks for it."""

from __future__ import annotations

import asyncio

import pytest

from router import fake_instances, fake_pair
from ttft_otel.router import types
from ttft_otel.router.upstream import capabilities
from ttft_otel.router.upstream.capabilities import (
    CapabilityCache,
    InstanceCapabilities,
    parse_capabilities,
)

METRICS_PAGE = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="%s",engine="0"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


@pytest.mark.parametrize(
    ("metrics", "version", "cache"),
    [
        (
            METRICS_PAGE % b"True",
            b'{"version":"0.32.0+cpu"}',
            InstanceCapabilities(16, True, (0, 32)),
        ),
        (
            METRICS_PAGE % b"False",
            b'{"version": "0.29.1.dev3"}',
            InstanceCapabilities(16, False, (0, 29)),
        ),
        (b"", b"", InstanceCapabilities()),
        (b'vllm:cache_config_info{block_size="None"} 1.0\n', b"{}", InstanceCapabilities()),
        (b"<html>", b"<html>", InstanceCapabilities()),
    ],
)
def test_pages(metrics: bytes, version: bytes, cache: InstanceCapabilities) -> None:
    """Block size, prefix caching and release; what is not there is unknown, never guessed."""
    assert parse_capabilities(metrics, version) == cache


async def test_asked_once_and_again_when_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known is not asked for again; too old is asked for behind the requests, which do not wait."""
    async with fake_pair.run_fleet("off") as fleet:
        legs = fleet.router.app.endpoint.upstream
        found, instances = CapabilityCache(legs), legs.pool.get("decode")
        found.refresh_stale(instances)
        assert await found.get_capabilities(instances) == [
            InstanceCapabilities(fake_pair.BLOCK_TOKENS, True, (0, 32))
        ]
        fleet.model.block = 4
        found.refresh_stale(instances)
        await asyncio.sleep(0.05)
        assert (await found.get_capabilities(instances))[0].block_size == fake_pair.BLOCK_TOKENS
        monkeypatch.setattr(capabilities, "MAX_AGE_US", 0)
        old = CapabilityCache(legs)
        old.refresh_stale(instances)
        assert (await old.get_capabilities(instances))[0].block_size == 4
        fleet.model.block = 32
        old.refresh_stale(instances)
        assert (await old.get_capabilities(instances))[0].block_size == 4
        await asyncio.sleep(0.05)
        assert (await old.get_capabilities(instances))[0].block_size == 32


async def test_silence_is_unknown() -> None:
    """An instance that does not answer has no known cache, and nothing fails."""
    async with fake_pair.run_fleet("off") as fleet:
        found = CapabilityCache(fleet.router.app.endpoint.upstream)
        nobody = (types.parse_instance_url(fake_instances.find_unused_url(), "decode"),)
        assert await found.get_capabilities(nobody) == [InstanceCapabilities()]
        found.refresh_stale(nobody)
        assert await found.get_capabilities(nobody) == [InstanceCapabilities()]
