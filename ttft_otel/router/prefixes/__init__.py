# SPDX-License-Identifier: Apache-2.0
"""Which instance has which prefixes cached: `source` gives the router what --prefix-index names.

source.py what all of them are, history.py by what was sent, kvevents.py by what engines publish (with
endpoints.py, wire.py, feed.py, ledger.py, events.py), lmcache.py by what LMCache's controller says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from ttft_otel.router.prefixes.source import Source as Source

Kind = Literal["kv-events", "lmcache", "history"]
SIZE: Final = 16  # tokens of a block where no engine has told its own
MOST: Final = 65_536  # blocks of an instance's history: a million tokens


def source(
    kind: Kind,
    *,
    size: int = SIZE,
    history: int = MOST,
    kv_endpoints: Sequence[str] = (),
    lmcache_url: str = "",
    lmcache_instances: Sequence[str] = (),
) -> Source:
    """What --prefix-index names. Raises ValueError, with the remedy, for what cannot work.

    size: tokens of a block until an engine tells its own; history: blocks to remember for each
    instance that reports nothing.
    """
    if kv_endpoints and kind != "kv-events":
        raise ValueError("--kv-events-endpoint needs --prefix-index kv-events.")
    if (lmcache_url or lmcache_instances) and kind != "lmcache":
        raise ValueError("--lmcache-controller-url and -instances need --prefix-index lmcache.")
    # Only here: the router without an index needs no ZMQ.
    if kind == "kv-events":
        from ttft_otel.router.prefixes.kvevents import Events

        return Events(size, history, kv_endpoints)
    if kind == "lmcache":
        from ttft_otel.router.prefixes.lmcache import LMCache

        return LMCache(size, history, lmcache_url, lmcache_instances)
    from ttft_otel.router.policies.index import History
    from ttft_otel.router.prefixes.history import Sent

    return Sent(History(size, history))
