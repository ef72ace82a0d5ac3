# SPDX-License-Identifier: Apache-2.0
"""Start a deployment on this machine: vLLM servers, our router in front, our receiver for spans.

Used by demo, compat, live tests and benchmarks. server_commands.py has the command lines,
local_servers.py runs them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab import free_ports, server_commands, tiny_models
from lab.local_servers import LocalServer, ProgressCallback, run_servers
from lab.server_commands import ServerCommand, VllmOptions
from ttft_otel.model.names import env_names

# The test-only connector whose items can come late.
WAITING_CONNECTOR_MODULE = "lab.vllm_plugins.inject.ttft_inject.connector"

# The router's flag for the servers of a role.
ROUTER_FLAG_BY_ROLE = {
    "encode": "--encoder",
    "prefill": "--prefill",
    "decode": "--decode",
    "prefill_decode": "--backend",
    "mono": "--backend",
}


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """What to start; server_commands.VllmOptions has the options of the vLLM servers.

    shape: "epd" (encode, prefill_decode, router), "pd" (prefill and decode over NIXL, router), "epd3"
        (encode, prefill, decode, router) or "mono".
    traced: whether the servers run with TTFT_OTEL=1. router_flags: more flags for the router.
    """

    shape: str = "epd"
    options: VllmOptions | None = None
    chunk_tokens: int = 512
    use_waiting_connector: bool = False
    traced: bool = True
    folder: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    router_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """A running deployment; `servers` by name, `database` of the receiver."""

    servers: dict[str, LocalServer]
    database: Path

    def get_url(self, name: str) -> str:
        """URL of the server `name`: a role (`encode`, `prefill`, `mono` ...), `router`, `receiver`."""
        return self.servers[name].url

    @property
    def front_url(self) -> str:
        """URL for clients: the router's, or that of the single server."""
        return self.get_url("router" if "router" in self.servers else "mono")


@contextmanager
def start_deployment(
    plan: DeploymentPlan, progress: ProgressCallback | None = None
) -> Iterator[LocalDeployment]:
    """Start the deployment of `plan`; it is stopped when the block ends, however it ends."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        # Without a folder of the caller's, everything goes when the block ends.
        folder = plan.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        receiver_command = build_receiver_command(folder / "spans.db")
        endpoint = {
            env_names.OTEL_EXPORTER_OTLP_ENDPOINT: f"http://{receiver_command.host}:{receiver_command.port}"
        }
        if plan.traced:
            endpoint[env_names.TTFT_OTEL] = "1"
        commands = _build_vllm_commands(plan, folder, endpoint)
        if plan.shape != "mono":
            # A command's name is its role, by which the router wants to have it.
            legs = {command.name: [_get_command_url(command)] for command in commands}
            commands.append(build_router_command(legs, endpoint, *plan.router_flags))
        # First, so that the servers' exporters find it when they start.
        commands.insert(0, receiver_command)
        # Up to ten minutes: vLLM starts slowly where other tests use the cores.
        with run_servers(
            *commands, timeout=600, progress=progress, logs=folder / "logs"
        ) as servers:
            yield LocalDeployment({server.name: server for server in servers}, folder / "spans.db")


def _build_vllm_commands(
    plan: DeploymentPlan, folder: Path, endpoint: dict[str, str]
) -> list[ServerCommand]:
    options = plan.options or VllmOptions(model=tiny_models.build_model(tiny_models.VISION_RECIPE))
    # The caller's variables come last, so that a test can override an endpoint.
    options = replace(
        options,
        max_num_batched_tokens=plan.chunk_tokens,
        env={**endpoint, **plan.env, **options.env},
    )
    # Before the encoder's folder is made, which a single server does not need.
    if plan.shape == "mono":
        return [server_commands.build_mono_command(options)]
    storage = folder / "encoder-cache"
    storage.mkdir(exist_ok=True)
    # A core each: servers that share one would wait for each other, and stages would contain that.
    first, second = (replace(options, core=core) for core in (0, 1))
    # NIXL connects P and D by itself; nothing passes through a folder.
    if plan.shape == "pd":
        return [
            server_commands.build_prefill_command(first),
            server_commands.build_decode_command(second),
        ]
    if plan.shape == "epd3":  # D shares E's core: a request is never on both
        parts = [
            server_commands.build_encoder_command(first, storage),
            server_commands.build_prefill_command(second, storage),
        ]
        return [*parts, server_commands.build_decode_command(first)]
    # Used only on request: it is the stock connector but for items that come late.
    late = replace(second, connector="WaitingConnector", connector_module=WAITING_CONNECTOR_MODULE)
    return [
        server_commands.build_encoder_command(first, storage),
        server_commands.build_prefill_decode_command(
            late if plan.use_waiting_connector else second, storage
        ),
    ]


def build_receiver_command(database: Path, port: int = 0) -> ServerCommand:
    """The command of `ttft-otel serve`; port 0 takes a free one."""
    port = port or free_ports.find_free_port()
    # The gRPC port is chosen too: the default one may belong to a collector on this machine.
    argv = (
        sys.executable, "-m", "ttft_otel.commands.main", "serve", "--db", str(database),
        "--http-port", str(port), "--grpc-port", str(free_ports.find_free_port()),
    )  # fmt: skip
    return ServerCommand("receiver", argv, {}, port, health_path="/healthz")


def build_router_command(
    urls_by_role: Mapping[str, Sequence[str]], env: Mapping[str, str], *extra_flags: str
) -> ServerCommand:
    """The command of `ttft-otel router` in front of servers, given by role."""
    port = free_ports.find_free_port()
    # Roles may have several servers: one flag for each.
    flags = [
        word
        for role, urls in urls_by_role.items()
        for url in urls
        for word in (ROUTER_FLAG_BY_ROLE[role], url)
    ]
    argv = (
        sys.executable,
        "-m",
        "ttft_otel.commands.main",
        "router",
        *flags,
        "--port",
        str(port),
        *extra_flags,
    )
    return ServerCommand("router", argv, env, port, health_path="/health")


def _get_command_url(command: ServerCommand) -> str:
    return f"http://{command.host}:{command.port}"
