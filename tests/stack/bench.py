# SPDX-License-Identifier: Apache-2.0
"""Real programs of the stack for tests: started on free ports, stopped and started again, asked questions.

conftest.py makes one Bench for the session; lab/stack knows how each program is started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ttft_otel.lab.recipes import HOST, Command
from ttft_otel.lab.servers import Server
from ttft_otel.lab.stack import adopt, ask, grafana, parts
from ttft_otel.lab.stack.binaries import Binaries
from ttft_otel.lab.stack.parts import Addresses

Found = TypeVar("Found")
START_S = 60.0


def until(check: Callable[[], Found], seconds: float = 30.0, every: float = 0.25) -> Found:
    """Call `check` until what it gives is true; the last one speaks for itself.

    Tempo and Prometheus know things some seconds late: tests never sleep, they wait for a fact.
    """
    deadline = time.monotonic() + seconds
    while True:
        last = time.monotonic() >= deadline
        try:
            found = check()
        except ask.AskError:
            if last:
                raise
        else:
            if found or last:
                assert found, f"not within {seconds:.0f} s"
                return found
        time.sleep(every)


class Part:
    """One program that runs; it may be stopped and started again, on the same ports and data."""

    def __init__(self, command: Command, at: Addresses, folder: Path) -> None:
        self.command = command
        self.at = at
        self.folder = folder
        self.logs: list[Path] = []
        self.server: Server | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self.server
        return self.server.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.server is not None and self.server.alive

    @property
    def log(self) -> str:
        """All that it has written, over all its starts."""
        return "".join(path.read_text(errors="replace") for path in self.logs)

    def start(self, wait: bool = True) -> Part:
        """Start it; with `wait` until its health check answers."""
        assert not self.alive
        self.logs.append(self.folder / f"{self.command.name}-{len(self.logs)}.log")
        self.server = Server(self.command, self.logs[-1]).start()
        if wait:
            self.server.wait(START_S)
        return self

    def stop(self, bound: float = 10.0) -> None:
        """Ask it to end, kill it after `bound` seconds; safe to call twice.

        Tempo takes 6 s, and sometimes waits for ever for queries of its own after all is written.
        """
        if self.server:
            self.server.stop(bound)

    def kill(self) -> None:
        """As a crash: no goodbye."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def __enter__(self) -> Part:
        """For a part that a single test needs: gone when the block ends."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()


class Collector(Part):
    """OTLP goes in at `grpc` ("host:port") and `http` (a URL)."""

    @property
    def grpc(self) -> str:
        """For OTLP exporters: insecure."""
        return f"{HOST}:{self.at.collector_grpc}"

    @property
    def http(self) -> str:
        """The base URL; spans go to /v1/traces below it."""
        return parts.url(self.at.collector_http)


class Tempo(Part):
    """Traces; `env` tells a collector where it is."""

    @property
    def url(self) -> str:
        """Its HTTP API."""
        return parts.url(self.at.tempo)

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it."""
        return {name: self.at.env()[name] for name in ("TTFT_TEMPO_OTLP", "TTFT_TEMPO_URL")}

    def search(self, query: str, **more: Any) -> list[dict[str, Any]]:
        """Traces that a TraceQL query finds."""
        return ask.search(self.url, query, **more)

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """All spans of a trace, OTLP JSON; none while Tempo does not know it."""
        return ask.trace(self.url, trace_id)


class Prometheus(Part):
    """Metrics; `env` tells a collector where it is."""

    @property
    def url(self) -> str:
        """Its HTTP API."""
        return parts.url(self.at.prometheus)

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it."""
        return {"TTFT_PROMETHEUS_URL": self.url}

    def query(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """The vector of an instant query."""
        return ask.instant(self.url, query, at)

    def number(self, query: str, at: float | None = None) -> float | None:
        """The sum of an instant query's values; None when it finds no series."""
        return ask.number(self.url, query, at)

    def exemplars(self, query: str, start: float, end: float) -> list[dict[str, Any]]:
        """Exemplars of a metric between two Unix times."""
        return ask.exemplars(self.url, query, start, end)


class Grafana(Part):
    """Dashboards, with our provisioning files; a browser goes to `url`."""

    def __init__(self, command: Command, at: Addresses, folder: Path) -> None:
        super().__init__(command, at, folder)
        self.url = parts.url(at.grafana)


@dataclass
class Stack:
    """Collector, Tempo and Prometheus, wired."""

    collector: Collector
    tempo: Tempo
    prometheus: Prometheus
    at: Addresses


class Bench:
    """Starts parts, each in a folder of its own, and stops them all at the end."""

    def __init__(self, binaries: Binaries, root: Path) -> None:
        self.binaries = binaries
        self.root = root
        self.started: list[Part] = []

    def folder(self, name: str) -> Path:
        """A fresh folder for one more part."""
        made = self.root / f"{name}-{len(self.started)}"
        made.mkdir()
        return made

    def collector(
        self,
        *configs: Path | str,
        env: Mapping[str, str] | None = None,
        at: Addresses | None = None,
        wait: bool = True,
    ) -> Collector:
        """A collector that runs; without configs collector/config.yaml, a str is a URI ("yaml:...").

        env: most often {**tempo.env, **prometheus.env}; what is not said is a port of nobody.
        """
        at, folder = at or Addresses.free(), self.folder("collector")
        chosen = configs or (parts.COLLECTOR_CONFIG,)
        command = parts.collector(self.binaries.collector, at, folder / "queue", chosen, env)
        made = Collector(command, at, folder)
        self.started.append(made)
        made.start(wait)
        return made

    def tempo(self, at: Addresses | None = None) -> Tempo:
        """A Tempo that runs; it sends its service graph to the Prometheus of `at`."""
        at, folder = at or Addresses.free(), self.folder("tempo")
        made = Tempo(parts.tempo(self.binaries.tempo, at, folder / "data"), at, folder)
        self.started.append(made)
        made.start()
        return made

    def prometheus(
        self, at: Addresses | None = None, config: Path = parts.PROMETHEUS_CONFIG
    ) -> Prometheus:
        """A Prometheus that runs."""
        at, folder = at or Addresses.free(), self.folder("prometheus")
        command = parts.prometheus(self.binaries.prometheus, at, folder / "data", config)
        made = Prometheus(command, at, folder)
        self.started.append(made)
        made.start()
        return made

    def stack(self, *configs: Path | str, env: Mapping[str, str] | None = None) -> Stack:
        """All three, wired; other configs or variables for the collector as you like."""
        at = Addresses.free()
        prometheus, tempo = self.prometheus(at), self.tempo(at)
        return Stack(self.collector(*configs, env=env, at=at), tempo, prometheus, at)

    def grafana(self, home: Path | None, at: Addresses) -> Grafana:
        """A Grafana whose data sources are those of `at`; without `home` the one in GRAFANA_URL."""
        folder = self.folder("grafana")
        made = Grafana(grafana.command(home or Path(), at, folder), at, folder)
        if home is None:
            made.url = os.environ["GRAFANA_URL"]
            assert adopt.adopt(made.url, at), "GRAFANA_URL names nobody who may change it"
            return made
        self.started.append(made)
        made.start()
        return made

    def close(self) -> None:
        """Stop everything, the last one first."""
        for part in reversed(self.started):
            part.stop(1.0)  # nobody needs their data any more
