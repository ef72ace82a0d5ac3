# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes as LMCache's controller knows them (HTTP); the source behind --prefix-index lmcache.

The controller names, for each chunk, the first of its instances that has it: replicas it does not tell
of, nor what vLLM itself has cached. So what an instance was sent counts too, whichever is longer.
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

import aiohttp
import msgspec

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import History
from ttft_otel.router.prefixes.history import Sent
from ttft_otel.router.prefixes.source import prefilling

if TYPE_CHECKING:
    from ttft_otel.router.prompts.prompt import Prompt

WAIT: Final = 0.2  # seconds that a request waits for the controller's answer
AT_ONCE: Final = 64  # questions under way; a request beyond does not wait for its turn
PAUSE: Final = 1.0  # seconds without questions after one that failed
AGAIN: Final = 10.0  # seconds between two questions which instance is where
JSON: Final = {"Content-Type": "application/json"}
REMEDY: Final = "name them with --lmcache-instances, in the order of the instances or as ID=URL"
NAMELESS: Final = (
    "is not among --lmcache-instances, so that only what it is sent counts as cached there; write all "
    "as ID=URL, instances to come among them, and restart the router"
)
log: Final = logging.getLogger("ttft_otel")
_FAILED: Final = (
    *(aiohttp.ClientError, OSError, asyncio.TimeoutError),
    *(ValueError, TypeError, LookupError),  # an answer of another form
)


class LMCache(Sent):
    """Asks for each prompt; where the controller does not answer, what instances were sent counts."""

    def __init__(self, size: int, most: int, url: str, instances: Sequence[str]) -> None:
        super().__init__(History(size, most))
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is no controller of LMCache; write --lmcache-controller-url like "
                "http://127.0.0.1:9000."
            )
        self.url = url.rstrip("/")
        self.names = [name for each in instances for name in each.split(",") if name]
        self.counts: Counter[str] = Counter()
        self._urls_of: dict[str, str] = {}  # an instance's URL by LMCache's id
        self._under_way = 0
        self._nameless: set[str] = set()  # instances that are not among the names
        self._quiet = 0.0  # until then nothing is asked
        self._said = ""  # what is wrong with the addresses
        self._learning: asyncio.Future[None] | None = None

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Find out which id is which instance. Raises ValueError, with the remedy."""
        self._fleet = fleet
        if self.names:
            self._urls_of = named(self.names, [each.url for each in prefilling(fleet)])
        else:
            await self._addresses()
        await super().start(session, fleet)
        if not self.names:
            self._learning = asyncio.ensure_future(self._learn())

    def follow(self) -> None:
        """Whoever came later than the names has none: say so, once."""
        super().follow()
        nameless = self._urls - set(self._urls_of.values()) if self.names else set()
        for url in sorted(nameless - self._nameless):
            log.warning("ttft-otel: %s %s", url, NAMELESS)
        self._nameless = nameless

    async def close(self) -> None:
        """Ask nothing any more."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        await super().close()

    async def lookup(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """Tokens that each instance has; None where the controller cannot be asked."""
        if not prompt.ids or self._under_way >= AT_ONCE or monotonic() < self._quiet:
            self.counts["skipped"] += 1
            return None
        self._under_way += 1
        try:
            answer = await self._ask("lookup", {"tokens": list(prompt.ids)}, WAIT)
            told = layout(answer)
        except _FAILED as error:
            self._fail(error)
            return None
        finally:
            self._under_way -= 1
        self.counts["answered"] += 1
        size = self.index.size
        sent = self.index.match(prompt.blocks, urls)
        found = {url: depth * size for url, depth in zip(urls, sent, strict=True)}
        for name, tokens in told.items():
            url = self._urls_of.get(name)
            if url is None:
                self.counts["unknown_instance"] += 1
            elif url in found:
                found[url] = max(found[url], tokens)
        return found

    def status(self) -> dict[str, Any]:
        """Which id each instance has, and how the controller answers."""
        names = {url: name for name, url in self._urls_of.items()}
        return {
            url: {
                **told,
                "source": "lmcache",
                "instance_id": names.get(url),
                "counts": dict(self.counts),
            }
            for url, told in super().status().items()
        }

    async def _ask(self, what: str, question: Mapping[str, Any], wait: float) -> Any:
        if self._session is None:
            raise ValueError("not started")
        async with self._session.post(
            f"{self.url}/{what}",
            data=msgspec.json.encode(question),
            headers=JSON,
            timeout=aiohttp.ClientTimeout(total=wait),
        ) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read())

    def _fail(self, error: BaseException) -> None:
        self.counts["failed"] += 1
        if self.counts["failed"] == 1:
            log.warning("ttft-otel: %s does not answer /lookup: %r", self.url, error)
        self._quiet = monotonic() + PAUSE

    async def _addresses(self) -> dict[str, str]:
        """An instance's URL by its address, which is what the controller knows of it."""
        loop = asyncio.get_running_loop()
        found: dict[str, str] = {}
        for each in prefilling(self._fleet):
            try:
                address = str((await loop.getaddrinfo(each.host, None))[0][4][0])
            except OSError:
                continue
            if address in found:
                raise ValueError(
                    f"{found[address]} and {each.url} share an address, by which LMCache's "
                    f"controller cannot tell them apart; {REMEDY}."
                )
            found[address] = each.url
        return found

    async def _places(self) -> dict[str, str]:
        """The addresses; what is wrong with them, after a change of the fleet, is said once."""
        said, self._said = self._said, ""
        try:
            return await self._addresses()
        except ValueError as error:
            self._said = str(error)
            if self._said != said:
                log.warning("ttft-otel: %s", error)
            raise

    async def _learn(self) -> None:
        while True:
            try:
                for address, url in (await self._places()).items():
                    question = {"event_id": uuid4().hex, "ip": address}
                    answer = await self._ask("query_instance", question, 2.0)
                    if isinstance(answer, dict) and isinstance(answer.get("instance_id"), str):
                        self._urls_of[answer["instance_id"]] = url
            except _FAILED:
                self.counts["unlocated"] += 1
            await asyncio.sleep(AGAIN)


def named(names: Sequence[str], urls: Sequence[str]) -> dict[str, str]:
    """Instances' URLs by LMCache's ids, `ID=URL` or in order. Raises ValueError with the remedy."""
    found = {name: url.rstrip("/") for name, sign, url in (n.partition("=") for n in names) if sign}
    if not found and len(names) != len(urls):
        raise ValueError(
            f"--lmcache-instances has {len(names)} names for {len(urls)} instances; {REMEDY}."
        )
    found = found or dict(zip(names, urls, strict=True))
    if len(found) != len(names) or len(set(found.values())) != len(names):
        raise ValueError(f"--lmcache-instances has a name or a URL twice, or no URL; {REMEDY}.")
    return found


def told_apart(names: Sequence[str], instances: Sequence[Instance]) -> None:
    """Raise ValueError, with the remedy, where it is clear from the start that ids fit no instances."""
    if names:
        named(names, [each.url for each in instances])
    elif len({each.host for each in instances}) < len(instances):
        raise ValueError(
            "Instances share an address, by which LMCache's controller cannot tell them apart; "
            f"{REMEDY}."
        )


def layout(answer: Any) -> dict[str, int]:
    """Tokens by LMCache's id, from an answer of /lookup. Raises what a wrong form raises."""
    told = answer["layout_info"] if isinstance(answer, dict) and "layout_info" in answer else None
    if not isinstance(told, dict):
        raise ValueError("an answer without layout_info")
    return {name: int(place[1]) for name, place in told.items() if len(place) > 1}
