# SPDX-License-Identifier: Apache-2.0
"""How each part of the stack is started on the loopback with our own configurations: addresses, Commands.

native.py and the tests run the Commands with lab/servers.py. One configuration serves containers and
this: addresses differ, and come from the TTFT_* variables that `Addresses.env` sets.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ttft_otel.lab import ports
from ttft_otel.lab.recipes import HOST, Command
from ttft_otel.lab.stack.pins import CHECKOUT

COLLECTOR_CONFIG: Final = CHECKOUT / "collector" / "config.yaml"
SAMPLING: Final = CHECKOUT / "collector" / "sampling.yaml"
TEMPO_CONFIG: Final = CHECKOUT / "grafana" / "tempo" / "native.yaml"
PROMETHEUS_CONFIG: Final = CHECKOUT / "grafana" / "prometheus" / "prometheus.yml"
PROVISIONING: Final = CHECKOUT / "grafana" / "provisioning"
DASHBOARDS: Final = CHECKOUT / "grafana" / "dashboards"

# Metrics come over OTLP from the collector and by remote write from Tempo; both doors are shut by default.
PROMETHEUS_FLAGS: Final = (
    "--web.enable-otlp-receiver",
    "--web.enable-remote-write-receiver",
    "--enable-feature=exemplar-storage,created-timestamp-zero-ingestion",
)


@dataclass(frozen=True, slots=True)
class Addresses:
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
    def free(cls) -> Addresses:
        """Ports that nobody uses."""
        return cls(**{name: ports.free() for name in asdict(cls())})

    def taken(self) -> dict[str, int]:
        """Those that somebody else listens on."""
        return {name: port for name, port in asdict(self).items() if not ports.idle(port)}

    def env(self) -> dict[str, str]:
        """What our configurations expand."""
        return {
            "TTFT_COLLECTOR_GRPC": f"{HOST}:{self.collector_grpc}",
            "TTFT_COLLECTOR_HTTP": f"{HOST}:{self.collector_http}",
            "TTFT_COLLECTOR_HEALTH": f"{HOST}:{self.collector_health}",
            "TTFT_TEMPO_OTLP": f"{HOST}:{self.tempo_otlp}",
            "TTFT_TEMPO_PORT": str(self.tempo),
            "TTFT_TEMPO_GRPC_PORT": str(self.tempo_grpc),
            "TTFT_TEMPO_URL": url(self.tempo),
            "TTFT_PROMETHEUS_URL": url(self.prometheus),
        }


def url(port: int) -> str:
    """A port of ours, as HTTP clients want it."""
    return f"http://{HOST}:{port}"


def collector(
    binary: Path,
    at: Addresses,
    folder: Path,
    configs: Sequence[Path | str] = (COLLECTOR_CONFIG,),
    env: Mapping[str, str] | None = None,
) -> Command:
    """The collector; a config that is no Path is a URI of its own ("yaml:...").

    folder: where its queue is kept.
    """
    words = [
        f"--config={config}" if isinstance(config, str) else f"--config=file:{config}"
        for config in configs
    ]
    folder.mkdir(parents=True, exist_ok=True)
    own = {**at.env(), "TTFT_COLLECTOR_STORAGE": str(folder), **(env or {})}
    return Command("collector", (str(binary), *words), own, at.collector_health, "/")


def tempo(binary: Path, at: Addresses, folder: Path) -> Command:
    """Tempo 2.8, all of it in one process."""
    words = (f"-config.file={TEMPO_CONFIG}", "-config.expand-env=true")
    env = at.env() | {"TTFT_TEMPO_DATA": str(folder)}
    return Command("tempo", (str(binary), *words), env, at.tempo, "/ready")


def prometheus(
    binary: Path, at: Addresses, folder: Path, config: Path = PROMETHEUS_CONFIG
) -> Command:
    """Prometheus with our rules."""
    words = (
        f"--config.file={linked(config, folder / 'config', at)}",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=30d",
        "--storage.tsdb.retention.size=5GB",
        f"--web.listen-address={HOST}:{at.prometheus}",
        "--log.level=warn",
        *PROMETHEUS_FLAGS,
    )
    return Command("prometheus", (str(binary), *words), at.env(), at.prometheus, "/-/ready")


def linked(config: Path, folder: Path, at: Addresses) -> Path:
    """The configuration's folder as links, so that a file of this stack can lie beside them.

    Prometheus expands no variables: Tempo's address comes from that file.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in config.parent.iterdir():
        (folder / path.name).symlink_to(path)
    own = folder / "own"
    own.mkdir()
    (own / "tempo.yml").write_text(f'- targets: ["{HOST}:{at.tempo}"]\n', "utf-8")
    return folder / config.name
