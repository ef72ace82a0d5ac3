# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards against the types of Grafana 13's schema package: as committed, and as schema v2.

TypeScript validates: a property that Grafana does not know, or of another type, is an error.
Grafana writes schema v2 itself when somebody saves a dashboard; `convert_dashboard` follows that conversion.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Final

import pytest

from lab.tiny_models import get_cache_root
from tests.stack.panel_queries import CommittedDashboard, list_dashboards

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
import type { Spec } from '@grafana/schema/apis/dashboard.grafana.app/v2';
type Plain<T> = T extends string ? `${T}` : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
REFRESH: Final = ("never", "onDashboardLoad", "onTimeRangeChanged")
SORT: Final = ("disabled", "alphabeticalAsc")
CURSOR: Final = ("Off", "Crosshair", "Tooltip")

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


def convert_query(target: dict[str, Any]) -> dict[str, Any]:
    """A target or a variable's query as schema v2 has it."""
    source = target["datasource"]
    own = {key: value for key, value in target.items() if key not in ("datasource", "refId")}
    return {
        "kind": "DataQuery", "group": source["type"], "version": "v0",
        "datasource": {"name": source["uid"]}, "spec": own,
    }  # fmt: skip


def convert_panel(panel: dict[str, Any]) -> dict[str, Any]:
    """A panel as an element."""
    queries = [
        {
            "kind": "PanelQuery",
            "spec": {"refId": each["refId"], "hidden": False, "query": convert_query(each)},
        }
        for each in panel.get("targets", ())
    ]
    transformations = [
        {"kind": "Transformation", "group": each["id"], "spec": {"options": each["options"]}}
        for each in panel.get("transformations", ())
    ]
    shown = {
        "options": panel.get("options", {}),
        "fieldConfig": panel.get("fieldConfig", {"defaults": {}, "overrides": []}),
    }
    data = {"queries": queries, "transformations": transformations, "queryOptions": {}}
    return {
        "kind": "Panel",
        "spec": {
            **{key: panel[key] for key in ("id", "title", "description", "transparent")},
            "links": [],
            "data": {"kind": "QueryGroup", "spec": data},
            "vizConfig": {"kind": "VizConfig", "group": panel["type"], "version": "", "spec": shown},
        },
    }  # fmt: skip


def convert_variable(variable: dict[str, Any]) -> dict[str, Any]:
    """A variable: a data source, a query for a label's values, or a text."""
    kept = ("name", "label", "current", "skipUrlSync")
    made = {**{key: variable[key] for key in kept}, "hide": "dontHide"}
    if variable["type"] == "textbox":
        return {"kind": "TextVariable", "spec": {**made, "query": variable["query"]}}
    made |= {key: variable[key] for key in ("multi", "includeAll", "allowCustomValue")}
    made |= {"refresh": REFRESH[variable.get("refresh", 0)], "regex": "", "options": []}
    if variable["type"] == "datasource":
        return {"kind": "DatasourceVariable", "spec": {**made, "pluginId": variable["query"]}}
    query = convert_query({**variable["query"], "datasource": variable["datasource"]})
    more = {key: variable[key] for key in ("allValue", "definition")}
    return {
        "kind": "QueryVariable",
        "spec": {**made, **more, "query": query, "sort": SORT[variable["sort"]]},
    }


def convert_rows(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a grid each; what stands before the first row has one without a heading."""
    rows: list[dict[str, Any]] = []
    for panel in panels:
        if panel["type"] == "row" or not rows:
            heading = panel if panel["type"] == "row" else {"title": "", "collapsed": False}
            grid: dict[str, Any] = {"kind": "GridLayout", "spec": {"items": []}}
            spec = {"title": heading["title"], "collapse": heading["collapsed"], "layout": grid}
            rows.append({"kind": "RowsLayoutRow", "spec": spec})
        for each in [panel] if panel["type"] != "row" else panel["panels"]:
            place, name = each["gridPos"], f"panel-{each['id']}"
            where = {"x": place["x"], "y": place["y"], "width": place["w"], "height": place["h"]}
            item = {**where, "element": {"kind": "ElementReference", "name": name}}
            grid["spec"]["items"].append({"kind": "GridLayoutItem", "spec": item})
    return rows


def convert_dashboard(board: CommittedDashboard) -> dict[str, Any]:
    """A dashboard of schema v2."""
    model = json.loads(json.dumps(board.model))
    elements = {f"panel-{each['id']}": convert_panel(dict(each)) for each in board.list_panels()}
    time = {
        **{key: model[key] for key in ("timezone", "fiscalYearStartMonth")}, **model["time"],
        "autoRefresh": model["refresh"], "autoRefreshIntervals": ["30s"], "hideTimepicker": False,
    }  # fmt: skip
    return {
        **{key: model[key] for key in ("title", "description", "editable", "links", "tags")},
        "annotations": [], "cursorSync": CURSOR[model["graphTooltip"]], "preload": False,
        "elements": elements, "timeSettings": time,
        "layout": {"kind": "RowsLayout", "spec": {"rows": convert_rows(model["panels"])}},
        "variables": [convert_variable(each) for each in model["templating"]["list"]],
    }  # fmt: skip


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
def test_schema_v2(check_types: Checker) -> None:
    """Both dashboards are dashboards of schema v2, with every panel in the layout once."""
    text = ""
    for number, board in enumerate(list_dashboards()):
        made = convert_dashboard(board)
        placed = [
            item["spec"]["element"]["name"]
            for row in made["layout"]["spec"]["rows"]
            for item in row["spec"]["layout"]["spec"]["items"]
        ]
        assert sorted(placed) == sorted(made["elements"])
        text += declare_value(f"board{number}", "Plain<Spec>", made)
    assert check_types(text) == []


@pytest.mark.full
def test_faults_are_found(check_types: Checker) -> None:
    """The compiler refuses a wrong property, a wrong value, and a missing one."""
    board = strip_known_leftovers(list_dashboards()[0])
    wrong = {**board, "graphTooltips": 1}, {**board, "links": [{"title": 1}]}
    spec = convert_dashboard(list_dashboards()[0])
    spec.pop("layout")
    for kind, value in (("Dashboard", wrong[0]), ("Dashboard", wrong[1]), ("Spec", spec)):
        assert check_types(declare_value("board", f"Plain<{kind}>", value)), kind
