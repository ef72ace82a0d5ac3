# SPDX-License-Identifier: Apache-2.0
"""Addresses and commands of each part of the stack, on the loopback, with our own configurations.

native_stack.py and tests run the commands with lab/local_servers.py. One configuration serves containers and
this: addresses differ, and come from the TTFT_* variables that `StackAddresses.build_env` sets.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lab import free_ports
from lab.server_commands import HOST, ServerCommand
from lab.stack.program_pins import CHECKOUT

COLLECTOR_CONFIG: Final = CHECKOUT / "collector" / "config.yaml"
SAMPLING_CONFIG: Final = CHECKOUT / "collector" / "sampling.yaml"
TEMPO_CONFIG: Final = CHECKOUT / "grafana" / "tempo" / "native.yaml"
PROMETHEUS_CONFIG: Final = CHECKOUT / "grafana" / "prometheus" / "prometheus.yml"
PROVISIONING: Final = CHECKOUT / "grafana" / "provisioning"
DASHBOARDS: Final = CHECKOUT / "grafana" / "dashboards"

# Metrics come over OTLP from the collector and by remote write from Tempo; both are off by default.
PROMETHEUS_FLAGS: Final = (
    "--web.enable-otlp-receiver",
    "--web.enable-remote-write-receiver",
    "--enable-feature=exemplar-storage,created-timestamp-zero-ingestion",
)


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """Every port of one stack on the loopback."""

    collector_grpc: int = 4317
    collector_http: int = 4318
    collector_health: int = 13133
    tempo: int = 3200
    tempo_grpc: int = 9095
    tempo_otlp: int = 14317
    prometheus: int = 9090
    grafana: int = 3000

    @classmethod
    def choose_free(cls) -> StackAddresses:
        """Choose free ports."""
        return cls(**{name: free_ports.find_free_port() for name in asdict(cls())})

    def find_taken(self) -> dict[str, int]:
        """The ports that are in use."""
        return {
            name: port for name, port in asdict(self).items() if not free_ports.is_port_free(port)
        }

    def build_env(self) -> dict[str, str]:
        """The TTFT_* variables that our configurations expand."""
        return {
            "TTFT_COLLECTOR_GRPC": f"{HOST}:{self.collector_grpc}",
            "TTFT_COLLECTOR_HTTP": f"{HOST}:{self.collector_http}",
            "TTFT_COLLECTOR_HEALTH": f"{HOST}:{self.collector_health}",
            "TTFT_TEMPO_OTLP": f"{HOST}:{self.tempo_otlp}",
            "TTFT_TEMPO_PORT": str(self.tempo),
            "TTFT_TEMPO_GRPC_PORT": str(self.tempo_grpc),
            "TTFT_TEMPO_URL": format_loopback_url(self.tempo),
            "TTFT_PROMETHEUS_URL": format_loopback_url(self.prometheus),
        }


def format_loopback_url(port: int) -> str:
    """The URL of a port on the loopback."""
    return f"http://{HOST}:{port}"


def build_collector_command(
    binary: Path,
    addresses: StackAddresses,
    folder: Path,
    configs: Sequence[Path | str] = (COLLECTOR_CONFIG,),
    env: Mapping[str, str] | None = None,
) -> ServerCommand:
    """The collector; a config that is no Path is a URI of its own ("yaml:...").

    folder: where its queue is kept.
    """
    # With its scheme: the collector takes what stands before a colon for one.
    words = [
        f"--config={config}" if isinstance(config, str) else f"--config=file:{config}"
        for config in configs
    ]
    folder.mkdir(parents=True, exist_ok=True)
    # The caller's last: benchmarks limit memory and cores.
    own_env = {**addresses.build_env(), "TTFT_COLLECTOR_STORAGE": str(folder), **(env or {})}
    return ServerCommand(
        "collector", (str(binary), *words), own_env, addresses.collector_health, "/"
    )


def build_tempo_command(binary: Path, addresses: StackAddresses, folder: Path) -> ServerCommand:
    """Tempo 2.8, all of it in one process."""
    # Tempo expands variables only when it is told to.
    words = (f"-config.file={TEMPO_CONFIG}", "-config.expand-env=true")
    env = addresses.build_env() | {"TTFT_TEMPO_DATA": str(folder)}
    return ServerCommand("tempo", (str(binary), *words), env, addresses.tempo, "/ready")


def build_prometheus_command(
    binary: Path, addresses: StackAddresses, folder: Path, config: Path = PROMETHEUS_CONFIG
) -> ServerCommand:
    """Prometheus with our rules."""
    words = (
        f"--config.file={link_config_folder(config, folder / 'config', addresses)}",
        f"--storage.tsdb.path={folder}/data",
        # As TTFT_METRICS_RETENTION and TTFT_METRICS_SIZE in docker-compose.yml.
        "--storage.tsdb.retention.time=30d",
        "--storage.tsdb.retention.size=5GB",
        f"--web.listen-address={HOST}:{addresses.prometheus}",
        "--log.level=warn",
        *PROMETHEUS_FLAGS,
    )
    return ServerCommand(
        "prometheus", (str(binary), *words), addresses.build_env(), addresses.prometheus, "/-/ready"
    )


def link_config_folder(config: Path, folder: Path, addresses: StackAddresses) -> Path:
    """The configuration's folder as links, so that a file of this stack can lie beside them.

    Prometheus expands no variables: Tempo's address comes from that file.
    """
    # Anew each time: links of files that are gone would keep old rules alive.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in config.parent.iterdir():
        (folder / path.name).symlink_to(path)
    targets_folder = folder / "own"
    targets_folder.mkdir()
    (targets_folder / "tempo.yml").write_text(f'- targets: ["{HOST}:{addresses.tempo}"]\n', "utf-8")
    return folder / config.name
