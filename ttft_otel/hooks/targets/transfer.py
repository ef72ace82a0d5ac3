# SPDX-License-Identifier: Apache-2.0
"""Targets in connectors, of the encoder cache and of KV blocks; hooks/{transfer,kv}.py hang in."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.row import COMPUTE, QUEUES, Place, Target

_REPORT: Final = "connectors report per-request timings"

TRANSFER: Final[tuple[Target, ...]] = (
    Target(
        "transfer.create",
        "core+worker",
        (
            Place(
                "vllm.distributed.ec_transfer.ec_connector.factory",
                "ECConnectorFactory.create_connector",
            ),
        ),
        "finds the encoder-cache connector's class",
        (*QUEUES, "dispatch", "ec.transfer", "encoder.compute"),
        "connectors are third-party classes: only their maker knows them",
        _REPORT,
        lost_encode=(*QUEUES, "dispatch", "ec.transfer", "encoder.compute", "output"),
    ),
    Target(
        "transfer.wait",
        "core",
        (),
        "ec.transfer: waiting for an item",
        (*QUEUES, "ec.transfer"),
        "connectors have no timings per request",
        _REPORT,
        reads=("request",),
        lost_encode=(),
    ),
    Target(
        "transfer.load",
        "worker",
        (),
        "ec.transfer: load",
        ("dispatch", "ec.transfer"),
        "connectors have no timings per request",
        _REPORT,
        lost_encode=(),
    ),
    Target(
        "transfer.save",
        "worker",
        (),
        "ec.transfer: save",
        ("ec.transfer", "encoder.compute", "dispatch"),
        "connectors have no timings per request",
        _REPORT,
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    Target(
        "kv.create",
        "core+worker",
        (
            Place(
                "vllm.distributed.kv_transfer.kv_connector.factory",
                "KVConnectorFactory.create_connector",
            ),
        ),
        "finds the KV connector's class",
        (*QUEUES, *COMPUTE, "kv.transfer", "sample", "output"),
        "connectors are third-party classes: only their maker knows them",
        _REPORT,
    ),
    Target(
        "kv.match",
        "core",
        (),
        "kv.transfer: how much comes from elsewhere, and since when it is on its way",
        (*QUEUES, "kv.transfer"),
        "a connector that looks for blocks, or loads them, has no event per request",
        _REPORT,
        reads=("request",),
    ),
    Target(
        "kv.arrive",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler._update_from_kv_xfer_finished"),),
        "kv.transfer: the blocks are there; those kept for another instance are freed",
        (*QUEUES, "kv.transfer"),
        "the one place that hears of it from every connector",
        _REPORT,
        reads=("kv_connector_output",),
    ),
    Target(
        "kv.keep",
        "core",
        (),
        "how long blocks are kept for another instance after the answer",
        (),
        "vLLM only counts the leases that ran out",
        _REPORT,
        reads=("request",),
        part=True,
    ),
    Target(
        "kv.load",
        "worker",
        (),
        "kv.transfer: a load inside a step",
        ("dispatch", "prefill.compute", "prefill.stall", "kv.transfer", "sample", "output"),
        "connectors have no timings per request",
        _REPORT,
    ),
    Target(
        "kv.save",
        "worker",
        (),
        "kv.transfer: a save that its step waits for",
        ("kv.transfer", "prefill.stall", "sample", "output"),
        "connectors have no timings per request",
        _REPORT,
    ),
)
