# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and docs against the code: links, vocabulary, flags, pictures, commands, functions."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from lab import compat, demo
from lab.stack import command as stack
from tests.model.test_names import list_constants as list_all_constants
from ttft_otel.commands import main as cli
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import command as router
from ttft_otel.hooks import target_check
from ttft_otel.model import stages, timing
from ttft_otel.model.names import env_names, header_names, keys
from ttft_otel.report.foreign.products import PRODUCTS
from ttft_otel.router import errors
from ttft_otel.tracing import settings

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
README = (ROOT / "README.md").read_text("utf-8")
REFERENCE = {
    page.stem: page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")
}
SETTINGS = REFERENCE["settings"]
VOCABULARY = json.loads((ROOT / "tests" / "golden" / "vocabulary.json").read_text("utf-8"))["names"]
SPANS = {
    *("ttft", "encode", "ttft.sibling", "ttft.handover"),
    *("ttft.kv.kept", "ttft.ec.kept", "ttft.encoder.run"),
}
MAX_README_WORDS = 700
STAGES = (ROOT / "docs" / "stages.md").read_text("utf-8")
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)

LINK = re.compile(r"\[[^]]*]\(([^)\s]+)\)")
WORD = re.compile(r"`([^`\n]+)`")
OURS = re.compile(r"ttft\.[a-z_]+(?:\.[a-z_]+)*")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL
    )
    assert found, heading
    return found[1]


def read_rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headings and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def strip_code(cell: str) -> str:
    """A cell's text without the code marks."""
    return cell.strip("` |")


def list_constants(prefix: str = "") -> dict[str, str]:
    """The public names in names/ whose constant begins with `prefix`, by their constant."""
    return {key: value for key, value in list_all_constants().items() if key.startswith(prefix)}


def make_anchor(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def list_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings; nothing of other files."""
    if page.suffix != ".md" or not page.is_file():
        return set()
    return {make_anchor(each) for each in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)}


def test_links() -> None:
    """Every relative link leads to a file that is there, and to a heading in it."""
    broken = []
    assert REPORTS
    for page in (*PAGES, *REPORTS):
        for link in LINK.findall(page.read_text("utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link and not (
                target.exists() and (not anchor or anchor in list_anchors(target))
            ):
                broken.append((page.name, link))

    assert not broken


def test_decisions() -> None:
    """ADRs are numbered without a gap, dated, in one form, and their index finds them by their names."""
    folder = ROOT / "docs" / "adr"
    pages = sorted(folder.glob("[0-9]*.md"))

    # The site lists what the pattern finds.
    assert ":glob:\n\n[0-9]*\n" in (folder / "index.md").read_text("utf-8")
    assert [int(page.name[:3]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text("utf-8")
        assert text.startswith(f"# {page.name[:3]} ")
        assert re.search(r"^Status: \w+ · Date: \d{4}-\d\d-\d\d", text, re.MULTILINE)
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"]


def test_stages() -> None:
    """The tables of stages and parts are those of stages.py: names, order, kinds, roles, sentences."""
    words = {
        stages.STAGES_BY_NAME["ipc"].roles: "all",
        stages.STAGES_BY_NAME["receive"].roles: "all, render",
    }
    expected = [
        [
            f"`{stage.name}`",
            stage.kind,
            stage.process,
            words.get(stage.roles) or ", ".join(stage.roles),
            stage.says,
        ]
        for stage in stages.STAGES
    ]
    found = [row for row in read_rows(read_section(STAGES, "Stages of a server")) if len(row) == 6]
    parts = read_rows(read_section(STAGES, "Parts of a stage"))
    routers = read_rows(read_section(STAGES, "Stages of the router"))

    assert expected == [row[:5] for row in found]
    assert all(row[5].rstrip("| ") for row in found)
    assert {
        strip_code(name): tuple(WORD.findall(text)) for name, text in parts
    } == stages.STAGE_PARTS
    assert {strip_code(name): says.rstrip(" |") for name, says in routers} == {
        name: stage.says for name, stage in stages.ROUTER_STAGES.items()
    }


def test_services() -> None:
    """Each role's service name is the one that spans get."""
    found = read_rows(read_section(REFERENCE["attributes"], "Resource"))

    assert {strip_code(role): strip_code(name) for role, name in found} == stages.SERVICE_NAMES


def test_report_fields() -> None:
    """The report's fields are the sums that timing.py makes."""
    found = {strip_code(row[0]): row[1] for row in read_rows(REFERENCE["report"])}
    sums = {field: tuple(WORD.findall(text)) for field, text in found.items()}

    assert stages.REPORT_FIELDS == {field: sums[field] for field in stages.REPORT_FIELDS}
    assert set(found) == {
        *stages.REPORT_FIELDS,
        *(timing.TTFT_MS_KEY, timing.UNATTRIBUTED_MS_KEY, timing.STAGES_KEY),
    }


def test_names() -> None:
    """Every attribute, header, metric and variable is documented somewhere."""
    words = (name for word in WORD.findall(TEXT) for name in env_names.expand_names(word))
    told = {word.removesuffix("_total") for word in words}

    assert [] == sorted(set(list_constants().values()) - told)


def test_vocabulary() -> None:
    """Every `ttft.*` word in a page is a name of ours."""
    words = {word for word in WORD.findall(TEXT) if OURS.fullmatch(word)}
    unknown = words - set(list_constants().values())

    read = (keys.parse_stage_attribute, keys.parse_reason_attribute)
    assert [] == sorted(word for word in unknown if not any(call(word) for call in read))


def test_variables() -> None:
    """The lists of variables have every one that users may set, with its real default."""
    table = {
        strip_code(row[0]): row[1] for row in read_rows(read_section(SETTINGS, "Variables"))
    } | {
        name: default
        for pattern, (default, _) in env_names.FOLLOWED.items()
        for name in env_names.expand_names(pattern)
    }
    plain = settings.Settings()
    defaults = {
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: plain.endpoint,
        env_names.OTEL_EXPORTER_OTLP_PROTOCOL: plain.protocol,
        env_names.OTEL_TRACES_SAMPLER: plain.sampler,
        env_names.OTEL_TRACES_SAMPLER_ARG: str(plain.ratio),
        env_names.TTFT_OTEL_TRUST_SAMPLED: str(int(plain.trust_sampled)),
        env_names.TTFT_OTEL_QUEUE_BYTES: str(plain.queue_bytes),
        env_names.TTFT_OTEL_DETAIL: plain.detail,
    }

    assert set(list_constants("env_names.").values()) <= set(table)
    assert table[env_names.TTFT_OTEL] == "off" and not plain.on
    assert defaults == {name: strip_code(table[name]) for name in defaults}


def test_flags() -> None:
    """The tables of flags are those of the commands: docs/generate_reference.py would change nothing."""
    script = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
    shown = set()
    for page in script["PAGES"]:
        text = page.read_text("utf-8")
        assert script["render_page"](text) == text, f"run docs/generate_reference.py: {page.name}"
        shown |= {found[3] or found[2] for found in script["MARK"].finditer(text)}

    registry = {key for key in script["load_registry"]() if key.startswith("registry.")}
    lists = {"limits", "otel", "vocabulary", "spans", "page", "router", "routing"}
    assert shown == {*cli.SUBCOMMANDS} | registry | lists | {"collector"}


def test_foreign_names() -> None:
    """What the vocabulary says of others names stages of ours, and vLLM's names as vLLM has them."""
    folder = target_check.find_vllm_folder()
    known = {*stages.STAGE_NAMES, *stages.ROUTER_STAGES, "the TTFT", ""}
    conventions = (ROOT / "tests" / "golden" / "genai_conventions.json").read_text("utf-8")
    named = {each.name: [name for row in each.rows for name in row.names] for each in PRODUCTS}

    assert {row.stage for each in PRODUCTS for row in each.rows} <= known
    assert all(f'"{name}"' in conventions for name in named["GenAI conventions"])
    assert folder is not None, "vLLM is not installed"
    own = (folder / "tracing" / "utils.py").read_text("utf-8")
    assert all(f'"{name}"' in own for name in named["vLLM's own tracing"])


def test_promises() -> None:
    """Every promise of the security page names its tests, which exist; each file of attacks is there."""
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    section = read_section(page, "Promises, and the tests that hold them")
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    named = [set(re.findall(r"`(\S+?\.py)`", row)) for row in rows]
    tests = ROOT / "tests"
    attacks = {f"attack/{path.name}" for path in (tests / "attack").glob("test_*.py")}

    assert len(rows) > 10 and all(named)
    assert [name for names in named for name in names if not (tests / name).is_file()] == []
    assert attacks <= set().union(*named)


def test_front_doors() -> None:
    """Every row of the table of what is traced names tests that exist, or says why there is none."""
    section = (ROOT / "docs" / "limits.md").read_text("utf-8")
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    missing = []
    for *_, cell in rows:
        named = re.findall(r"`([a-z]\S+?\.py)(?:::(\w+))?`", cell)
        assert named or cell.startswith("none"), cell
        for file, name in named:
            path = ROOT / "tests" / file
            text = path.read_text("utf-8") if path.is_file() else ""
            if f"def {name or 'test_'}" not in text:
                missing.append((file, name))

    assert len(rows) > 15 and not missing


def test_refusal_reasons() -> None:
    """Every reason of a refusal, the label of its metric, is explained with its status."""
    explained = {
        cells[0].strip("`") for cells in read_rows(read_section(REFERENCE["limits"], "Refusals"))
    }
    used = {*errors.REASONS.values(), errors.OTHER_REASON}
    for path in (ROOT / "ttft_otel" / "router").rglob("*.py"):
        tree = ast.parse(path.read_bytes())
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        refusals = (call for call in calls if ast.unparse(call.func).endswith("RequestRejected"))
        given = (word.value for call in refusals for word in call.keywords if word.arg == "reason")
        used |= {value.value for value in given if isinstance(value, ast.Constant)}

    assert len(used) > 10 and used <= explained


def test_router_variables() -> None:
    """The variable of a router's flag follows the rule that its page tells."""
    for option in router.params:
        assert isinstance(option, click.Option)
        variable = router_options.ENV_PREFIX + option.opts[0][2:].upper().replace("-", "_")
        variables = option.envvar if isinstance(option.envvar, list) else [option.envvar]
        assert variables[0] == variable


def list_first_cells(page: str) -> list[str]:
    """The names in the first column of a page's tables."""
    return [word for row in read_rows(page) for word in WORD.findall(row[0])]


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("metrics", r"metric_names\."),
        ("headers", r"header_names\.\w+: (x-|server-timing|traceparent|tracestate)"),
        ("attributes", r"keys\.\w+: (\w+\.|ttft_)"),
    ],
)
def test_reference_is_complete(page: str, pattern: str) -> None:
    """A reference page has every name of its kind in the vocabulary once, and no other."""
    wanted = {name for key, name in VOCABULARY.items() if re.match(pattern, f"{key}: {name}")}
    general = {
        "ttft.queue.<reason>_us",
        "ttft.stall.<reason>_us",
        "ttft.held.<kind>_us",
        "ttft.<stage>_us",
        "ttft.handover.<step>_us",
        *stages.SERVICE_NAMES,
    }
    table = REFERENCE[page].partition("## Server-Timing")[0]
    found = [name.removesuffix("_total") for name in list_first_cells(table) if name not in general]

    assert sorted(found) == sorted(wanted - SPANS)


def test_spans() -> None:
    """The table of spans has each span that the vocabulary names."""
    assert set(VOCABULARY.values()) >= SPANS
    assert {name for name in list_first_cells(REFERENCE["trace"]) if "<" not in name} == SPANS


def test_picture() -> None:
    """A stranger reads the README in three minutes; its waterfall adds up, and all its stages are ours."""
    picture = next(text for kind, text in BLOCK.findall(README) if not kind)
    found = {
        line.split()[0]: round(float(line.split()[-1]) * 1000) for line in picture.splitlines()
    }
    whole = found.pop(header_names.TIMING_TTFT)

    assert len(README.split()) <= MAX_README_WORDS
    assert all(stages.is_known_stage(name) for name in found)
    assert sum(found.values()) == whole


def test_pictures() -> None:
    """The pictures of divided TTFTs are what docs/generate_pictures.py draws, and pages show them."""
    script = runpy.run_path(str(ROOT / "docs" / "generate_pictures.py"))
    for name, strips in script["PICTURES"].items():
        kept = (script["FOLDER"] / f"cut-{name}.svg").read_text("utf-8")
        assert kept == script["draw"](strips), "run docs/generate_pictures.py"
        assert f"img/cut-{name}.svg)" in TEXT


def test_timing() -> None:
    """The Server-Timing shown is one that a server writes, and its table has every entry that is no stage."""
    text = re.search(r"^    (receive;.*?)\n\n", REFERENCE["headers"], re.MULTILINE | re.DOTALL)
    assert text
    line = " ".join(text[1].split())
    found = timing.parse_server_timing(line)
    rows = read_rows(read_section(REFERENCE["headers"], "Server-Timing"))

    assert found is not None
    assert timing.format_server_timing(found.stages, found.unattributed, found.ttft) == line
    entries = {stages.UNATTRIBUTED, *list_constants("header_names.TIMING_").values()}
    assert {row[0].split("`")[1] for row in rows} == entries


GUIDES = [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def list_commands() -> list[list[str]]:
    """Every command in the bash blocks of the README and of the guides, in words."""
    texts = [README, *(page.read_text("utf-8") for page in GUIDES)]
    blocks = [text for page in texts for kind, text in BLOCK.findall(page) if kind == "bash"]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_own(arguments: list[str]) -> None:
    """A subcommand of ours that this version has, with flags that it has."""
    name, *rest = arguments
    door = cli.SUBCOMMANDS[name]
    cli.load_subcommand(name, door).make_context(name, rest)  # parses, and does not run it


def check_script(name: str) -> Callable[[list[str]], None]:
    """A script that can be executed, with flags that it has."""

    def check(arguments: list[str]) -> None:
        assert os.access(ROOT / name, os.X_OK)
        known = {"scripts/demo": demo.run_demo, "scripts/compat": compat.run_compat}
        if name in known:
            known[name].make_context(name, list(arguments))
        assert name in known or all(flag in (ROOT / name).read_text("utf-8") for flag in arguments)

    return check


def check_pip(arguments: list[str]) -> None:
    """Only this project, with extras that it has."""
    install, wanted = arguments
    found = re.fullmatch(r"\.(?:\[([\w,]+)])?", wanted)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert install == "install" and found
    for extra in (found[1] or "").split(","):
        assert not extra or f"\n{extra} = [" in project


def read_vllm(*patterns: str) -> str:
    """Files of the installed vLLM, one after another."""
    package = target_check.find_vllm_folder()
    if package is None:
        pytest.skip("no vLLM here; run scripts/install")
    paths = [path for pattern in patterns for path in package.glob(pattern)]
    return "\n".join(path.read_text("utf-8") for path in paths)


def check_vllm(arguments: list[str]) -> None:
    """`vllm serve` with flags of the installed vLLM; values that are JSON are JSON."""
    source = read_vllm("engine/arg_utils.py", "**/cli_args.py")
    assert arguments[0] == "serve"
    for word in arguments:
        if word.startswith("--"):
            field = word.removeprefix("--").removeprefix("no-").replace("-", "_")
            assert re.search(rf"\b{field}\b", source), word
        if word.startswith("{"):
            more = json.loads(word).get("ec_connector_extra_config", {})
            connectors = read_vllm("distributed/**/*.py")
            assert all(f'"{key}"' in connectors for key in more), more


def check_curl(arguments: list[str]) -> None:
    """A local address, headers that mean something, a body that is JSON."""
    pairs = list(zip(arguments, arguments[1:], strict=False))
    headers = [value.partition(":")[0] for flag, value in pairs if flag == "-H"]
    assert any(word.startswith("http://127.0.0.1:") for word in arguments)
    assert set(headers) <= {"content-type", "X-API-Key", *list_constants().values()}
    assert all(json.loads(value) for flag, value in pairs if flag == "-d")


def check_docker(arguments: list[str]) -> None:
    """`docker compose up -d` with profiles that docker-compose.yml has (test_compose.py reads each), or
    a build from a Dockerfile that is there."""
    if arguments[0] == "build":
        flag, file, tag, _, folder = arguments[1:]
        assert (flag, tag, folder) == ("-f", "-t", ".") and (ROOT / file).is_file()
        return
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    known = {each for found in re.findall(r"profiles: \[(.*)]", text) for each in found.split(", ")}
    compose, *chosen, up, detached = arguments
    assert (compose, up, detached) == ("compose", "up", "-d")
    assert set(chosen[::2]) <= {"--profile"} and set(chosen[1::2]) <= known


def check_stack(arguments: list[str]) -> None:
    """A subcommand of scripts/stack, with flags that it has."""
    name, *rest = arguments
    stack.main.commands[name].make_context(name, rest)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "docker": check_docker,
    "scripts/stack": check_stack,
    "ttft-otel": check_own,
    "pip": check_pip,
    "vllm": check_vllm,
    "curl": check_curl,
    "scripts/demo": check_script("scripts/demo"),
    "scripts/test": check_script("scripts/test"),
    "scripts/compat": check_script("scripts/compat"),
}


@pytest.mark.parametrize("words", list_commands(), ids=" ".join)
def test_commands(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that README and guides show exists, with its flags, variables and files."""
    monkeypatch.chdir(tmp_path)
    for page in GUIDES:
        for kind, text in BLOCK.findall(page.read_text("utf-8")):
            if kind == "yaml":
                Path(text.splitlines()[0].removeprefix("# ")).write_text(text, "utf-8")

    words = words[: words.index("|")] if "|" in words else words
    for name in words:
        if name.endswith((".json", ".jsonl", ".txt")):
            Path(name).touch()
    while "=" in words[0]:
        name = words[0].partition("=")[0]
        assert name in list_constants("env_names.").values() or f'"{name}"' in read_vllm("envs.py")
        words = words[1:]

    CHECKS[words[0]](words[1:])


def test_commands_told() -> None:
    """README and guides show every subcommand, and the two commands that everybody needs."""
    shown = [words[1] if words[0] == "ttft-otel" else words[0] for words in list_commands()]

    assert {*cli.SUBCOMMANDS, "scripts/demo", "scripts/test"} <= set(shown)


CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Paths of the package may be written without its folder.
BASES = (ROOT, ROOT / "ttft_otel")

BLOCK_LINE = re.compile(r"^ {4}(?! )(.*)$", re.M)
FILE_NAME = re.compile(r"[\w./-]+\.(?:py|md|svg|json|yml|yaml|toml|txt)")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*\(\)")
MODULE_MEMBER = re.compile(r"([a-z_]+)\.([A-Z]\w+|[a-z]+_\w+)")
# A word in capitals stands for a name that the reader puts in.
PLACEHOLDER = re.compile(r"(?:^|/)[A-Z_]+$")


def list_code_words(text: str) -> Iterator[str]:
    """Words of code spans and of indented blocks, without comments."""
    for span in (*WORD.findall(text), *BLOCK_LINE.findall(text)):
        yield from span.split(" # ")[0].split()


def list_missing_paths(text: str) -> list[str]:
    """Files and folders that are named and are not there; placeholders and other places apart."""
    missing = []
    for word in list_code_words(text):
        path = PLACEHOLDER.sub("", word)
        is_path = FILE_NAME.fullmatch(path) or FOLDER.fullmatch(path)
        if is_path and not path.startswith(("../", ".venv/")):
            if not any((base / path).exists() for base in BASES):
                missing.append(word)
    return missing


def list_definitions(path: Path) -> set[str]:
    """Functions, methods (Class.method), classes and constants that a file defines."""
    found = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def list_missing_functions(text: str) -> list[str]:
    """Functions, written `name()`, that no file named on the same line defines."""
    missing = []
    for line in text.splitlines():
        words = WORD.findall(line)
        files = [word for word in words if word.endswith(".py")]
        paths = [base / file for file in files for base in BASES if (base / file).is_file()]
        defined = {name for path in paths for name in list_definitions(path)}
        names = [word[:-2] for word in words if FUNCTION.fullmatch(word)]
        missing += [name for name in names if name not in defined]
    return missing


def list_missing_members(text: str) -> list[str]:
    """`module.member` of a module of the package that does not define it."""
    missing = []
    for word in WORD.findall(text):
        found = MODULE_MEMBER.fullmatch(word)
        paths = sorted((ROOT / "ttft_otel").rglob(f"{found[1]}.py")) if found else []
        if found and paths and not any(found[2] in list_definitions(path) for path in paths):
            missing.append(word)
    return missing


@pytest.mark.parametrize("page", [CONTRIBUTING, ARCHITECTURE], ids=lambda page: page.stem)
def test_references(page: Path) -> None:
    """Every path is there, every function in the file beside it, every member in its module."""
    text = page.read_text("utf-8")

    assert list_missing_paths(text) == []
    assert list_missing_functions(text) == []
    assert list_missing_members(text) == []


def test_walk() -> None:
    """Each step of the walk on docs/architecture.md names one file and one function."""
    walk = ARCHITECTURE.read_text("utf-8").partition("## One request through the code")[2]
    rows = [line for line in walk.splitlines() if line.startswith("| ") and "**" not in line]
    steps = [row for row in rows if ".py`" in row]

    assert len(steps) >= 20
    assert rows[1:] == steps, "the first row is the heading"
    assert all(
        len(re.findall(r"\.py`", row)) == len(re.findall(r"\(\)`", row)) == 1 for row in steps
    )


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`tests/live`, `hooks/worker/`, `plugin.py`, `docker-compose.yml`", []),
        ("`tests/dead`, `hooks/aims/`, `nouns.py`", ["tests/dead", "hooks/aims/", "nouns.py"]),
        ("    scripts/lint  # tests/dead\n    scripts/comb", ["scripts/comb"]),
        ("`tests/stack/tools/NAME`, `tests/stack/toys/NAME`", ["tests/stack/toys/NAME"]),
        ("`../vllm`, `--json`, `lab.style`, 3/4, `word`", []),
    ],
)
def test_missing_paths(text: str, missing: list[str]) -> None:
    """What counts as a path, and what is found missing."""
    assert list_missing_paths(text) == missing


def test_missing_functions() -> None:
    """A function must be in the file of its line, a member in its module."""
    assert list_missing_functions("`tracing/asgi.py` `TracingMiddleware.__call__()`") == []
    assert list_missing_functions("`tracing/asgi.py` `TracingMiddleware.call()`") == [
        "TracingMiddleware.call"
    ]
    assert list_missing_functions("`tracing/clock.py` `start_context()`") == ["start_context"]
    assert list_missing_functions("`start_context()`") == ["start_context"]
    assert list_missing_members("`carrier.TIMELINE_VERSION`, `breakdown.Marks`") == []
    assert list_missing_members("`carrier.AGE_LIMIT`, `other.thing`") == ["carrier.AGE_LIMIT"]
