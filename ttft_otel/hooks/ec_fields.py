# SPDX-License-Identifier: Apache-2.0
"""Getters for the state that vLLM's encoder-cache connectors keep about media items; for hooks/ec_*.py.

Connectors have no common interface for it, so each getter looks for the attributes that it needs
(rather than for a class or release) and returns nothing where they are absent. None of them calls a
connector's methods, which could start a transfer or drain a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

MAX_ANNOUNCED: Final = 1024  # entries of a request's ec_transfer_params that are read
MAX_ENCODING_BYTES: Final = 1 << 40  # of one encoding; larger values are taken for invalid

_BASE_CLASS: Final = "ECConnectorBase"


def has_own_method(kind: type, name: str) -> bool:
    """Whether the class `kind` defines the method `name` itself, not only inherits vLLM's empty one."""
    for base in kind.__mro__:
        # The first class of the MRO that has it is the one whose method is called.
        if name in vars(base):
            return base.__name__ != _BASE_CLASS
    return False


def is_consumer(connector: Any) -> bool:
    """Whether `connector` takes encodings from other instances."""
    return bool(getattr(connector, "is_consumer", False))


def get_announced_params(request: Any) -> dict[str, Any]:
    """The `ec_transfer_params` with which `request` came; {} without any.

    Read from the sampling parameters, not from the request: there ECCPUConnector removes an item whose
    transfer failed (cpu/scheduler `_fail_or_fallback`), and such an item has to count as recomputed.
    """
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    params = extra.get("ec_transfer_params") if isinstance(extra, dict) else None
    return params if isinstance(params, dict) else {}


def list_announced_names(params: dict[str, Any]) -> tuple[set[str], list[int]]:
    """The items named in ec_transfer_params: their mm_hashes, and positions in the list of items.

    params: items by mm_hash (vLLM 0.32), or in a list `ec_items` (0.29, and requests of
    ECMooncakeConnector) whose entries may have no hash. At most MAX_ANNOUNCED of each are read.
    """
    # Bounded: the parameters come with the request's body, from anybody.
    names = {name for name, item in islice(params.items(), MAX_ANNOUNCED) if isinstance(item, dict)}
    places: list[int] = []
    items = params.get("ec_items")
    for place, item in enumerate(items[:MAX_ANNOUNCED] if isinstance(items, list) else ()):
        if isinstance(item, dict):
            name = item.get("mm_hash")
            if name is None:
                places.append(place)
            else:
                names.add(str(name))
    return names, places


def find_cache_test(connector: Any) -> Callable[[str], bool] | None:
    """A function that says for an mm_hash whether its encoding is in the connector's local cache.

    None where the connector has no local cache that we know.
    """
    cache = getattr(getattr(connector, "connector_scheduler", None), "_cache", None)
    if cache is not None and hasattr(cache, "get"):  # ECCPUConnector
        return lambda name: bool(getattr(cache.get(name), "ready", False))
    delegate = getattr(connector, "_scheduler", None)
    resident = getattr(delegate, "_local_cache", None)
    if isinstance(resident, set):  # ECMooncakeConnector
        return lambda name: (
            name in resident or any(map(_is_cached, list_pushed_items(connector, name)))
        )
    return None


def list_pushed_items(connector: Any, name: str) -> list[Any]:
    """ECMooncakeConnector's records of transfers of the item `name` to this instance."""
    table = getattr(getattr(connector, "_scheduler", None), "_transfers", None)
    records = getattr(table, "_records", None)
    by_hash = getattr(table, "_hash_index", None)
    if not isinstance(records, dict) or not isinstance(by_hash, dict):
        return []
    return [records[key] for key in by_hash.get(name, ()) if key in records]


def _is_cached(record: Any) -> bool:
    """Whether a pushed item is one that an earlier request had loaded."""
    state = getattr(getattr(record, "state", None), "name", "")
    return state in ("READY", "RESIDENT") or bool(getattr(record.spec, "local", False))


def find_item_bytes(connector: Any, request: Any, name: str) -> int:
    """Bytes of the item `name` that was fetched from another instance; 0 where that is unknown."""
    announced = get_announced_params(request).get(name)
    size = announced.get("size_bytes") if isinstance(announced, dict) else None
    # Without a size in the params: ECMooncakeConnector's scheduler has that of the transfer.
    if size is None:
        sizes = [
            getattr(record.spec, "nbytes", None) for record in list_pushed_items(connector, name)
        ]
        size = next((each for each in sizes if each), None)
    return size if isinstance(size, int) and 0 < size <= MAX_ENCODING_BYTES else 0
