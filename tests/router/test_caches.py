# SPDX-License-Identifier: Apache-2.0
"""What the router reads of an instance's KV cache, and when it asks for it."""

from __future__ import annotations

import asyncio

import pytest

from router import fakes, pd
from ttft_otel.router import caches, choose
from ttft_otel.router.caches import Cache, Caches, read

PAGE = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="%s",engine="0"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


@pytest.mark.parametrize(
    ("metrics", "version", "cache"),
    [
        (PAGE % b"True", b'{"version":"0.32.0+cpu"}', Cache(16, True, (0, 32))),
        (PAGE % b"False", b'{"version": "0.29.1.dev3"}', Cache(16, False, (0, 29))),
        (b"", b"", Cache()),
        (b'vllm:cache_config_info{block_size="None"} 1.0\n', b"{}", Cache()),
        (b"<html>", b"<html>", Cache()),
    ],
)
def test_pages(metrics: bytes, version: bytes, cache: Cache) -> None:
    """Block size, prefix caching and release; what is not there is unknown, never guessed."""
    assert read(metrics, version) == cache


def test_asked_once_and_again_when_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known is not asked for again; too old is asked for behind the requests, which do not wait."""

    async def scenario() -> None:
        async with pd.fleet("off") as fleet:
            legs = fleet.router.app.forward.legs
            found, instances = Caches(legs), legs.fleet.get("decode")
            found.renew(instances)
            assert await found.of(instances) == [Cache(pd.BLOCK, True, (0, 32))]
            fleet.model.block = 4
            found.renew(instances)
            await asyncio.sleep(0.05)
            assert (await found.of(instances))[0].block == pd.BLOCK
            monkeypatch.setattr(caches, "FRESH", 0)
            old = Caches(legs)
            old.renew(instances)
            assert (await old.of(instances))[0].block == 4
            fleet.model.block = 32
            old.renew(instances)
            assert (await old.of(instances))[0].block == 4
            await asyncio.sleep(0.05)
            assert (await old.of(instances))[0].block == 32

    fakes.run(scenario)


def test_silence_is_unknown() -> None:
    """An instance that does not answer has no known cache, and nothing fails."""

    async def scenario() -> None:
        async with pd.fleet("off") as fleet:
            found = Caches(fleet.router.app.forward.legs)
            nobody = (choose.instance(fakes.unused(), "decode"),)
            assert await found.of(nobody) == [Cache()]
            found.renew(nobody)
            assert await found.of(nobody) == [Cache()]

    fakes.run(scenario)
