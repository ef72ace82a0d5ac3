# SPDX-License-Identifier: Apache-2.0
"""Real programs of the stack for tests: started on free ports, stopped, started again, and queried.

conftest.py makes one StackStarter for the session; lab/stack knows how each program is started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from lab.local_servers import LocalServer, LocalServerError
from lab.server_commands import HOST, ServerCommand
from lab.stack import (
    backend_queries,
    binaries,
    go_builds,
    grafana_import,
    grafana_server,
    stack_parts,
)
from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import GoTool
from lab.stack.stack_parts import StackAddresses
from tests.build_progress import make_announcer
from ttft_otel.stack import stack_queries

Found = TypeVar("Found")
Part = TypeVar("Part", bound="StackPart")
START_TIMEOUT_S = 60.0


def wait_until(
    check: Callable[[], Found], seconds: float = 30.0, interval_s: float = 0.25
) -> Found:
    """Call `check` until what it gives is true; the last one speaks for itself.

    Tempo and Prometheus know things some seconds late: tests never sleep, they wait for a fact.
    """
    deadline = time.monotonic() + seconds
    while True:
        last = time.monotonic() >= deadline
        try:
            result = check()
        except stack_queries.BackendQueryError:
            if last:
                raise
        else:
            if result or last:
                assert result, f"not within {seconds:.0f} s"
                return result
        time.sleep(interval_s)


class StackPart:
    """One running program; it can be stopped and started again on the same ports and data."""

    def __init__(self, command: ServerCommand, addresses: StackAddresses, folder: Path) -> None:
        self.command = command
        self.addresses = addresses
        self.folder = folder
        self.logs: list[Path] = []
        self.server: LocalServer | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self.server
        return self.server.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.server is not None and self.server.is_alive

    @property
    def log(self) -> str:
        """All that it has written, over all its starts."""
        return "".join(path.read_text(errors="replace") for path in self.logs)

    def start(self, wait: bool = True) -> StackPart:
        """Start it; with `wait` until its health check answers."""
        assert not self.is_alive
        self.logs.append(self.folder / f"{self.command.name}-{len(self.logs)}.log")
        self.server = LocalServer(self.command, self.logs[-1]).start()
        if wait:
            self.server.wait_until_ready(START_TIMEOUT_S)
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

    def __enter__(self) -> Self:
        """For a part that a single test needs: gone when the block ends."""
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class RunningCollector(StackPart):
    """A collector; it takes OTLP at `grpc` ("host:port") and `http` (a URL)."""

    @property
    def grpc(self) -> str:
        """For OTLP exporters: insecure."""
        return f"{HOST}:{self.addresses.collector_grpc}"

    @property
    def http(self) -> str:
        """The base URL; spans go to /v1/traces below it."""
        return stack_parts.format_loopback_url(self.addresses.collector_http)


class RunningBackend(StackPart):
    """What has an HTTP API at `url`."""

    def __init__(self, command: ServerCommand, addresses: StackAddresses, folder: Path) -> None:
        super().__init__(command, addresses, folder)
        self.url = stack_parts.format_loopback_url(command.port)

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find Tempo or Prometheus."""
        names = {"tempo": ("TTFT_TEMPO_OTLP", "TTFT_TEMPO_URL")}
        known = self.addresses.build_env()
        return {
            name: known[name] for name in names.get(self.command.name, ("TTFT_PROMETHEUS_URL",))
        }


class RunningTempo(RunningBackend):
    """Traces."""

    def fetch_trace(self, trace_id: str) -> list[dict[str, Any]]:
        """All spans of a trace, OTLP JSON; none while Tempo does not know it."""
        return backend_queries.fetch_trace_spans(self.url, trace_id)


class RunningPrometheus(RunningBackend):
    """Metrics."""

    def query_vector(self, query: str) -> list[dict[str, Any]]:
        """The vector of an instant query, now."""
        return backend_queries.query_instant(self.url, query)

    def query_number(self, query: str) -> float | None:
        """The sum of an instant query's values; None when it finds no series."""
        return backend_queries.sum_instant_query(self.url, query)


@dataclass
class RunningStack:
    """A collector that sends to Tempo and Prometheus."""

    collector: RunningCollector
    tempo: RunningTempo
    prometheus: RunningPrometheus
    addresses: StackAddresses


class StackStarter:
    """Starts parts, each in a folder of its own, and stops them all at the end."""

    def __init__(self, binaries: StackBinaries, root: Path) -> None:
        self.binaries = binaries
        self.root = root
        self.started: list[StackPart] = []

    def make_folder(self, name: str) -> Path:
        """A fresh folder for one more part."""
        made = self.root / f"{name}-{len(self.started)}"
        made.mkdir()
        return made

    def start_part(
        self, kind: type[Part], command: ServerCommand, at: StackAddresses, folder: Path
    ) -> Part:
        """Start a part, and wait until its health check answers."""
        made = kind(command, at, folder)
        self.started.append(made)
        made.start()
        return made

    def start_collector(
        self,
        *configs: Path | str,
        env: Mapping[str, str] | None = None,
        addresses: StackAddresses | None = None,
    ) -> RunningCollector:
        """A collector that runs; without configs collector/config.yaml, a str is a URI ("yaml:...").

        env: most often {**tempo.env, **prometheus.env}; what is not said is a port of nobody.
        """
        at, folder = addresses or StackAddresses.choose_free(), self.make_folder("collector")
        chosen = configs or (stack_parts.COLLECTOR_CONFIG,)
        command = stack_parts.build_collector_command(
            self.binaries.collector, at, folder / "queue", chosen, env
        )
        return self.start_part(RunningCollector, command, at, folder)

    def start_tempo(self, addresses: StackAddresses | None = None) -> RunningTempo:
        """A Tempo that runs; it sends its service graph to the Prometheus of `addresses`."""
        at, folder = addresses or StackAddresses.choose_free(), self.make_folder("tempo")
        command = stack_parts.build_tempo_command(self.binaries.tempo, at, folder / "data")
        return self.start_part(RunningTempo, command, at, folder)

    def start_prometheus(
        self, addresses: StackAddresses | None = None, config: Path = stack_parts.PROMETHEUS_CONFIG
    ) -> RunningPrometheus:
        """A Prometheus that runs."""
        at, folder = addresses or StackAddresses.choose_free(), self.make_folder("prometheus")
        command = stack_parts.build_prometheus_command(
            self.binaries.prometheus, at, folder / "data", config
        )
        return self.start_part(RunningPrometheus, command, at, folder)

    def start_stack(
        self, *configs: Path | str, env: Mapping[str, str] | None = None
    ) -> RunningStack:
        """All three, wired; other configs or variables for the collector as you like."""
        at = StackAddresses.choose_free()
        prometheus, tempo = self.start_prometheus(at), self.start_tempo(at)
        return RunningStack(
            self.start_collector(*configs, env=env, addresses=at), tempo, prometheus, at
        )

    def start_grafana(
        self, home: Path | None, addresses: StackAddresses, *, is_provisioned: bool = True
    ) -> RunningBackend:
        """A Grafana whose data sources are those of `addresses`; without `home` the one in GRAFANA_URL.

        is_provisioned: wait until it has read our files.
        """
        if home is None:
            made = self._make_grafana(Path(), addresses)
            made.url = os.environ["GRAFANA_URL"]
            assert grafana_import.import_dashboards(made.url, addresses), (
                "GRAFANA_URL names nobody who may change it"
            )
            return made
        try:
            (made := self._make_grafana(home, addresses)).start()
        except LocalServerError as error:
            # On a busy machine Grafana has ended so at its first start, over a row in its own new database.
            if "UNIQUE constraint failed: org.id" not in str(error):
                raise
            (made := self._make_grafana(home, addresses)).start()
        if is_provisioned:
            # Healthy comes first: files are read after it, and once more 30 s later where that failed.
            wanted = {path.stem for path in stack_parts.DASHBOARDS.glob("*.json")}
            asked = partial(stack_queries.fetch_json, f"{made.url}/api/search", type="dash-db")
            wait_until(lambda: wanted <= {board["uid"] for board in asked()}, 90)
        return made

    def _make_grafana(self, home: Path, addresses: StackAddresses) -> RunningBackend:
        """A Grafana with a folder of its own, not started yet."""
        folder = self.make_folder("grafana")
        command = grafana_server.build_grafana_command(home, addresses, folder)
        made = RunningBackend(command, addresses, folder)
        self.started.append(made)
        return made

    def close(self) -> None:
        """Stop everything, the last one first."""
        for part in reversed(self.started):
            part.stop(1.0)  # nobody needs their data any more


def obtain_tool(tool: GoTool) -> Path:
    """The program of a tool: named, or built. Raises GoMissingError."""
    (program,) = tool.programs
    if named := binaries.find_named_program(program):
        return named
    return go_builds.build_tool(tool, make_announcer("stack")) / program.name
