# SPDX-License-Identifier: Apache-2.0
"""The type of a patch target, and groups of stages that several targets share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ttft_otel.model.stages import STAGES


def _list_lost(*groups: str) -> tuple[str, ...]:
    return tuple(stage.name for stage in STAGES if stage.lost_with in groups)


# Losing a mark also loses its neighbours: the partition cannot know where one of them ends.
COMPUTE_STAGES: Final = _list_lost("compute")
WORKER_STAGES: Final = _list_lost("compute", "worker")
ENGINE_STAGES: Final = _list_lost("compute", "worker", "engine")
ALL_STAGES: Final = _list_lost("compute", "worker", "engine", "server")
# For `drop_when`: what has to come upstream before a patch can go.
VLLM_EMITS_IT: Final = "vLLM emits this time per request itself"


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """Address of a target: module and dotted name.

    since: first vLLM release that has it, until: first one that has not; "" is unbounded.
    """

    module: str
    name: str
    since: str = ""
    until: str = ""

    @property
    def address(self) -> str:
        """The form used in messages: "module:Class.method"."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTarget:
    """One patched function."""

    name: str
    #: The vLLM processes in which it runs: "api", "core", "worker" or "core+worker".
    process: str
    #: Where it is in each release; () for a connector's method.
    places: tuple[TargetPlace, ...] = ()
    #: A connector's method on vLLM's base classes; it is wrapped on the class that vLLM's factory makes.
    methods: tuple[TargetPlace, ...] = ()
    #: What the hook measures.
    marks: str
    #: Stages that become unattributed without it, () for a detail inside a stage; the total stays exact.
    lost: tuple[str, ...] = ()
    #: Why a patch is needed.
    why: str
    #: What vLLM has to offer before the patch can go.
    drop_when: str
    #: Parameters that the hook reads by name.
    reads: tuple[str, ...] = ()
    #: `lost` on an encoder instance; None: the same.
    lost_encode: tuple[str, ...] | None = None
