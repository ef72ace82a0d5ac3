# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards: what their code makes, well-formed, and asking only for what exists.

Whether the queries give the right numbers is test_panels.py's, how they look test_browser.py's. TypeScript
judges them by the types of Grafana 13's schema package: what Grafana does not know is an error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from grafana.build import (
    panel_kinds,
    pipeline_queries,
    series_colors,
    server_queries,
    ttft_queries,
)
from grafana.build.all_dashboards import Dashboard as Schema
from grafana.build.all_dashboards import JSONEncoder, render_dashboards
from lab.stack.program_pins import CHECKOUT
from lab.tiny_models import get_cache_root
from tests.stack.filled_stack import CommittedDashboard, list_dashboards, list_queries
from ttft_otel.commands import main as cli
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names

FOLDER = CHECKOUT / "grafana"
BOARDS = list_dashboards()
PANELS = [(board, panel) for board in BOARDS for panel in board.list_panels()]
QUERIES = list_queries()

# Labels that the collector's metrics have, and Prometheus adds to what it scrapes.
LABELS = {
    *(ttft_queries.format_label(name) for name in (keys.MODEL, keys.ROLE, keys.LEG, keys.STAGE)),
    *(ttft_queries.format_label(name) for name in (keys.INSTANCE, keys.ERROR_TYPE)),
    ttft_queries.NAMESPACE_LABEL, ttft_queries.POD_LABEL,
    server_queries.REASON_LABEL, server_queries.HELD_LABEL, server_queries.FOREIGN_LABEL,
    "job", "instance", "exported_instance", "le", "status_code",
    "exporter", "data_type", "policy", "sampled", "leg", "state", "result", "hop",
    "role", "server",  # made by label_join
}  # fmt: skip
# What the collector, Tempo and our own processes count: constants of pipeline_queries.py.
COUNTED = {
    re.split(r"[{\s]", value)[0]
    for key, value in vars(pipeline_queries).items()
    if key.isupper() and isinstance(value, str)
}
FUNCTIONS = {
    "sum", "max", "min", "count", "topk", "sort_desc", "by", "on", "group_left", "or", "and",
    "rate", "increase", "scalar", "vector", "label_join", "label_replace",
    "absent_over_time", "end",
    "histogram_quantile", "histogram_fraction", "histogram_sum", "histogram_count", "Inf",
}  # fmt: skip


def list_known_metrics() -> set[str]:
    """Every metric that a query may name: from the vocabulary, the counters and the rules."""
    rules = [
        rule
        for path in (FOLDER / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]
    return {
        ttft_queries.DURATION_METRIC,
        ttft_queries.STAGE_METRIC,
        ttft_queries.CONVENTION_METRIC,
        ttft_queries.REQUEST_METRIC,
        server_queries.REASON_METRIC,
        server_queries.HELD_METRIC,
        server_queries.RECOMPUTED_METRIC,
        server_queries.TOKEN_TIME_METRIC,
        server_queries.FOREIGN_METRIC,
        server_queries.FOREIGN_STAGE_METRIC,
        *COUNTED,
        *(rule["record"] for rule in rules),
        *(base for _, base in pipeline_queries.LOSSES_BY_HOP.values()),
    }


def test_rebuilt() -> None:
    """Building the dashboards gives the committed files, byte for byte, and no others are there."""
    made = render_dashboards()
    committed = {path.stem: path.read_text("utf-8") for path in (FOLDER / "dashboards").iterdir()}
    assert made == committed, "run: .venv/bin/python -m grafana.build"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_board(board: CommittedDashboard) -> None:
    """Grafana's own SDK reads and writes a dashboard without loss; it has its file's name as uid, cannot
    be saved over, and no two of its panels share a number or a cell of the grid.
    """
    again = json.loads(json.dumps(Schema.from_json(dict(board.model)), cls=JSONEncoder))
    assert again == board.model
    assert board.model["schemaVersion"] >= 41
    assert board.path.stem == board.uid
    assert board.model["title"] and board.model["description"].endswith(("?", "."))
    assert board.model["editable"] is False
    ids = [panel["id"] for panel in board.model["panels"]]
    ids += [each["id"] for row in board.model["panels"] for each in row.get("panels", ())]
    assert len(ids) == len(set(ids)) and all(ids)
    cells: dict[tuple[int, int], str] = {}
    for panel in [*board.model["panels"], *board.list_panels()]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((x, y), panel["title"]) == panel["title"]


def test_panels() -> None:
    """Every panel has a title, a sentence that explains it, a unit, and its data source as a variable."""
    for board, panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        if panel["type"] == "text":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = {each["name"] for each in board.variables if each["type"] == "datasource"}
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source["uid"] in {f"${{{name}}}" for name in sources}, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)), panel["title"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_queries(board: CommittedDashboard) -> None:
    """Every query names only variables of its dashboard, and metrics, labels and attributes that exist.

    Numbers look at the whole range, lines at as little as their resolution allows.
    """
    metrics = list_known_metrics()
    own = {variable["name"] for variable in board.variables}
    built_in = {ttft_queries.RANGE.strip("$"), ttft_queries.RATE.strip("$")}
    attributes = {value for key, value in vars(keys).items() if key.isupper()} | {"ttft_ms"}
    for query in (each for each in QUERIES if each.dashboard.uid == board.uid):
        assert set(re.findall(r"\$\{?(\w+)", query.text)) <= own | built_in, query.name
        if query.prometheus:
            # Without its strings, ranges and variables.
            bare = re.sub(r"\[[^]]*]", "", re.sub(r'"[^"]*"', '""', query.text))
            words = set(re.findall(r"[a-zA-Z_][\w:]*", re.sub(r"\$\{?\w+\}?", "0", bare)))
            assert not words - metrics - LABELS - FUNCTIONS, query.name
            assert words & metrics or query.text.startswith("vector"), query.name
            # An encoder's own histogram is not mixed into TTFT.
            durations = re.findall(rf"{ttft_queries.DURATION_METRIC}\{{([^}}]*)\}}", query.text)
            assert all(ttft_queries.NOT_ENCODE_SELECTOR in each for each in durations), query.name
            bound = re.sub(r"\[[^]]+] @ end\(\)", "", re.sub(r'"[^"]*"', "", query.text))
            windows = set(re.findall(r"\[([^]]+)]", bound))
            assert windows <= {ttft_queries.RANGE if query.instant else ttft_queries.RATE}
        elif query.text != "$trace":
            found = set(re.findall(r"\bspan\.([a-z_]+(?:\.[a-z_]+)*)", query.text))
            assert found <= attributes, query.name
            assert f'span:name = "{span_names.TTFT}"' in query.text


def test_every_stage_is_in_one_stack() -> None:
    """The queries by kind have each stage once, in the kind and the colour of the page."""
    legs = [role for role in stages.ROLES if role != "router"]
    own = (*stages.STAGE_NAMES, stages.UNATTRIBUTED)
    names = [
        *(f"router.hop.{role}" for role in stages.ROLES),
        *(word for word in stages.ROUTER_STAGES if word != "router.hop"),
        *(f"{leg}{stage}" for stage in own for leg in ("", *(f"{role}." for role in legs))),
    ]
    for name in names:
        kinds = [
            kind
            for kind in ttft_queries.STAGE_KINDS
            if re.fullmatch(ttft_queries.match_stage_kind(kind), name)
        ]
        assert kinds == [stages.find_kind(name)]
        hues = [
            properties[0].value["fixedColor"]
            for pattern, properties in series_colors.list_stage_colors()
            if re.search(pattern, name)
        ]
        assert hues == [stages.find_color(name)]


def test_older_grafanas() -> None:
    """What Grafana 10.1 cannot draw is marked, says so, and is folded away; nothing else needs more."""
    render_dashboards()  # fills REQUIRED_GRAFANA_VERSION
    for board, panel in PANELS:
        needs = panel_kinds.REQUIRED_GRAFANA_VERSION.get(panel["title"])
        reported = "Needs Grafana" in panel["description"]
        metrics = any("_over_time" in str(t.get("query")) for t in panel.get("targets", ()))
        assert bool(needs) == reported == metrics, panel["title"]
        if needs:
            assert panel not in board.model["panels"]


def test_variables() -> None:
    """The TTFT dashboard can be narrowed to a model, role and place; all of them at first."""
    [board] = [board for board in BOARDS if board.uid == "ttft"]
    found = {variable["name"]: variable for variable in board.variables}
    filters = ["model", "role", "namespace", "pod", "instance"]
    assert list(found) == ["prometheus", "tempo", *filters, "slo", "trace"]
    for name in filters:
        assert found[name]["includeAll"] and found[name]["allValue"] == ".*"
        assert found[name]["current"]["value"] == "$__all"
    assert found["slo"]["current"]["value"] == "1000"


def test_provisioning() -> None:
    """Data sources have the uids that dashboards and links name, and no address of their own."""
    [file] = (FOLDER / "provisioning" / "datasources").glob("*.yaml")
    sources = {each["uid"]: each for each in yaml.safe_load(file.read_text("utf-8"))["datasources"]}
    assert set(sources) == {"prometheus", "tempo"}
    assert all(re.fullmatch(r"\$TTFT_\w+_URL", each["url"]) for each in sources.values())
    exemplars = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert {each.get("datasourceUid", "url") for each in exemplars} == {"tempo", "url"}
    boards = {board.uid for board in BOARDS}
    assert all(
        Path(each["url"]).name.split("?")[0] in boards for each in exemplars if "url" in each
    )
    [panel] = [panel for board, panel in PANELS if (board.uid, panel["title"]) == ("ttft", "Trace")]
    [link] = [each["url"] for each in exemplars if "url" in each]
    assert link == f"/d/ttft?viewPanel={panel['id']}&var-trace=$${{__value.raw}}"
    assert sources["tempo"]["jsonData"]["tracesToMetrics"]["datasourceUid"] == "prometheus"


def list_links(panel: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Links of a panel's fields."""
    return [
        link
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for each in override["properties"]
        if each["id"] == "links"
        for link in each["value"]
    ]


def test_why_link() -> None:
    """A slow request's link "Why?" leads to the panel with the command, where its trace is a plain word."""
    (board,) = (each for each in BOARDS if each.uid == "ttft")
    (panel,) = (each for each in board.list_panels() if each["title"] == "Why?")
    (table,) = (each for each in board.list_panels() if each["title"] == "Requests over the SLO")
    why = [link["url"] for link in list_links(table) if link["title"] == "Why?"]
    assert len(why) == 2 and all(f"&viewPanel={panel['id']}" in url for url in why)
    assert all("var-trace=${__" in url for url in why)
    text = panel["options"]["content"]
    # The page's own address stands there as it is: a link to the dashboard cannot choose it.
    pages = re.findall(r"\]\((\S+)\)", text)
    assert [url.split("?")[0] for url in pages] == ["http://127.0.0.1:4319/why"] * 2
    linked = {
        panel["title"]: link["url"]
        for panel in board.list_panels()
        for link in list_links(panel)
        if "/why?" in link["url"]
    }
    assert linked == dict.fromkeys(("TTFT percentiles", "Over SLO", "Longest stages"), pages[1])
    # A link to the dashboard may put anything into its variables, and a shell gets it.
    assert set(re.findall(r"\$\{?(\w+)(:\w+)?", text)) == {
        ("trace", ":percentencode"),
        ("slo", ":percentencode"),
        ("tempo", ":percentencode"),
        ("model", ":percentencode"),
        ("__from", ""),
        ("__to", ""),
    }
    for line in text.splitlines():
        if line.startswith("    "):
            words = re.sub(r"\$\{(\w+):percentencode}", "7", line).split()
            assert words[0] == "ttft-otel"
            cli.load_subcommand(words[1], cli.SUBCOMMANDS[words[1]]).make_context(
                words[1], words[2:]
            )


PACKAGES: Final = ("@grafana/schema@13", "typescript@>=5.5")
# Its compiler's options: types of the package alone, no output.
TSC: Final = (
    "--noEmit", "--strict", "--skipLibCheck", "--types", "",
    "--module", "esnext", "--moduleResolution", "bundler",
)  # fmt: skip
# Kinds of panels by their folder in the package; others (traces, row) have no types there.
TYPED_PANELS: Final = ("timeseries", "stat", "bargauge", "heatmap", "table", "text", "nodeGraph")
# Enumerations are unions of their values, as JSON has them.
HEAD: Final = """\
import type { Dashboard } from '@grafana/schema';
type Plain<T> = T extends string ? `${T}` : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
Checker = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def check_types(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    """Compile a TypeScript text with Grafana's types; what is wrong, one line for each fault."""
    if not (npm := shutil.which("npm")):
        pytest.skip("no npm: install Node.js 20 or newer")
    folder = get_cache_root() / "grafana-schema-13"
    if not (folder / "node_modules" / "typescript").is_dir():
        words = (npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix")
        subprocess.run((*words, str(folder), *PACKAGES), check=True, timeout=240)
    work = tmp_path_factory.mktemp("types")
    (work / "node_modules").symlink_to(folder / "node_modules")

    def compile_text(text: str) -> list[str]:
        (work / "check.ts").write_text(HEAD + text, "utf-8")
        compiler = work / "node_modules" / ".bin" / "tsc"
        done = subprocess.run(
            (str(compiler), *TSC, "check.ts"), cwd=work, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == (1 if done.stdout else 0), done.stderr
        return [line[:300] for line in done.stdout.splitlines()]

    return compile_text


def declare_value(name: str, kind: str, value: object) -> str:
    """A constant of a type, as an object literal, so that unknown properties count."""
    return f"export const {name}: {kind} = {json.dumps(value)};\n"


def strip_known_leftovers(board: CommittedDashboard) -> dict[str, Any]:
    """The dashboard without what Grafana 13 reads but its types no longer list.

    Settings of interval variables, which the SDK writes for each variable; the text of a query that Grafana's
    settings show; and the footer of a table, which is off.
    """
    found: dict[str, Any] = json.loads(json.dumps(board.model))
    for variable in found["templating"]["list"]:
        assert variable["type"] != "interval"
        for key in ("auto", "auto_min", "auto_count", "definition"):
            variable.pop(key, None)
    return found


@pytest.mark.full
def test_grafana_13_knows_every_setting(check_types: Checker) -> None:
    """Dashboards, each panel's options and the settings of its fields have the types of Grafana 13."""
    text = "".join(
        f"import type * as {kind} from './node_modules/@grafana/schema/dist/types/raw/composable/"
        f"{kind.lower()}/panelcfg/x/types.gen';\n"
        for kind in TYPED_PANELS
    )
    for number, board in enumerate(list_dashboards()):
        text += declare_value(f"board{number}", "Plain<Dashboard>", strip_known_leftovers(board))
        for panel in board.list_panels():
            if (kind := panel["type"]) not in TYPED_PANELS:
                continue
            name, custom = f"board{number}_{panel['id']}", panel.get("fieldConfig", {})
            # What a file leaves out has the panel's default.
            options = dict(panel["options"])
            assert not options.pop("footer", {}).get("show")
            text += declare_value(name, f"Plain<Partial<{kind}.Options>>", options)
            if found := custom.get("defaults", {}).get("custom"):
                text += declare_value(f"{name}f", f"Plain<Partial<{kind}.FieldConfig>>", found)
    assert check_types(text) == []


@pytest.mark.full
def test_faults_are_found(check_types: Checker) -> None:
    """The compiler refuses an unknown property, a link without its fields, and a wrong value."""
    board = strip_known_leftovers(list_dashboards()[0])
    for wrong in ({"graphTooltips": 1}, {"links": [{"title": 1}]}, {"timezone": None}):
        assert check_types(declare_value("board", "Plain<Dashboard>", board | wrong)), wrong
