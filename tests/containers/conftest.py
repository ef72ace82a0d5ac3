# SPDX-License-Identifier: Apache-2.0
"""A Docker engine with all images for the tests of this folder, and the stack in it."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import container_images
from lab.container_engine import ContainerEngine, EngineError, find_missing, run_engine
from lab.container_images import ImageMaker, ImageSourceError
from lab.stack import binaries, go_builds
from lab.stack.go_builds import GoBuildError, GoMissingError
from lab.stack.program_pins import CHECKOUT, DOCKER_COMPOSE, DOCKER_COMPOSE_TOOL
from tests.build_progress import make_announcer

GRAFANA = "http://127.0.0.1:3000"
PROXY = f"{GRAFANA}/api/datasources/proxy/uid"
ARRIVAL_S = 90.0  # seconds for what a busy machine has to bring about

SEND_TRACE = """
import sys
from ttft_otel.stack import stack_queries
stack_queries.send_smoke_trace(stack_queries.get_container_endpoints(), sys.argv[1])
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Build programs and a Debian before the first test: it takes minutes, which no test's limit allows."""
    needed = any("engine" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly and not find_missing():
        with contextlib.suppress(GoBuildError):  # the fixture says what is wrong
            go_builds.build_tool(DOCKER_COMPOSE_TOOL, make_announcer("containers"))
            binaries.gather_binaries(make_announcer("containers"))
            container_images.prepare_debian()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    """An engine that has the images; skips without root, Docker's programs, Go, a Tempo 3 or a Grafana."""
    if missing := find_missing():
        pytest.skip(missing)
    try:
        compose = (
            go_builds.build_tool(DOCKER_COMPOSE_TOOL, make_announcer("containers"))
            / DOCKER_COMPOSE.name
        )
        programs = binaries.gather_binaries(make_announcer("containers"))
    except GoMissingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("engine")
    with run_engine(folder, compose) as started:
        (work := folder / "work").mkdir()
        try:
            ImageMaker(started, programs, work).make_all()
        except ImageSourceError as error:
            pytest.skip(str(error))
        yield started


class ContainerStack:
    """The containers of docker-compose.yml. run() chooses files and profiles; the others use the same."""

    def __init__(self, engine: ContainerEngine) -> None:
        self.engine = engine
        self.files: tuple[str, ...] = ()
        self.env: dict[str, str] = {}

    def run_compose(self, *words: str) -> str:
        """What `docker compose` prints. Raises EngineError."""
        named = [word for name in ("docker-compose.yml", *self.files) for word in ("-f", name)]
        return self.engine.run_docker("compose", *named, *words, env=self.env)

    def start(self, profile: str, *files: str, env: Mapping[str, str] | None = None) -> None:
        """Start it as a user would, and wait until all is healthy. Raises EngineError."""
        self.files, self.env = files, {"COMPOSE_PROFILES": profile, **(env or {})}
        self.run_compose("up", "--detach", "--wait", "--wait-timeout", "120")

    def stop(self, *more: str) -> None:
        """Remove the containers; volumes stay unless `more` says --volumes."""
        self.run_compose("--profile", "*", "down", "--timeout", "5", *more)

    def list_services(self) -> dict[str, dict[str, Any]]:
        """What compose says of each container, the one-shot service apart."""
        lines = self.run_compose("ps", "--all", "--format", "json").splitlines()
        found = {each["Service"]: each for each in map(json.loads, lines)}
        return {name: each for name, each in found.items() if name != "storage"}

    def wait_until_up(self, services: Sequence[str]) -> None:
        """Wait until all of them run, and are healthy where they can say so."""

        def are_up() -> bool:
            states = self.list_services()
            return set(services) == {
                name
                for name, each in states.items()
                if each["State"] == "running" and each["Health"] in ("", "healthy")
            }

        wait_for(are_up)

    def inspect_container(self, service: str, template: str) -> str:
        """A field of a container, by a Go template."""
        name = self.list_services()[service]["Name"]
        return self.engine.run_docker("inspect", "--format", template, name).strip()

    def check_smoke(self) -> None:
        """`ttft-otel stack smoke`, as a user runs it: every hop."""
        words = ("-m", "ttft_otel.commands.main", "stack", "smoke", "--json")
        reported = self.engine.run_inside(sys.executable, *words)
        hops = json.loads(reported)
        assert len(hops) == 4 and all(each["passed"] for each in hops), hops

    def send_smoke_trace(self) -> str:
        """Send the trace of `ttft-otel stack smoke` without looking for it; gives its id."""
        trace_id = secrets.token_hex(16)
        self.engine.run_inside(sys.executable, "-c", SEND_TRACE, trace_id)
        return trace_id

    def fetch(self, url: str, *options: str) -> Any:
        """The JSON behind a URL, asked in the engine's network. Raises EngineError from status 400 on."""
        return json.loads(self.engine.run_inside("curl", "-sS", "--fail-with-body", *options, url))

    def count_series(self, query: str) -> int:
        """How many series a query of Prometheus gives."""
        reported = self.fetch(
            f"{PROXY}/prometheus/api/v1/query", "-G", "--data-urlencode", f"query={query}"
        )
        return len(reported["data"]["result"])

    def find_traces(self, query: str) -> set[str]:
        """Ids of the traces of the last hour that a TraceQL query finds."""
        now = int(time.time())
        reported = self.fetch(
            f"{PROXY}/tempo/api/search",
            "-G", "--data-urlencode", f"q={query}",
            "-d", f"start={now - 3600}", "-d", f"end={now + 60}",
        )  # fmt: skip
        return {each["traceID"].zfill(32) for each in reported.get("traces") or ()}


def wait_for(check: Callable[[], Any], seconds: float = ARRIVAL_S) -> Any:
    """Call `check` until what it gives is true; commands that fail meanwhile count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        last = time.monotonic() > deadline
        try:
            result = check()
        except EngineError:
            if last:
                raise
            result = None
        if result or last:
            assert result, f"not within {seconds:.0f} s"
            return result
        time.sleep(0.5)


@pytest.fixture
def stack(engine: ContainerEngine) -> Iterator[ContainerStack]:
    """The stack, not started; nothing of it is left for the next test."""
    made = ContainerStack(engine)
    yield made
    made.stop("--volumes")


@pytest.fixture
def dashboards() -> dict[str, str]:
    """Uid and title of every dashboard of the checkout."""
    found = [
        json.loads(path.read_text("utf-8"))
        for path in Path(CHECKOUT, "grafana", "dashboards").glob("*.json")
    ]
    return {each["uid"]: each["title"] for each in found}
