# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards against the types of Grafana 13's schema package.

TypeScript validates: a property that Grafana does not know, or of another type, is an error.
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
type Plain<T> = T extends string ? `${T}` : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
pytestmark = pytest.mark.full

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


def test_faults_are_found(check_types: Checker) -> None:
    """The compiler refuses an unknown property, a link without its fields, and a wrong value."""
    board = strip_known_leftovers(list_dashboards()[0])
    for wrong in ({"graphTooltips": 1}, {"links": [{"title": 1}]}, {"timezone": None}):
        assert check_types(declare_value("board", "Plain<Dashboard>", board | wrong)), wrong
