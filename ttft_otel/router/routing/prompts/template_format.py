# SPDX-License-Identifier: Apache-2.0
"""Analyse a chat template's syntax tree: content as parts or as text, and its variables.

Follows the content-format detection of vLLM 0.32 (renderers/hf.py, Apache-2.0). Templates are only
parsed here, never run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

LoopVariable = tuple[nodes.Node, str]


class _GenerationTag(jinja2.ext.Extension):
    """The {% generation %} tag of transformers, which marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag into the call block that transformers uses."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generation_support")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
)


@lru_cache(maxsize=32)
def iterates_parts(template: str) -> bool:
    """Whether `template` iterates over content parts (vLLM's format "openai") or takes text ("string")."""
    try:
        return next(_find_content_loops(_ENVIRONMENT.parse(template)), None) is not None
    except (jinja2.TemplateError, AssertionError):
        return False


@lru_cache(maxsize=32)
def list_template_variables(template: str) -> frozenset[str]:
    """The variables that `template` reads without setting them itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        const = node.arg
        return _is_name(node.node, name) and isinstance(const, nodes.Const) and const.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _refers_to(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name`, or its item `key`, possibly sliced or filtered."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _refers_to(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _refers_to(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _refers_to(node.node, name, key)
    return _is_attribute(node, name, key) if key else _is_name(node, name)


def _find_aliases(root: nodes.Node, name: str) -> Iterator[str]:
    """The variable's name and the names that it is assigned to, transitively."""
    yield name
    waiting, seen = deque([name]), {name}
    while waiting:
        related = waiting.popleft()
        for each in root.find_all(nodes.Assign):
            if _refers_to(each.node, related):
                assert isinstance(each.target, nodes.Name)
                if each.target.name not in seen:
                    seen.add(each.target.name)
                    yield each.target.name
                    waiting.append(each.target.name)


def _get_loop_variable(loop: nodes.For) -> str:
    assert isinstance(loop.target, nodes.Name)
    return loop.target.name


def _find_message_variables(root: nodes.Node) -> list[str]:
    """Names of the loop variables that iterate over `messages`."""
    names = list(_find_aliases(root, "messages"))
    loops = root.find_all(nodes.For)
    return [
        _get_loop_variable(loop)
        for loop in loops
        if any(_refers_to(loop.iter, name) for name in names)
    ]


def _find_content_loops(root: nodes.Node) -> Iterator[nodes.For]:
    """Loops over the content of a message, including macro arguments and variables named `content`."""
    messages = _find_message_variables(root)
    # Inside a macro, `content` may be an unrelated parameter: only those that get content count.
    inside: set[int] = set()
    parameters_by_loop: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = _find_content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if names:
                parameters_by_loop[id(loop)] = names
    for loop in root.find_all(nodes.For):
        iterated: Any = loop.iter
        if any(_refers_to(iterated, message, "content") for message in messages):
            yield loop
        elif isinstance(iterated, nodes.Name):
            free = id(loop) not in inside and iterated.name == "content"
            if free or iterated.name in parameters_by_loop.get(id(loop), ()):
                yield loop


def _find_content_parameters(root: nodes.Node, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of the macro that receive a message's content in some call."""
    parameters: set[str] = set()
    argument_names = {argument.name for argument in macro.args}
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        for at, argument in enumerate(call.args[: len(macro.args)]):
            if any(_refers_to(argument, message, "content") for message in messages):
                parameters.add(macro.args[at].name)
        for keyword in call.kwargs:
            is_parameter = isinstance(keyword, nodes.Keyword) and keyword.key in argument_names
            if is_parameter and any(
                _refers_to(keyword.value, message, "content") for message in messages
            ):
                parameters.add(keyword.key)
    return parameters
