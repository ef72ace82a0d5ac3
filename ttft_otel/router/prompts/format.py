# SPDX-License-Identifier: Apache-2.0
"""What a chat template reads, from its syntax tree: parts or plain text, and which variables.

After vLLM 0.32: renderers/hf.py, Apache-2.0. Templates are parsed here, never run.
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

Loop = tuple[nodes.Node, str]


class _Generation(jinja2.ext.Extension):
    """The tag with which templates mark what the assistant said."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The marked text, called as transformers calls it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generation_support")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)


@lru_cache(maxsize=32)
def wraps(template: str) -> bool:
    """Whether it goes through a message's parts ("openai"), or takes the content as text ("string")."""
    try:
        return next(_contents(_ENVIRONMENT.parse(template)), None) is not None
    except (jinja2.TemplateError, AssertionError):
        return False


@lru_cache(maxsize=32)
def reads(template: str) -> frozenset[str]:
    """The variables that it does not set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        const = node.arg
        return _is_name(node.node, name) and isinstance(const, nodes.Const) and const.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _is(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """The variable, or its key, or a slice of that, or filtered."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _is(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is(node.node, name, key)
    return _is_attribute(node, name, key) if key else _is_name(node, name)


def _aliases(root: nodes.Node, name: str) -> Iterator[str]:
    """The variable's name, and those of others that it is assigned to."""
    yield name
    waiting, seen = deque([name]), {name}
    while waiting:
        related = waiting.popleft()
        for each in root.find_all(nodes.Assign):
            if _is(each.node, related):
                assert isinstance(each.target, nodes.Name)
                if each.target.name not in seen:
                    seen.add(each.target.name)
                    yield each.target.name
                    waiting.append(each.target.name)


def _target(loop: nodes.For) -> str:
    assert isinstance(loop.target, nodes.Name)
    return loop.target.name


def _messages(root: nodes.Node) -> list[str]:
    """Names of loop variables over the messages."""
    names = list(_aliases(root, "messages"))
    loops = root.find_all(nodes.For)
    return [_target(loop) for loop in loops if any(_is(loop.iter, name) for name in names)]


def _contents(root: nodes.Node) -> Iterator[nodes.For]:
    """Loops over a message's content, also as a macro's argument or a variable called content."""
    messages = _messages(root)
    inside: set[int] = set()
    passed: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = _passed(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if names:
                passed[id(loop)] = names
    for loop in root.find_all(nodes.For):
        over: Any = loop.iter
        if any(_is(over, message, "content") for message in messages):
            yield loop
        elif isinstance(over, nodes.Name):
            free = id(loop) not in inside and over.name == "content"
            if free or over.name in passed.get(id(loop), ()):
                yield loop


def _passed(root: nodes.Node, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """The macro's parameters that get a message's content."""
    found: set[str] = set()
    own = {argument.name for argument in macro.args}
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        for at, argument in enumerate(call.args[: len(macro.args)]):
            if any(_is(argument, message, "content") for message in messages):
                found.add(macro.args[at].name)
        for keyword in call.kwargs:
            theirs = isinstance(keyword, nodes.Keyword) and keyword.key in own
            if theirs and any(_is(keyword.value, message, "content") for message in messages):
                found.add(keyword.key)
    return found
