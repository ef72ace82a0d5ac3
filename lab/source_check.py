# SPDX-License-Identifier: Apache-2.0
"""Check which of our targets a vLLM source tree has, and where the others have moved.

For vLLM versions without a wheel. The tree (`scripts/compat --source`) is only parsed, nothing of it is
imported or run. The targets are those of hooks/targets.py.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab import schedule_decisions
from lab.required_fields import FIELDS, VllmField
from ttft_otel.hooks import target_check
from ttft_otel.hooks.targets import TARGETS, PatchTarget, TargetPlace

PRESENT: Final = "present"
PARTLY: Final = "partly lost"  # a target of which some places are there
CHANGED: Final = "changed"  # present, but without a parameter that we read
LOST: Final = "lost"
MAX_CANDIDATES: Final = 5  # addresses named for one lost place

# Development versions do not match: they lie between releases, and are judged as the newest.
_RELEASE: Final = re.compile(r"\d+\.\d+(\.\d+)*((rc|\.post)\d+)?")
# As build tools write it: `__version__ = version = "0.32.0"`, at times with annotations.
_ASSIGNED: Final = re.compile(r"""__version__\b.*?=\s*["']([^"']+)["']""")


class SourceError(ValueError):
    """The folder holds no vLLM that can be checked; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class PlaceResult:
    """One address: PRESENT, CHANGED or LOST, why, and where a function of that name is now."""

    address: str
    state: str
    why: str = ""
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target and the results for its addresses."""

    target: PatchTarget
    places: tuple[PlaceResult, ...]

    @property
    def state(self) -> str:
        """PRESENT, PARTLY or LOST."""
        # CHANGED is not present: a parameter that we read is no longer there.
        present = [place.state == PRESENT for place in self.places]
        if all(present):
            return PRESENT
        return PARTLY if any(present) else LOST

    @property
    def unattributed(self) -> tuple[str, ...]:
        """Stages that become unattributed where a missing address is the one that vLLM uses."""
        return () if self.state == PRESENT else self.target.lost


@dataclass(frozen=True, slots=True)
class FieldResult:
    """Where a field that hooks read is in vLLM's sources.

    without: what goes wrong when it is not there.
    """

    place: PlaceResult
    without: str


@dataclass(frozen=True, slots=True)
class SourceResult:
    """Results for one tree; version "" is a tree between releases, checked as the newest."""

    folder: Path
    version: str
    targets: tuple[TargetResult, ...]
    fields: tuple[FieldResult, ...]
    decisions: tuple[str, ...] = ()  #: those of schedule() that nobody has looked at

    @property
    def complete(self) -> bool:
        """Whether all targets and fields are present, and all decisions known."""
        results = [target.state for target in self.targets]
        states = {*results, *(field.place.state for field in self.fields)}
        return states <= {PRESENT} and not self.decisions


def exists_in(place: TargetPlace, version: str) -> bool:
    """Whether the release `version` should have this place; "" is a tree newer than all."""
    if not version:
        return not place.until
    release = _parse_release(version)
    return _parse_release(place.since) <= release and (
        not place.until or release < _parse_release(place.until)
    )


def _parse_release(version: str) -> tuple[int, ...]:
    """Major and minor number, for comparing; "" comes before all others."""
    # Without the patch number: development versions have words in its place.
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()


def check_source(folder: Path) -> SourceResult:
    """Check all targets, fields and decisions in the tree `folder`. Raises SourceError."""
    package = find_package(folder)
    tree = SourceTree(package)
    version = read_version(package)
    try:
        # A target without any address in this version is not looked for, so it is not lost.
        targets = tuple(
            TargetResult(target, places)
            for target in TARGETS
            if (places := tuple(tree.check_places(target, version)))
        )
        fields = tuple(
            FieldResult(tree.check_field(row), row.without)
            for row in FIELDS
            if exists_in(TargetPlace(row.module, row.owner, row.since), version)
        )
        decisions = tuple(schedule_decisions.list_unknown(package))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise SourceError(f"a file of {package} is not Python that can be read: {error}") from error
    return SourceResult(package, version, targets, fields, decisions)


def find_package(folder: Path) -> Path:
    """The `vllm` package in the checkout `folder`, or `folder` itself. Raises SourceError."""
    # The second: somebody named the package itself.
    for package in (folder / "vllm", folder):
        if (package / "__init__.py").is_file() and (package / "v1").is_dir():
            return package.resolve()
    raise SourceError(
        f"{folder} is not a vLLM source tree: it has no vllm/__init__.py beside vllm/v1/. "
        "Give the root of a checkout (git clone https://github.com/vllm-project/vllm) "
        "or of an unpacked wheel of vLLM 0.20 or newer."
    )


def read_version(package: Path) -> str:
    """The release to which the tree belongs; "" between releases, or when it cannot be determined."""
    written = package / "_version.py"
    text = ""
    # Built or unpacked trees carry their version; a plain checkout has only its tags.
    if written.is_file():
        match = _ASSIGNED.search(written.read_text(encoding="utf-8", errors="replace"))
        text = match.group(1) if match else ""
    elif (package.parent / ".git").exists():
        text = _read_git_tag(package.parent)
    text = text.split("+")[0]  # a local part names the build, not the source
    return text if _RELEASE.fullmatch(text) else ""


def _read_git_tag(checkout: Path) -> str:
    # Exactly on a tag: `describe` of a later commit would name the release before it.
    ask = ["git", "-C", str(checkout), "describe", "--tags", "--exact-match", "--match", "v[0-9]*"]
    try:
        answer = subprocess.run(ask, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):  # no git, no tag, or somebody else's checkout
        return ""
    return answer.stdout.strip().removeprefix("v")


class SourceTree:
    """The .py files of one `vllm` package, searched by the names that they define."""

    def __init__(self, package: Path) -> None:
        self.package = package
        # Once for all searches; sorted, so that candidates come in the same order everywhere.
        self.paths = sorted(package.rglob("*.py"))

    def check_places(self, target: PatchTarget, version: str) -> Iterator[PlaceResult]:
        """Each address of a target inside vLLM, but for those that this version need not have."""
        for place in target.places:
            if place.module.startswith("vllm.") and exists_in(place, version):
                yield self._check_function(place, target.reads, target.places)
        for place in target.methods:
            if exists_in(place, version):
                yield self._check_method(place, target.reads)

    def _check_function(
        self, place: TargetPlace, reads: tuple[str, ...], siblings: tuple[TargetPlace, ...] = ()
    ) -> PlaceResult:
        """One address; `siblings` are checked themselves, so they are no new home of this one."""
        found = _read_module(self.package, place.module).functions.get(place.name)
        if found is None:
            known = tuple(f"{sibling.address}(" for sibling in siblings)
            candidates = tuple(
                address for address in self.find_candidates(place) if not address.startswith(known)
            )
            return PlaceResult(place.address, LOST, self._explain_loss(place), candidates)
        gone = [name for name in reads if name not in found]
        if gone:
            why = f"no parameter {', '.join(gone)}; it has ({', '.join(found)})"
            return PlaceResult(place.address, CHANGED, why)
        return PlaceResult(place.address, PRESENT)

    def _check_method(self, place: TargetPlace, reads: tuple[str, ...]) -> PlaceResult:
        """A connector's method: the base class no longer having it does not matter, if others do."""
        result = self._check_function(place, reads)
        folder = place.module.rsplit(".", 1)[0] + "."
        # Connectors define the method themselves; the base class only promises it.
        heirs = [address for address in result.candidates if address.startswith(folder)]
        if result.state == LOST and heirs:
            return PlaceResult(place.address, PRESENT, f"only in classes such as {heirs[0]}")
        return result

    def check_field(self, row: VllmField) -> PlaceResult:
        """Whether instances of a class have one of a field's names, wherever the class is now."""
        if self._has_field(row.module, row.owner, row.names):
            return PlaceResult(row.address, PRESENT)
        # A class may move to another module: fields are read from objects, wherever their class is.
        homes = [module for module in self.find_classes(row.owner) if module != row.module]
        for module in homes:
            if self._has_field(module, row.owner, row.names):
                return PlaceResult(row.address, PRESENT, f"the class is in {module} now")
        owners = tuple(f"{module}:{row.owner}" for module in homes[:MAX_CANDIDATES])
        defined = _read_module(self.package, row.module).fields
        known = row.owner in defined or bool(homes)
        why = "the class has no such name" if known else "there is no such class"
        return PlaceResult(row.address, LOST, why, owners)

    def _has_field(
        self, module: str, owner: str, names: tuple[str, ...], seen: frozenset[str] = frozenset()
    ) -> bool:
        """Whether a class, or one of its bases in the tree, has one of the names."""
        defined = _read_module(self.package, module)
        if not defined.fields.get(owner, set()).isdisjoint(names):
            return True
        # `seen` ends circles: classes are searched by name, and two modules may use the same one.
        bases = set(defined.bases.get(owner, ())) - seen - {owner, ""}
        return any(
            self._has_field(home, base, names, seen | {owner})
            for base in sorted(bases)
            for home in self.find_classes(base)[:1]
        )

    def find_candidates(self, place: TargetPlace) -> tuple[str, ...]:
        """Where functions of the place's last name are defined, likeliest first, with parameters."""
        *owner, name = place.name.split(".")
        ranked = []
        for path in self._files_with(f"def {name}("):
            module = self._module_of(path)
            for function, parameters in _read_definitions(path).functions.items():
                if function.rpartition(".")[2] == name:
                    same_class = function.split(".")[:-1] == owner
                    # The same class first, then the nearest module: moves are mostly short.
                    likeness = (not same_class, -_count_shared_parts(module, place.module), module)
                    ranked.append((likeness, f"{module}:{function}({', '.join(parameters)})"))
        return tuple(address for _, address in sorted(ranked))

    def find_classes(self, name: str) -> list[str]:
        """Modules that define a class of this name."""
        files = self._files_with(f"class {name}")
        return [self._module_of(path) for path in files if name in _read_definitions(path).fields]

    def _explain_loss(self, place: TargetPlace) -> str:
        if target_check.find_module_file(self.package, place.module) is None:
            return "the module is gone"
        owner = place.name.split(".")[0]
        defined = _read_module(self.package, place.module)
        if owner != place.name and owner not in defined.fields:
            return f"the module has no class {owner}"
        return "the name is gone"

    def _files_with(self, text: str) -> Iterator[Path]:
        """Files that hold a text: parsing only those makes a search take a second, not a minute."""
        wanted = text.encode()
        return (path for path in self.paths if wanted in path.read_bytes())

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self.package).with_suffix("").parts
        return ".".join(("vllm", *(part for part in parts if part != "__init__")))


@dataclass(frozen=True, slots=True)
class Definitions:
    """What one file defines at its top level.

    functions: "function" or "Class.method" -> names of its parameters.
    fields: class -> attributes that its own body gives an instance: declared, assigned to `self` in a
        method, or methods and properties.
    bases: class -> names of its base classes, without their modules.
    """

    functions: dict[str, tuple[str, ...]]
    fields: dict[str, set[str]]
    bases: dict[str, tuple[str, ...]]


NO_DEFINITIONS: Final = Definitions({}, {}, {})


def _read_module(vllm: Path, module: str) -> Definitions:
    """The definitions of `module` below the package folder `vllm`; empty when it does not exist.

    Raises SyntaxError for a file that this Python cannot parse.
    """
    path = target_check.find_module_file(vllm, module)
    return _read_file(path) if path is not None else NO_DEFINITIONS


def _read_file(path: Path) -> Definitions:
    # Part of the cache's key, so that a file that has changed is read again.
    state = path.stat()
    return _parse_file(path, (state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=128)
def _parse_file(path: Path, _state: tuple[int, int]) -> Definitions:
    tree = ast.parse(path.read_bytes(), str(path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    fields: dict[str, set[str]] = {}
    for node in classes:  # two of one name are alternatives, by platform
        fields.setdefault(node.name, set()).update(_list_fields(node))
    bases = {node.name: tuple(map(_get_base_name, node.bases)) for node in classes}
    return Definitions(target_check.list_functions(tree), fields, bases)


def _list_fields(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield item.name
            # In any method, not only __init__: a field may be set in a helper that it calls.
            yield from _list_names_set_on_self(item)
        elif isinstance(item, (ast.AnnAssign, ast.Assign)):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _list_names_set_on_self(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _get_base_name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript):  # Generic[T]
        base = base.value
    # Other expressions have no name: such a base is taken for one that gives no fields.
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _read_definitions(path: Path) -> Definitions:
    """A file's definitions; none for a file that cannot be parsed."""
    try:
        return _read_file(path)
    except (SyntaxError, ValueError):
        # One file that this Python cannot parse must not end the search through all others.
        return NO_DEFINITIONS


def _count_shared_parts(module: str, other: str) -> int:
    """How many leading parts two dotted names have in common."""
    count = 0
    for one, two in zip(module.split("."), other.split("."), strict=False):
        if one != two:
            break
        count += 1
    return count


def format_source_result(result: SourceResult) -> str:
    """Text with what is lost, where it may be now, which stages are affected, and what to do."""
    lines = [f"{result.folder}: {_describe_version(result)}", _summarize_counts(result)]
    # Only what is wrong, in the order of the targets; what is present is counted above.
    for target in result.targets:
        if target.state != PRESENT:
            lines += ["", *_describe_target(target)]
    lost = [field for field in result.fields if field.place.state != PRESENT]
    if lost:
        lines += ["", "fields that hooks read:"]
    for field in lost:
        lines += _describe_place(field.place)
        lines.append(f"      without it: {field.without}")
    if result.decisions:
        lines += ["", "decisions of the scheduler without a reason of ours:", *result.decisions]
    if lost or any(target.state != PRESENT for target in result.targets):
        lines += [
            "",
            # What to do next stands at the end, where a terminal leaves the reader.
            "Add the new address in ttft_otel/hooks/targets.py as a TargetPlace with `since`, or the",
        ]
        lines += ["new name in hooks/; then scripts/compat VERSION once there is a wheel."]
    return "\n".join(lines)


def source_result_to_dict(result: SourceResult) -> dict[str, Any]:
    """The `result` for JSON; `complete` corresponds to exit code 0."""
    return {
        "source": str(result.folder),
        "version": result.version,
        "complete": result.complete,
        "targets": {target.target.name: _target_to_dict(target) for target in result.targets},
        "fields": [
            {**_place_to_dict(field.place), "without": field.without} for field in result.fields
        ],
        "decisions": list(result.decisions),
    }


def _describe_version(result: SourceResult) -> str:
    return f"vLLM {result.version}" if result.version else "no release, judged as the newest vLLM"


def _summarize_counts(result: SourceResult) -> str:
    present = sum(target.state == PRESENT for target in result.targets)
    fields = sum(field.place.state == PRESENT for field in result.fields)
    return (
        f"{present} of {len(result.targets)} targets and {fields} of {len(result.fields)} fields "
        "are where we look for them"
    )


def _describe_target(target: TargetResult) -> list[str]:
    lines = [f"{target.target.name}: {target.state} ({target.target.marks})"]
    for place in target.places:
        if place.state != PRESENT:
            lines += _describe_place(place)
    # Partly lost: which of the addresses vLLM uses depends on its settings.
    where = "" if target.state != PARTLY else " where that is what runs"
    lines.append(f"  unattributed{where}: {_join_stages(target.unattributed)}")
    return lines


def _describe_place(place: PlaceResult) -> list[str]:
    lines = [f"  {place.state}: {place.address}: {place.why}"]
    lines += [f"    now perhaps: {address}" for address in place.candidates[:MAX_CANDIDATES]]
    # Common names such as `forward` are defined in many classes.
    more = len(place.candidates) - MAX_CANDIDATES
    if more > 0:
        lines.append(f"    and {more} more functions of that name")
    return lines


def _join_stages(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing, a detail inside a stage is missing"


def _target_to_dict(target: TargetResult) -> dict[str, Any]:
    row = target.target
    # None: an encoder loses the same stages as any other server.
    encode = row.lost if row.lost_encode is None else row.lost_encode
    return {
        "state": target.state,
        "places": [_place_to_dict(place) for place in target.places],
        "unattributed": list(target.unattributed),
        "unattributed_on_encoder": list(encode) if target.state != PRESENT else [],
    }


def _place_to_dict(place: PlaceResult) -> dict[str, Any]:
    return {
        "address": place.address,
        "state": place.state,
        "why": place.why,
        "candidates": list(place.candidates),
    }
