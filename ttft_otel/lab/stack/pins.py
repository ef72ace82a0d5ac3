# SPDX-License-Identifier: Apache-2.0
"""Which programs the stack consists of and which files pin them; golang.py builds, binaries.py finds.

The pins are go.mod and go.sum in tests/stack/tools and collector/builder.yaml: hashes of every module
are committed, so that a build needs no checksum database (it does not know all of these versions).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ttft_otel
from ttft_otel.lab.models import cache_root

CHECKOUT: Final = Path(ttft_otel.__file__).parents[1]
MODULES: Final = CHECKOUT / "tests" / "stack" / "tools"
MANIFEST: Final = CHECKOUT / "collector" / "builder.yaml"
FLAGS: Final = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w")


@dataclass(frozen=True, slots=True)
class Program:
    """One executable.

    package: what Go compiles; "." for sources that the collector's builder has written.
    variable: environment variable that names one of your own. aliases: other names on PATH.
    """

    name: str
    package: str
    variable: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A Go module in tests/stack/tools and the programs built from it.

    tags: Go build tags. generated: the collector's manifest, when the builder writes the sources.
    """

    name: str
    programs: tuple[Program, ...]
    tags: str = ""
    generated: Path | None = None

    @property
    def module(self) -> Path:
        """Where its go.mod and go.sum lie."""
        return MODULES / self.name

    @property
    def files(self) -> list[Path]:
        """Everything that decides what is built."""
        found = sorted(self.module.glob("*"))
        return [*found, self.generated, *BUILDER.files] if self.generated else found

    @property
    def folder(self) -> Path:
        """Where in the user's cache its programs lie, built or not; another pin is another folder."""
        digest = hashlib.sha256(repr((FLAGS, self.tags)).encode())
        for path in self.files:
            digest.update(path.read_bytes())
        return cache_root() / "stack" / f"{self.name}-{digest.hexdigest()[:16]}"


OTELCOL: Final = Program("otelcol-ttft", ".", "TTFT_STACK_COLLECTOR", ("otelcol-contrib",))
TEMPO: Final = Program("tempo", "github.com/grafana/tempo/cmd/tempo", "TTFT_STACK_TEMPO")
PROMETHEUS: Final = Program(
    "prometheus", "github.com/prometheus/prometheus/cmd/prometheus", "TTFT_STACK_PROMETHEUS"
)
PROMTOOL: Final = Program(
    "promtool", "github.com/prometheus/prometheus/cmd/promtool", "TTFT_STACK_PROMTOOL"
)
COMPOSE: Final = Program("compose-config", ".", "TTFT_STACK_COMPOSE")
OCB: Final = Program("builder", "go.opentelemetry.io/collector/cmd/builder", "TTFT_STACK_BUILDER")

BUILDER: Final = Tool("builder", (OCB,))
COLLECTOR: Final = Tool("collector", (OTELCOL,), "grpcnotrace", MANIFEST)
TOOLS: Final = (
    COLLECTOR,
    Tool("compose", (COMPOSE,)),
    # Without the clouds' service discoveries, half of what there is to compile.
    Tool("prometheus", (PROMETHEUS, PROMTOOL), "remove_all_sd"),
    Tool("tempo", (TEMPO,)),
)
