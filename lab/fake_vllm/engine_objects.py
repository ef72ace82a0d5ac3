# SPDX-License-Identifier: Apache-2.0
"""Objects of vLLM's engine core with the fields that hooks read, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def build_request(
    name: str, tokens: int, headers: Mapping[str, str] | None, *, computed: int = 0, **more: Any
) -> Any:
    """A Request of which `computed` of its prompt's `tokens` are computed; `more`: further fields."""
    return SimpleNamespace(
        request_id=name,
        trace_headers=None if headers is None else dict(headers),
        num_computed_tokens=computed,
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        **more,
    )


def build_media_item(identifier: str, offset: int = 0, length: int = 2) -> Any:
    """A media item whose `length` tokens begin at `offset` of the prompt."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def build_scheduler_output(
    tokens: Mapping[str, int],
    new: Sequence[str] = (),
    encode: Mapping[str, list[int]] | None = None,
    preempted: Sequence[str] = (),
) -> Any:
    """A SchedulerOutput: each request's tokens of the step, and the requests that it begins with.

    Args:
        encode: the items that the step encodes, by request.
    """
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        num_scheduled_tokens=tokens,
        scheduled_encoder_inputs=encode or {},
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=set(preempted) or None,
        ec_connector_metadata=None,
    )
