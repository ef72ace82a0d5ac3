# SPDX-License-Identifier: Apache-2.0
"""The router's /metrics about cached prefixes: how many blocks, from which source."""

from __future__ import annotations

from typing import Any

from router import fake_instances, scripted_knowledge
from ttft_otel.model.names import metric_names


class ReportingSource(scripted_knowledge.ScriptedSource):
    """One instance that publishes events, one that was sent something."""

    def describe_instances(self) -> dict[str, Any]:
        """As the real ones say it."""
        counts = {"gaps": 2, "replays": 3, "clears": 1}
        return {
            "http://a": {"source": "kv-events", "blocks": 7, "counts": counts},
            "http://b": {"source": "history", "blocks": 5},
        }


async def test_each_instances_cache_is_on_metrics() -> None:
    """Blocks by instance and source; of instances with KV events also gaps, replays and clears."""
    async with fake_instances.run_routed_instances(
        routing=scripted_knowledge.build_routing_factory(source=ReportingSource())
    ) as (router, one):
        lines = router.app.metrics.render_text().decode().splitlines()
        blocks, events = (
            metric_names.ROUTER_CACHED_BLOCKS,
            f"{metric_names.ROUTER_KV_EVENTS}_total",
        )
        assert [line for line in lines if line.startswith((blocks, events))] == [
            f'{blocks}{{instance="http://a",leg="mono",source="kv-events"}} 7.0',
            f'{blocks}{{instance="http://b",leg="mono",source="history"}} 5.0',
            f'{events}{{event="gaps",instance="http://a",leg="mono"}} 2.0',
            f'{events}{{event="replays",instance="http://a",leg="mono"}} 3.0',
            f'{events}{{event="clears",instance="http://a",leg="mono"}} 1.0',
        ]


async def test_without_prompts_and_encoders_nothing_is_known() -> None:
    """A policy that reads no prompts has no cache metrics; nothing is encoded twice without encoders."""
    async with fake_instances.run_routed_instances() as (router, one):
        text = router.app.metrics.render_text().decode()
        assert metric_names.ROUTER_INSTANCE in text
        assert metric_names.ROUTER_CACHED_BLOCKS not in text
        assert f"{metric_names.ROUTER_RECOMPUTED_ITEMS}_total{{" not in text
