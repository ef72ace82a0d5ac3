# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from LMCache's controller, over HTTP: --prefix-index lmcache.

For each chunk the controller names only the first instance that has it, and it knows nothing of vLLM's
own prefix cache. Therefore the estimate from the prompts sent counts too, whichever is longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource, list_prefilling
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QUERY_ERRORS, QueryClient

if TYPE_CHECKING:
    from ttft_otel.router.routing.prompts.prompt_reader import Prompt

LOOKUP_TIMEOUT_S: Final = 0.2  # seconds that a request waits for the controller
# Lookups in flight; further requests are routed without one instead of waiting.
MAX_CONCURRENT_LOOKUPS: Final = 64
FAILURE_PAUSE_S: Final = 1.0  # seconds without lookups after a failed one
# Of an answer, which names one instance for each chunk at most once.
MAX_ANSWER_BYTES: Final = 64 << 10
LOCATE_INTERVAL_S: Final = 10.0  # seconds between two requests for the ids of the instances
NAMES_REMEDY: Final = (
    "name them with --lmcache-instances, in the order of the instances or as ID=URL"
)
UNNAMED_MESSAGE: Final = (
    "is not among --lmcache-instances, so only prompts sent to it count as cached there; list every "
    "instance as ID=URL, later ones included, and restart the router"
)
log: Final = logging.getLogger("ttft_otel")
_LOOKUP_ERRORS: Final = (
    *QUERY_ERRORS,
    # A response of another form.
    ValueError,
    TypeError,
    LookupError,
    OverflowError,  # an infinite number
    RecursionError,  # lists in lists
)


class LMCacheSource(PrefixSource):
    """Looks up each prompt at the controller; without its answer the estimate alone counts.

    url: of the controller. instances: its ids of the instances, ID or ID=URL, or empty to find them by
    IP address. Raises ValueError for a malformed URL.
    """

    def __init__(
        self, block_size: int, max_blocks: int, url: str, instances: Sequence[str]
    ) -> None:
        super().__init__(SentHistory(block_size, max_blocks))
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not the URL of an LMCache controller; write --lmcache-controller-url like "
                "http://127.0.0.1:9000."
            )
        self.url = url.rstrip("/")
        self.instance_ids = [name for listed in instances for name in listed.split(",") if name]
        self.counts: Counter[str] = Counter()
        self._url_by_id: dict[str, str] = {}  # instance URL by LMCache's id
        self._lookup_count = 0
        # Instances missing in --lmcache-instances, already logged.
        self._unnamed_urls: set[str] = set()
        self._paused_until_s = 0.0  # monotonic time until which no lookup is sent
        self._last_warning = ""  # the last logged problem with the addresses
        self._locate_task: asyncio.Future[None] | None = None

    async def start(self, queries: QueryClient, pool: InstancePool) -> None:
        """Map LMCache's ids to the instances of `pool`. Raises ValueError, with the remedy."""
        self._pool = pool
        if self.instance_ids:
            self._url_by_id = map_instance_ids(
                self.instance_ids, [each.url for each in list_prefilling(pool)]
            )
        else:
            # For what it raises: instances that share an address cannot be told apart.
            await self._resolve_addresses()
        await super().start(queries, pool)
        if not self.instance_ids:
            self._locate_task = asyncio.ensure_future(self._locate_forever())

    def sync_instances(self) -> None:
        """Follow the pool; warn once about each instance that --lmcache-instances does not name."""
        super().sync_instances()
        unnamed = self._urls - set(self._url_by_id.values()) if self.instance_ids else set()
        for url in sorted(unnamed - self._unnamed_urls):
            log.warning("ttft-otel: %s %s", url, UNNAMED_MESSAGE)
        self._unnamed_urls = unnamed

    async def close(self) -> None:
        """End the background tasks."""
        if self._locate_task is not None:
            self._locate_task.cancel()
            await asyncio.gather(self._locate_task, return_exceptions=True)
        await super().close()

    async def look_up(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """Cached tokens of `prompt` by instance URL; None if the controller was not asked or failed."""
        # Routing without the controller's answer costs less than waiting for an overloaded one.
        if (
            not prompt.token_ids
            or self._lookup_count >= MAX_CONCURRENT_LOOKUPS
            or monotonic() < self._paused_until_s
        ):
            self.counts["skipped"] += 1
            return None
        # Counted by hand: a semaphore would let requests wait, which they must not.
        self._lookup_count += 1
        try:
            answer = await self._query_controller(
                "lookup", {"tokens": list(prompt.token_ids)}, LOOKUP_TIMEOUT_S
            )
            tokens_by_id = parse_layout(answer)
        except _LOOKUP_ERRORS as error:
            self._record_failure(error)
            return None
        finally:
            self._lookup_count -= 1
        self.counts["answered"] += 1
        size = self.index.block_size
        depths = self.index.match_blocks(prompt.block_keys, urls)
        # The history's answer is the floor: vLLM's own cache is unknown to the controller.
        tokens_by_url = {url: depth * size for url, depth in zip(urls, depths, strict=True)}
        for name, tokens in tokens_by_id.items():
            url = self._url_by_id.get(name)
            if url is None:
                self.counts["unknown_instance"] += 1
            elif url in tokens_by_url:
                # Never more than the prompt has, whatever the controller says.
                tokens_by_url[url] = max(tokens_by_url[url], min(tokens, prompt.tokens))
        return tokens_by_url

    def describe_instances(self) -> dict[str, Any]:
        """By URL: LMCache's id of the instance, and the counts of lookups."""
        names = {url: name for name, url in self._url_by_id.items()}
        return {
            url: {
                **described,
                "source": "lmcache",
                "instance_id": names.get(url),
                "counts": dict(self.counts),
            }
            for url, described in super().describe_instances().items()
        }

    async def _query_controller(
        self, path: str, payload: Mapping[str, Any], timeout_s: float
    ) -> Any:
        if self._queries is None:
            raise ValueError("the source is not started")
        answer = await self._queries.ask(
            f"{self.url}/{path}",
            body=msgspec.json.encode(payload),
            timeout_s=timeout_s,
            max_bytes=MAX_ANSWER_BYTES,
        )
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        return msgspec.json.decode(answer.body)

    def _record_failure(self, error: BaseException) -> None:
        self.counts["failed"] += 1
        # Once: with every request failing, the log would be of nothing else.
        if self.counts["failed"] == 1:
            log.warning(
                "ttft-otel: LMCache controller %s does not answer /lookup, cached prefixes are estimated "
                "from the prompts sent; check --lmcache-controller-url: %r",
                self.url,
                error,
            )
        self._paused_until_s = monotonic() + FAILURE_PAUSE_S

    async def _resolve_addresses(self) -> dict[str, str]:
        """Instance URLs by IP address, by which the controller knows them. Raises ValueError."""
        loop = asyncio.get_running_loop()
        url_by_address: dict[str, str] = {}
        for instance in list_prefilling(self._pool):
            try:
                address = str((await loop.getaddrinfo(instance.host, None))[0][4][0])
            except OSError:
                continue
            if address in url_by_address:
                raise ValueError(
                    f"{url_by_address[address]} and {instance.url} share an address, so LMCache's "
                    f"controller cannot tell them apart by it; {NAMES_REMEDY}."
                )
            url_by_address[address] = instance.url
        return url_by_address

    async def _resolve_or_warn(self) -> dict[str, str]:
        """`_resolve_addresses`, logging a problem once until it changes."""
        previous_warning, self._last_warning = self._last_warning, ""
        try:
            return await self._resolve_addresses()
        except ValueError as error:
            self._last_warning = str(error)
            if self._last_warning != previous_warning:
                log.warning("ttft-otel: cannot match instances to LMCache's ids: %s", error)
            raise

    def _name_instance(self, instance_id: str, url: str) -> None:
        """Note LMCache's id of an instance, in place of an earlier one."""
        self._url_by_id = {name: each for name, each in self._url_by_id.items() if each != url} | {
            instance_id: url
        }

    async def _locate_forever(self) -> None:
        while True:
            try:
                for address, url in (await self._resolve_or_warn()).items():
                    question = {"event_id": uuid4().hex, "ip": address}
                    answer = await self._query_controller("query_instance", question, 2.0)
                    if isinstance(answer, dict) and isinstance(answer.get("instance_id"), str):
                        self._name_instance(answer["instance_id"], url)
            except _LOOKUP_ERRORS:
                self.counts["unlocated"] += 1
            await asyncio.sleep(LOCATE_INTERVAL_S)


def map_instance_ids(names: Sequence[str], urls: Sequence[str]) -> dict[str, str]:
    """Map LMCache's ids to instance URLs. Raises ValueError with the remedy.

    names: all as ID=URL, or all as ID in the order of `urls`.
    """
    url_by_id = {
        name: url.rstrip("/") for name, sign, url in (n.partition("=") for n in names) if sign
    }
    if not url_by_id and len(names) != len(urls):
        raise ValueError(
            f"--lmcache-instances has {len(names)} names for {len(urls)} instances; {NAMES_REMEDY}."
        )
    url_by_id = url_by_id or dict(zip(names, urls, strict=True))
    if len(url_by_id) != len(names) or len(set(url_by_id.values())) != len(names):
        raise ValueError(
            f"--lmcache-instances repeats a name or URL, or lacks a URL; {NAMES_REMEDY}."
        )
    return url_by_id


def check_instance_ids(names: Sequence[str], instances: Sequence[Instance]) -> None:
    """Raise ValueError, with the remedy, if `names` cannot be matched with `instances`."""
    if names:
        map_instance_ids(names, [each.url for each in instances])
    elif len({each.host for each in instances}) < len(instances):
        raise ValueError(
            "Instances share an address, so LMCache's controller cannot tell them apart by it; "
            f"{NAMES_REMEDY}."
        )


def parse_layout(answer: Any) -> dict[str, int]:
    """Cached tokens by LMCache's id, from a decoded response of /lookup.

    answer: `layout_info` maps an id to [location, tokens]. Raises one of _LOOKUP_ERRORS for other forms.
    """
    places = answer["layout_info"] if isinstance(answer, dict) and "layout_info" in answer else None
    if not isinstance(places, dict):
        raise ValueError("the /lookup response has no layout_info object")
    return {name: int(place[1]) for name, place in places.items() if len(place) > 1}
