# SPDX-License-Identifier: Apache-2.0
"""KV connectors of any class: waiting for blocks from elsewhere, loads and saves inside a step, and how
long an instance keeps blocks for another one.

As in transfer.py the factory is the patched target, and the methods of the class it made are wrapped
then. Waits go to the request's Journey, loads and saves into the worker's open step; `sent` answers
the API server's question how long blocks were kept, over vLLM's own utility channel.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, Final

from ttft_otel import breakdown, clock
from ttft_otel.carrier import Journey, Kept
from ttft_otel.hooks import worker, wrap
from ttft_otel.hooks.targets import BY_NAME

TRIVIAL: Final = 50  # us: a load or save that returned within them moved nothing
LIMIT: Final = 8192
UNASKED: Final = 256


class Hold:
    """Blocks of an answered request, kept for another instance."""

    __slots__ = ("blocks", "since", "tokens", "told")

    def __init__(self, tokens: int, blocks: int) -> None:
        self.since = clock.now()
        self.tokens = tokens
        self.blocks = blocks
        self.told: Future[str] | None = None  # whoever asked before they were fetched


# By engine request: blocks on their way here (its Journey), or kept here (a Hold). Empty: costs nothing.
moving: dict[str, Journey | Hold] = {}
gone: OrderedDict[str, str] = OrderedDict()  # fetched before anybody asked


def created(_: None, connector: Any, *args: Any, **kwargs: Any) -> None:
    """After create_connector(): wrap what this class has."""
    kind = type(connector)
    for target, names in METHODS.items():
        for name in names:
            if hasattr(kind, name):
                wrap.put(BY_NAME[target], kind, name, HOOKS[target])


def matched(_: None, found: Any, connector: Any, request: Any, *args: Any, **kw: Any) -> None:
    """After get_num_new_matched_tokens(): None is "still looking"; asked until the blocks are allocated."""
    journey = getattr(request, "_ttft", None)
    if journey is None or journey.scheduled:
        return  # after a preemption it is stall, whatever it waits for
    count, later = found
    if count is None:
        journey.looking = journey.looking or clock.now()
        return
    if journey.looking:
        journey.waits += (breakdown.BLOCKS, journey.looking, clock.now())
        journey.looking = 0
    if journey.moving:  # there was no room, it is asked again
        moving.pop(request.request_id, None)
        journey.moving = 0
    journey.blocks = [count, 0, 0, 0] if count else []
    if count and later:
        journey.moving = clock.now()
        _remember(request.request_id, journey)


def _remember(request_id: str, state: Journey | Hold) -> None:
    if len(moving) >= LIMIT:
        oldest = moving.pop(next(iter(moving)))
        if isinstance(oldest, Hold) and oldest.told is not None:
            oldest.told.set_result("")  # nobody will know: whoever asked need not wait on
    moving[request_id] = state


def scheduled(journey: Journey, request_id: str, block_size: int) -> bool:
    """Its first chunk is scheduled: whether it may have waited for blocks, unseen."""
    if journey.blocks and block_size:
        journey.blocks[1] = -(-journey.blocks[0] // block_size)
    lost = bool(journey.cached) and not wrap.active("kv.match")
    if journey.moving:
        # Loaded inside the step after all, or nobody saw them arrive.
        moving.pop(request_id, None)
        journey.moving = 0
        lost = lost or not wrap.active("kv.arrive")
    return lost


def arriving(scheduler: Any, kv_connector_output: Any) -> None:
    """Before _update_from_kv_xfer_finished(): whose blocks are here, whose were fetched."""
    came = kv_connector_output.finished_recving
    for request_id in came or ():
        journey = moving.pop(request_id, None)
        if isinstance(journey, Journey) and journey.moving:
            journey.waits += (breakdown.BLOCKS, journey.moving, clock.now())
            journey.moving = 0
            if len(came) == 1 and journey.blocks:  # the connector's figures are per step
                journey.blocks[2:] = figures(kv_connector_output)
    for request_id in kv_connector_output.finished_sending or ():
        hold = moving.pop(request_id, None)
        if isinstance(hold, Hold):
            _fetched(request_id, hold, expired(kv_connector_output))


def figures(output: Any) -> list[int]:
    """Bytes moved and the longest of the moves in microseconds, where the connector tells (NIXL)."""
    told = getattr(getattr(output, "kv_connector_stats", None), "data", None)
    if not isinstance(told, dict):
        return [0, 0]
    longest = max(told.get("transfer_duration", ()), default=0.0)
    return [int(sum(told.get("bytes_transferred", ()))), int(longest * 1e6)]


def expired(output: Any) -> bool:
    """Whether these leases ran out: nobody came for the blocks (NIXL)."""
    told = getattr(getattr(output, "kv_connector_stats", None), "data", None)
    over = told.get("num_kv_expired_reqs", ()) if isinstance(told, dict) else ()
    return len(over) >= len(output.finished_sending)


def keeping(
    _: None, result: Any, connector: Any, request: Any, block_ids: Any, *args: Any, **kw: Any
) -> None:
    """After request_finished(): the connector keeps the blocks for another instance."""
    journey = getattr(request, "_ttft", None)
    if journey is None or journey.sent or not result[0]:
        return
    groups = block_ids if isinstance(block_ids, tuple) else (block_ids,)
    journey.kept = True
    _remember(request.request_id, Hold(request.num_computed_tokens, max(map(len, groups))))


def _fetched(request_id: str, hold: Hold, over: bool) -> None:
    text = Kept(hold.since, clock.now(), hold.tokens, hold.blocks, over).fold()
    if hold.told is not None:
        hold.told.set_result(text)
        return
    gone[request_id] = text
    if len(gone) > UNASKED:
        gone.popitem(last=False)


def sent(core: Any, request_id: str) -> Any:
    """Utility call: how long its blocks were kept, as soon as that is known; "" when nobody knows."""
    hold = moving.get(request_id)
    if not isinstance(hold, Hold):
        return gone.pop(request_id, "")
    hold.told = hold.told or Future()
    return hold.told


def working(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """Before a load or a save: the stamp, and the host's time."""
    return worker.opened[0].stamp(), clock.now()


def worked(begin: tuple[int, int] | None, *args: Any, **kwargs: Any) -> None:
    """After it: most connectors only look at an empty list here, on every step."""
    if begin is not None and worker.opened and clock.now() - begin[1] >= TRIVIAL:
        worker.opened[0].close(breakdown.BLOCKS, begin[0])


METHODS: Final = {
    "kv.match": ("get_num_new_matched_tokens",),
    "kv.keep": ("request_finished", "request_finished_all_groups"),
    "kv.load": ("start_load_kv",),
    "kv.save": ("wait_for_save",),
}

HOOKS: Final = {
    "kv.create": wrap.Hook(after=created),
    "kv.match": wrap.Hook(after=matched),
    "kv.arrive": wrap.Hook(before=arriving, ready=moving),
    "kv.keep": wrap.Hook(after=keeping),
    "kv.load": wrap.Hook(before=working, after=worked, ready=worker.opened),
    "kv.save": wrap.Hook(before=working, after=worked, ready=worker.opened),
}
