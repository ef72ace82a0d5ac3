# SPDX-License-Identifier: Apache-2.0
"""Programs of the stack and of test clusters, and what pins them; go_builds.py builds, binaries.py finds.

The pins are go.mod and go.sum in tests/stack/tools and collector/builder.yaml: hashes of every module
are committed, so that a build needs no checksum database (it does not know all of these versions).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.tiny_models import get_cache_root

CHECKOUT: Final = Path(__file__).parents[2]
GO_MODULES: Final = CHECKOUT / "tests" / "stack" / "tools"
COLLECTOR_MANIFEST: Final = CHECKOUT / "collector" / "builder.yaml"
# Reproducible and small: no paths, no commit, no symbols;
# readonly, so that go.mod is never changed.
GO_BUILD_FLAGS: Final = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w")


@dataclass(frozen=True, slots=True)
class StackProgram:
    """One executable.

    package: what Go compiles; "." for sources that the collector's builder has written.
    variable: environment variable that names one of your own. aliases: other names on PATH.
    """

    name: str
    package: str
    variable: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoTool:
    """A Go module in tests/stack/tools and the programs built from it.

    tags: Go build tags. generated: the collector's manifest, when the builder writes the sources.
    linked_value: a variable that the linker sets, as -X takes it; "" for none.
    module: the folder in tests/stack/tools, where that is not its name.
    """

    name: str
    programs: tuple[StackProgram, ...]
    tags: str = ""
    generated: Path | None = None
    linked_value: str = ""
    module: str = ""

    @property
    def module_folder(self) -> Path:
        """The folder of its go.mod and go.sum."""
        return GO_MODULES / (self.module or self.name)

    @property
    def build_flags(self) -> tuple[str, ...]:
        """What `go build` gets, tags apart; the linker's flags are the last of them."""
        *others, linker = GO_BUILD_FLAGS
        return (*others, f"{linker} -X {self.linked_value}" if self.linked_value else linker)

    @property
    def pinned_files(self) -> list[Path]:
        """All files that determine what is built."""
        # The builder writes the collector's sources, so its version is part of the result.
        found = sorted(self.module_folder.glob("*"))
        return [*found, self.generated, *BUILDER_TOOL.pinned_files] if self.generated else found

    @property
    def build_folder(self) -> Path:
        """Where in the user's cache its programs lie, built or not; another pin is another folder."""
        # Flags and tags change the program without changing a file.
        digest = hashlib.sha256(repr((self.build_flags, self.tags)).encode())
        for path in self.pinned_files:
            digest.update(path.read_bytes())
        return get_cache_root() / "stack" / f"{self.name}-{digest.hexdigest()[:16]}"


OTELCOL: Final = StackProgram("otelcol-ttft", ".", "TTFT_STACK_COLLECTOR", ("otelcol-contrib",))
TEMPO: Final = StackProgram("tempo", "github.com/grafana/tempo/cmd/tempo", "TTFT_STACK_TEMPO")
PROMETHEUS: Final = StackProgram(
    "prometheus", "github.com/prometheus/prometheus/cmd/prometheus", "TTFT_STACK_PROMETHEUS"
)
PROMTOOL: Final = StackProgram(
    "promtool", "github.com/prometheus/prometheus/cmd/promtool", "TTFT_STACK_PROMTOOL"
)
ALERTMANAGER: Final = StackProgram(
    "alertmanager",
    "github.com/prometheus/alertmanager/cmd/alertmanager",
    "TTFT_STACK_ALERTMANAGER",
)
COMPOSE: Final = StackProgram("compose-config", ".", "TTFT_STACK_COMPOSE")
OCB: Final = StackProgram(
    "builder", "go.opentelemetry.io/collector/cmd/builder", "TTFT_STACK_BUILDER"
)

BUILDER_TOOL: Final = GoTool("builder", (OCB,))
# grpcnotrace leaves out golang.org/x/net/trace, which keeps
# the linker from dropping unused methods.
COLLECTOR_TOOL: Final = GoTool("collector", (OTELCOL,), "grpcnotrace", COLLECTOR_MANIFEST)
GO_TOOLS: Final = (
    GoTool("alertmanager", (ALERTMANAGER,)),
    COLLECTOR_TOOL,
    GoTool("compose", (COMPOSE,)),
    # Without the clouds' service discoveries, half of what there is to compile.
    GoTool("prometheus", (PROMETHEUS, PROMTOOL), "remove_all_sd"),
    GoTool("tempo", (TEMPO,)),
)

KUBE_APISERVER: Final = StackProgram(
    "kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", "TTFT_KUBE_APISERVER"
)
ETCD: Final = StackProgram("etcd", "go.etcd.io/etcd/server/v3", "TTFT_KUBE_ETCD")
# No part of the stack, so not in GO_TOOLS: ten minutes of CPU that only tests/cluster needs.
KUBERNETES_TOOL: Final = GoTool(
    "kubernetes",
    (KUBE_APISERVER, ETCD),
    # Without it kubectl and helm take the server for v0.0.0.
    linked_value="k8s.io/component-base/version.gitVersion=v1.35.4",
)
# What makes a machine a node of that cluster; six minutes more that only scripts/kube needs.
NODE_PROGRAMS: Final = tuple(
    StackProgram(name, f"k8s.io/kubernetes/cmd/{name}", f"TTFT_{name.upper().replace('-', '_')}")
    for name in ("kubelet", "kube-scheduler", "kube-controller-manager", "kube-proxy")
)
KUBERNETES_NODE_TOOL: Final = GoTool(
    "kubernetes-node",
    NODE_PROGRAMS,
    linked_value=KUBERNETES_TOOL.linked_value,
    module=KUBERNETES_TOOL.name,
)

KUBE_ROUTER: Final = StackProgram(
    "kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router", "TTFT_KUBE_ROUTER"
)
# What enforces NetworkPolicies for tests/cluster, by iptables and ipset; five minutes of CPU.
KUBE_ROUTER_TOOL: Final = GoTool("kube-router", (KUBE_ROUTER,))

DOCKER_COMPOSE: Final = StackProgram(
    "docker-compose", "github.com/docker/compose/v2/cmd", "TTFT_DOCKER_COMPOSE"
)
# The plugin that containers of tests/containers are started with; five minutes of CPU.
DOCKER_COMPOSE_TOOL: Final = GoTool("docker-compose", (DOCKER_COMPOSE,))

# Backends beside the stack's own, in which tests/stack tries our traces and metrics.
VICTORIAMETRICS: Final = StackProgram(
    "victoria-metrics",
    "github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics",
    "TTFT_VICTORIAMETRICS",
)
VICTORIAMETRICS_TOOL: Final = GoTool("victoriametrics", (VICTORIAMETRICS,))
CLICKHOUSE_COLLECTOR: Final = StackProgram("otelcol-clickhouse", ".", "TTFT_CLICKHOUSE_COLLECTOR")
CLICKHOUSE_COLLECTOR_TOOL: Final = GoTool(
    "clickhouse-collector",
    (CLICKHOUSE_COLLECTOR,),
    "grpcnotrace",
    GO_MODULES / "clickhouse-collector" / "builder.yaml",
)
JAEGER: Final = StackProgram("jaeger", "github.com/jaegertracing/jaeger/cmd/jaeger", "TTFT_JAEGER")
JAEGER_TOOL: Final = GoTool("jaeger", (JAEGER,))
# Nothing that Go can build from a pin: one of its releases, named or on PATH.
VICTORIATRACES: Final = StackProgram("victoria-traces", "", "TTFT_VICTORIATRACES")
