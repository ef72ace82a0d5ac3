# SPDX-License-Identifier: Apache-2.0
"""Orders on the admin port are in the log as JSON: who, what and when; strangers cannot fill or forge it."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from router import fake_instances
from router.control.test_admin import open_admin
from router.fake_instances import InstancePlan

TOKEN = "sesame"
FORGED = 'x"}\n{"event": "ttft-otel admin order"'
ATTEMPTS = 40


async def test_orders_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Those that were done and those that were refused, one line each; of strangers one a second."""
    caplog.set_level(logging.WARNING, "ttft_otel.audit")
    began = datetime.now(timezone.utc)
    async with fake_instances.run_routed_instances([InstancePlan({})]) as (router, one):
        async with open_admin(router, TOKEN) as here:
            other = fake_instances.find_unused_url()

            async def post(order: Any, token: str = TOKEN) -> int:
                headers = {"Authorization": f"Bearer {token}", "User-Agent": "kubectl/1"}
                async with here.client.post(here.url, json=order, headers=headers) as response:
                    return response.status

            order = {"action": "add", "leg": "mono", "url": other}
            statuses = [
                await post(order),
                await post(order | {"action": "drain"}),
                await post(order | {"action": "drain", "url": FORGED}),
                await post(order | {"action": "remove", "url": "http://127.0.0.1:9"}),
                *[await post(order, "wrong") for _ in range(ATTEMPTS)],
            ]
            assert statuses == [200, 200, 400, 404, *[401] * ATTEMPTS]
            assert (await here.list_instances(Authorization=f"Bearer {TOKEN}"))[0] == 200
    lines = [each.getMessage() for each in caplog.records if each.name == "ttft_otel.audit"]
    assert not any("\n" in line for line in lines)
    entries = [json.loads(line) for line in lines]
    known, strangers = entries[:4], entries[4:]
    assert [each["status"] for each in known] == [200, 200, 400, 404]
    assert [each["order"]["action"] for each in known] == ["add", "drain", "drain", "remove"]
    assert [each["order"]["url"] for each in known] == [other, other, FORGED, "http://127.0.0.1:9"]
    assert 1 <= len(strangers) < ATTEMPTS / 4
    assert all(each["status"] == 401 and each["order"] is None for each in strangers)
    for each in entries:
        assert (each["client"], each["user_agent"]) == ("127.0.0.1", "kubectl/1")
        assert each["token"] == (each["status"] != 401)
        assert (
            timedelta()
            <= datetime.fromisoformat(each["time"]) - began + timedelta(milliseconds=1)
            < timedelta(minutes=2)
        )
