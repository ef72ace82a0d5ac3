# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on this machine: E and PD, our router before them, our receiver behind them.

demo, live tests, compat and benchmarks start it from here; servers.py runs what recipes.py describes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttft_otel import names
from ttft_otel.lab import models, ports, recipes
from ttft_otel.lab.recipes import Command, Options
from ttft_otel.lab.servers import Progress, Server, running

WAITING = "ttft_inject.connector"  # the test-only connector whose items can come late


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: "epd" (E, PD, router) or "mono"; everything else as in recipes.Options.

    front: the router reaches E and PD through these addresses instead (a test's TCP proxies).
    traced: whether the servers run with TTFT_OTEL=1.
    """

    shape: str = "epd"
    options: Options | None = None
    chunk: int = 512
    waiting: bool = False
    traced: bool = True
    folder: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Addresses of what runs; `servers` by name."""

    servers: dict[str, Server]
    database: Path

    def url(self, name: str) -> str:
        """Where `encode`, `prefill_decode`, `mono`, `router` or `receiver` answers."""
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
        commands = [sink, *_vllm(plan, folder, endpoint)]
        if plan.shape == "epd":
            commands.append(router([_url(commands[1])], [_url(commands[2])], endpoint))
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
    late = replace(options, connector="WaitingConnector", connector_module=WAITING)
    return [
        recipes.encoder(replace(options, core=0), storage),
        recipes.prefill_decode(replace(late if plan.waiting else options, core=1), storage),
    ]


def receiver(database: Path, port: int = 0) -> Command:
    """`ttft-otel serve`, on free ports unless one is given."""
    port = port or ports.free()
    argv = (
        *(sys.executable, "-m", "ttft_otel.cli", "serve", "--db", str(database)),
        *("--http-port", str(port), "--grpc-port", str(ports.free())),
    )
    return Command("receiver", argv, {}, port, health="/healthz")


def router(encoders: list[str], backends: list[str], env: dict[str, str]) -> Command:
    """`ttft-otel router` before these servers."""
    port = ports.free()
    legs = [word for url in encoders for word in ("--encoder", url)]
    legs += [word for url in backends for word in ("--backend", url)]
    argv = (sys.executable, "-m", "ttft_otel.cli", "router", *legs, "--port", str(port))
    return Command("router", argv, env, port, health="/health")


def _url(command: Command) -> str:
    return f"http://{command.host}:{command.port}"
