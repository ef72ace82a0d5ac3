# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on this machine: vLLM servers, our router before them, our receiver behind them.

demo, live tests, compat and benchmarks start it from here; servers.py runs what recipes.py describes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttft_otel import names
from ttft_otel.lab import models, ports, recipes
from ttft_otel.lab.recipes import Command, Options
from ttft_otel.lab.servers import Progress, Server, running

WAITING = "ttft_inject.connector"  # the test-only connector whose items can come late

# The router's flag for the servers of a role.
FLAGS = {
    "encode": "--encoder",
    "prefill": "--prefill",
    "decode": "--decode",
    "prefill_decode": "--backend",
    "mono": "--backend",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start; everything else as in recipes.Options.

    shape: "epd" (E, PD, router), "pd" (P, D over NIXL, router), "epd3" (E, P, D, router) or "mono".
    traced: whether the servers run with TTFT_OTEL=1. routing: more flags for the router.
    """

    shape: str = "epd"
    options: Options | None = None
    chunk: int = 512
    waiting: bool = False
    traced: bool = True
    folder: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    routing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Addresses of what runs; `servers` by name."""

    servers: dict[str, Server]
    database: Path

    def url(self, name: str) -> str:
        """Where a role (`encode`, `prefill`, `mono` ...), `router` or `receiver` answers."""
        return self.servers[name].url

    @property
    def front(self) -> str:
        """Where a client asks: the router, or the one server there is."""
        return self.url("router" if "router" in self.servers else "mono")


@contextmanager
def deployed(plan: Plan, progress: Progress | None = None) -> Iterator[Fleet]:
    """Start the plan; gone when the block ends, however it ends."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        folder = plan.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sink = receiver(folder / "spans.db")
        endpoint = {names.ENV_ENDPOINT: f"http://{sink.host}:{sink.port}"}
        if plan.traced:
            endpoint[names.ENV_ON] = "1"
        commands = _vllm(plan, folder, endpoint)
        if plan.shape != "mono":
            legs = {command.name: [_url(command)] for command in commands}
            commands.append(router(legs, endpoint, *plan.routing))
        commands.insert(0, sink)
        with running(*commands, timeout=600, progress=progress, logs=folder / "logs") as servers:
            yield Fleet({server.name: server for server in servers}, folder / "spans.db")


def _vllm(plan: Plan, folder: Path, endpoint: dict[str, str]) -> list[Command]:
    options = plan.options or Options(model=models.build(models.VISION))
    options = replace(
        options,
        max_num_batched_tokens=plan.chunk,
        env={**endpoint, **plan.env, **options.env},
    )
    if plan.shape == "mono":
        return [recipes.mono(options)]
    storage = folder / "encoder-cache"
    storage.mkdir(exist_ok=True)
    first, second = (replace(options, core=core) for core in (0, 1))
    if plan.shape == "pd":
        return [recipes.prefill(first), recipes.decode(second)]
    if plan.shape == "epd3":  # D shares E's core: a request is never on both
        parts = [recipes.encoder(first, storage), recipes.prefill(second, storage)]
        return [*parts, recipes.decode(first)]
    late = replace(second, connector="WaitingConnector", connector_module=WAITING)
    return [
        recipes.encoder(first, storage),
        recipes.prefill_decode(late if plan.waiting else second, storage),
    ]


def receiver(database: Path, port: int = 0) -> Command:
    """`ttft-otel serve`, on free ports unless one is given."""
    port = port or ports.free()
    argv = (
        *(sys.executable, "-m", "ttft_otel.cli", "serve", "--db", str(database)),
        *("--http-port", str(port), "--grpc-port", str(ports.free())),
    )
    return Command("receiver", argv, {}, port, health="/healthz")


def router(legs: Mapping[str, Sequence[str]], env: Mapping[str, str], *more: str) -> Command:
    """`ttft-otel router` before these servers, given by role."""
    port = ports.free()
    flags = [word for role, urls in legs.items() for url in urls for word in (FLAGS[role], url)]
    argv = (sys.executable, "-m", "ttft_otel.cli", "router", *flags, "--port", str(port), *more)
    return Command("router", argv, env, port, health="/health")


def _url(command: Command) -> str:
    return f"http://{command.host}:{command.port}"
