# SPDX-License-Identifier: Apache-2.0
"""Two vLLM servers and a router for each policy, for experiments.py: start, reset, ask, stop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ttft_otel import names
from ttft_otel.lab import fleet, models, ports, processes, recipes
from ttft_otel.lab.recipes import Command
from ttft_otel.lab.servers import Progress, Server, running

# Servers, routers and the load share the processors; the latter two go first, as with one of their own.
FIRST: Final = ("chrt", "--rr", "1") if os.geteuid() == 0 and shutil.which("chrt") else ()
MODEL: Final = models.Recipe(vision=False, hidden=512, layers=8)  # 4k tokens take over a second
NOWHERE: Final = {names.ENV_ENDPOINT: "http://127.0.0.1:9"}


class Stage:
    """What runs: two servers and a router for each policy."""

    def __init__(
        self,
        backends: Sequence[str],
        servers: Sequence[Server],
        routers: dict[str, Server],
        admin: dict[str, int],
    ) -> None:
        """`servers`: those that were started for this."""
        self.backends, self.servers = backends, servers
        self.routers, self.admin = routers, admin

    def forget(self) -> bool:
        """Empty the servers' prefix caches; False if they do not let us."""
        return all([self._reset(url) and self._tell(url) for url in self.backends])

    def learnt(self, policy: str) -> Any:
        """What the router says of its instances: predictions and their errors are in it."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin[policy]}/instances", timeout=10
        ) as answer:
            return json.load(answer)

    def busy(self) -> list[float]:
        """Seconds of processor time that each server has used."""
        return [sum(map(_spent, processes.of_session(server.pid))) for server in self.servers]

    @staticmethod
    def _tell(url: str) -> bool:
        """An idle engine tells the routers of its reset with its next step."""
        body = json.dumps({"model": "tiny", "prompt": [11], "max_tokens": 1}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", method="POST", data=body)
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return bool(answer.status == 200)

    @staticmethod
    def _reset(url: str) -> bool:
        for _ in range(50):
            asked = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST", data=b"")
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:
                    if json.load(answer)["success"]:
                        return True
            except urllib.error.HTTPError:
                return False
            time.sleep(0.1)  # the last request's blocks are still held
        return False


@contextlib.contextmanager
def staged(
    urls: Sequence[str], policies: Mapping[str, Sequence[str]], folder: Path, progress: Progress
) -> Iterator[Stage]:
    """Start servers unless there are URLs, and the routers with these flags; gone when the block ends."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        if not urls:
            commands = [_server(folder, core) for core in (0, 1)]
            up = running(*commands, timeout=600, progress=progress, logs=folder)
            servers = stack.enter_context(up)
            urls = [each.url for each in servers]
        admin = {policy: ports.free() for policy in policies}
        routers = [_router(policy, urls, port, policies[policy]) for policy, port in admin.items()]
        before = running(*routers, timeout=120, progress=progress, logs=folder)
        named = dict(zip(admin, stack.enter_context(before), strict=True))
        yield Stage(urls, servers, named, admin)


def _server(folder: Path, core: int) -> Command:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/{core}.ipc",
        "replay_endpoint": f"ipc://{folder}/{core}-replay.ipc",
        "topic": "kv",
    }
    extra = (
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events)),
    )
    env = {names.ENV_ON: "1", "VLLM_SERVER_DEV_MODE": "1", **NOWHERE}
    model = models.build(MODEL)
    made = recipes.mono(recipes.Options(model=model, core=core, extra=extra, env=env))
    return replace(made, name=f"vllm-{core}")


def _router(policy: str, urls: Sequence[str], admin: int, more: Sequence[str]) -> Command:
    flags = ("--admin-port", str(admin), *more)
    made = fleet.router({"mono": urls}, {names.ENV_ON: "0", **NOWHERE}, *flags)
    return replace(made, name=f"router-{policy}", argv=(*FIRST, *made.argv))


def _spent(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has ended since it was found
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
