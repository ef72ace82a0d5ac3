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

from benchmarks.process_cpu import read_process_cpu_s
from lab import free_ports, local_deployment, server_commands, session_processes, tiny_models
from lab.local_servers import LocalServer, ProgressCallback, run_servers
from lab.server_commands import ServerCommand
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import env_names

# Servers, routers and the load share the processors; the latter two go first, as with one of their own.
REALTIME_PREFIX: Final = ("chrt", "--rr", "1") if os.geteuid() == 0 and shutil.which("chrt") else ()
EXPERIMENT_MODEL: Final = tiny_models.ModelRecipe(
    vision=False, hidden=512, layers=2
)  # 4k tokens take over a second
# Port 9 (discard), where nobody listens: a receiver would compete for the two cores.
NO_EXPORT_ENV: Final = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://127.0.0.1:9"}


class ExperimentServers:
    """The running processes: two servers, and a router for each policy."""

    def __init__(
        self,
        backends: Sequence[str],
        servers: Sequence[LocalServer],
        routers: dict[str, LocalServer],
        admin: dict[str, int],
    ) -> None:
        """`servers`: those that were started for this."""
        self.backends, self.servers = backends, servers
        self.routers, self.admin = routers, admin

    def reset_caches(self) -> bool:
        """Reset the servers' prefix caches; False if they do not offer that."""
        # A list, not a generator: all servers are reset even when the first one cannot.
        return all([self._reset_cache(url) and self._trigger_step(url) for url in self.backends])

    def read_instances(self, policy: str) -> Any:
        """The router's state of its instances, with predictions and their errors."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin[policy]}/instances", timeout=10
        ) as answer:
            return json.load(answer)

    def read_server_cpu_s(self) -> list[float]:
        """Seconds of processor time that each server has used."""
        # With all children: the engine core, which does the work, is a process of its own.
        return [
            sum(map(_read_process_cpu_s, session_processes.list_session_pids(server.pid)))
            for server in self.servers
        ]

    @staticmethod
    def _trigger_step(url: str) -> bool:
        """Make an idle engine step, with which it publishes the reset of its cache to the routers."""
        # One token, whose prompt is no full block: nothing of it stays in the cache.
        body = json.dumps({"model": "tiny", "prompt": [11], "max_tokens": 1}).encode()
        asked = urllib.request.Request(f"{url}{COMPLETIONS_PATH}", method="POST", data=body)
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return bool(answer.status == 200)

    @staticmethod
    def _reset_cache(url: str) -> bool:
        for _ in range(50):
            asked = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST", data=b"")
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:
                    if json.load(answer)["success"]:
                        return True
            # The server has no such path: it was started without VLLM_SERVER_DEV_MODE.
            except urllib.error.HTTPError:
                return False
            time.sleep(0.1)  # the last request's blocks are still held
        return False


@contextlib.contextmanager
def start_experiment_servers(
    urls: Sequence[str],
    policies: Mapping[str, Sequence[str]],
    folder: Path,
    progress: ProgressCallback,
) -> Iterator[ExperimentServers]:
    """Start servers unless there are URLs, and the routers with these flags; gone when the block ends."""
    with contextlib.ExitStack() as stack:
        servers: list[LocalServer] = []
        if not urls:
            # A core each: a prefill of one must not slow the other one down.
            commands = [_build_server_command(folder, core) for core in (0, 1)]
            up = run_servers(*commands, timeout=600, progress=progress, logs=folder)
            servers = stack.enter_context(up)
            urls = [each.url for each in servers]
        admin = {policy: free_ports.find_free_port() for policy in policies}
        routers = [
            _build_policy_router_command(policy, urls, port, policies[policy])
            for policy, port in admin.items()
        ]
        # All routers run all the time: what one has learnt stays with it from round to round.
        before = run_servers(*routers, timeout=120, progress=progress, logs=folder)
        named = dict(zip(admin, stack.enter_context(before), strict=True))
        yield ExperimentServers(urls, servers, named, admin)


def _build_server_command(folder: Path, core: int) -> ServerCommand:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # Sockets of files, since routers and servers are on one host: no ports to choose.
        "endpoint": f"ipc://{folder}/{core}.ipc",
        "replay_endpoint": f"ipc://{folder}/{core}-replay.ipc",
        "topic": "kv",
    }
    extra = (
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        # vLLM would take bfloat16, which processors without AVX-512 compute ten times slower.
        *("--dtype", "float32"),
        *("--kv-events-config", json.dumps(events)),
    )
    # Traced, because routers learn prefill times from Server-Timing.
    env = {env_names.TTFT_OTEL: "1", "VLLM_SERVER_DEV_MODE": "1", **NO_EXPORT_ENV}
    model = tiny_models.build_model(EXPERIMENT_MODEL)
    command = server_commands.build_mono_command(
        server_commands.VllmOptions(model=model, core=core, extra=extra, env=env)
    )
    return replace(command, name=f"vllm-{core}")


def _build_policy_router_command(
    policy: str, urls: Sequence[str], admin: int, more: Sequence[str]
) -> ServerCommand:
    flags = ("--admin-port", str(admin), *more)
    # Not traced: records of the router itself would be work without a use here.
    made = local_deployment.build_router_command(
        {"mono": urls}, {env_names.TTFT_OTEL: "0", **NO_EXPORT_ENV}, *flags
    )
    return replace(made, name=f"router-{policy}", argv=(*REALTIME_PREFIX, *made.argv))


def _read_process_cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has ended since it was found
        return read_process_cpu_s(pid)
    return 0.0
