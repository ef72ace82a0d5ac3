# SPDX-License-Identifier: Apache-2.0
"""Prompts, answers and keys are in nothing that the router tells: records, metrics, reports and log lines."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from router import fake_instances
from router.fake_instances import InstancePlan

from ttft_otel.tracing.settings import Settings

SECRET = "a-secret-of-a-client"
KEY, UPSTREAM_KEY = "key-of-a-client", "key-of-the-instances"
BODIES: tuple[Any, ...] = (
    {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": SECRET}]},
    {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]},
    {"model": "tiny", "messages": SECRET},
    {"model": "unknown", "messages": [{"role": "user", "content": SECRET}]},
    b'{"model": "tiny", "messages": [{"content": "' + SECRET.encode(),
    {
        "model": "tiny",
        "messages": [{"content": [{"type": "image_url", "image_url": {"url": SECRET}}]}],
    },
)


@pytest.mark.parametrize("status", [200, 400, 500, 503])
async def test_nothing_of_a_body_leaves(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it is served, refused or fails, and whether its instance repeats it in an error."""
    caplog.set_level(logging.DEBUG)
    plan = InstancePlan({}, status=status, answers=lambda body: body)
    async with fake_instances.run_routed_instances(
        [plan], settings=Settings(metrics=True), keys=[KEY], key=UPSTREAM_KEY
    ) as (router, one):
        for number, body in enumerate(BODIES):
            await router.post_body(
                "/v1/chat/completions",
                body,
                Authorization=f"Bearer {KEY}",
                X_Request_Id=f"r{number}",
            )
        assert one.received and SECRET.encode() in one.received[0].body
        told = b"".join(await router.wait_for_encoded(len(BODIES)))
        assert b"r0" in told
        for path in (
            "/metrics",
            "/readyz",
            "/v1/models",
            *(f"/ttft_report/r{n}" for n in range(6)),
        ):
            headers = {"Authorization": f"Bearer {KEY}"}
            async with router.client.get(router.url + path, headers=headers) as response:
                told += await response.read()
    told += caplog.text.encode()
    for word in (SECRET, KEY, UPSTREAM_KEY):
        assert word.encode() not in told, word
