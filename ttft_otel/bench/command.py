# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel bench`: operators type it; session.py runs it, document.py has its result."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from ttft_otel.bench import data, learn, page, replay, rounds, screen
from ttft_otel.bench.ask import Form
from ttft_otel.bench.compare import compare
from ttft_otel.bench.contrast import contrast
from ttft_otel.bench.document import document
from ttft_otel.bench.options import OUT, ROUNDS, WHAT, WHEN, WHERE, flags, misplaced
from ttft_otel.bench.plan import TALKS, Plan, Unfit
from ttft_otel.bench.session import Interrupts, Side, check, play
from ttft_otel.bench.wire import Target

LIMITS: Final = ("ttft", "tpot", "latency")
HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:([\t\x20-\x7e\x80-\xff]*)")
OURS: Final = ("content-length", "transfer-encoding", "connection")
INVALID: Final = 3
INTERRUPTED: Final = 130


class Bench(click.Command):
    """A command with one word that is another command: `bench compare`, beside `bench --url ...`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Give way to `compare` where it is the first word."""
        if args[:1] == ["compare"]:
            return contrast.make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=Bench,
    epilog="""\b
Examples:
  ttft-otel bench --url http://127.0.0.1:8000 --rate 4
  ttft-otel bench --url http://127.0.0.1:8000 --concurrency 8 --slo ttft=500 --slo tpot=50
  ttft-otel bench --url http://127.0.0.1:8000 --dataset replay trace.jsonl --speed 2
  ttft-otel bench --url http://127.0.0.1:8000 --dataset multi-round --qps 2 --time 120
  ttft-otel bench --ab http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 4 --repeat 5
  ttft-otel bench compare A.json B.json     two files that --output wrote

\b
Exit status: 0, 1 if no request succeeded, 3 if the run is not valid, 130 after Ctrl-C.""",
)
@flags(WHERE, WHAT, ROUNDS, WHEN, OUT)
def bench(**given: Any) -> None:
    """Send load and say where each request's time to first token went."""
    slo = _limits(given["slos"])
    plan = _plan(given)
    _writable(given)
    sides = _sides(given)
    progress = screen.Progress(Console(stderr=True))
    interrupts = Interrupts()
    try:
        check(plan, sides)
        with interrupts.noted():
            with closing(progress):
                play(plan, sides, progress, interrupts)
            interrupts.ignore()
            found = document(_load(given), sides, slo)
            if given["ab"]:
                _pair(found)
            _give(found, given)
    except (replay.Unreadable, Unfit) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(INTERRUPTED if interrupts.count else _status(found))


def _plan(given: dict[str, Any]) -> Plan:
    """The flags as a Plan. Raises UsageError where they do not go together."""
    name, file = given["dataset"], given["file"]
    if (name == "replay") != (file is not None):
        raise click.UsageError("a FILE belongs to --dataset replay, and only to it")
    if file is not None and not file.is_file():
        raise click.UsageError(f"{file} is no file")
    paced = given["rate"] is not None, given["concurrency"] is not None
    if all(paced) or (any(paced) and name == "multi-round"):
        raise click.UsageError("--rate, --concurrency and --dataset multi-round exclude each other")
    if not any(paced) and name not in ("replay", "multi-round"):
        raise click.UsageError("give --rate (open loop) or --concurrency (closed loop)")
    if name in TALKS and given["api"] == "completions":
        raise click.UsageError(f"--dataset {name} needs --api chat")
    if strange := misplaced(click.get_current_context(), name):
        raise click.UsageError(f"{', '.join(strange)} would do nothing with --dataset {name}")
    if any(paced) and given["speed"] != 1:
        raise click.UsageError(
            "--speed divides a trace's own times; with --rate or --concurrency it has none"
        )
    if given["apart"] and not given["ab"]:
        raise click.UsageError("--apart needs --ab")
    return Plan(
        dataset=name,
        shape=_shape(given),
        trace=_trace(given),
        rounds=_rounds(given),
        **{
            key: given[key]
            for key in (
                "rate",
                "arrivals",
                "concurrency",
                "most",
                "warmup",
                "repeat",
                "seed",
                "apart",
            )
        },
        timeout=given["timeout"],
    )


def _trace(given: dict[str, Any]) -> replay.Trace:
    return replay.Trace(
        path=given["file"] or Path(),
        requests=given["requests"],
        speed=given["speed"],
        shrink=given["shrink"],
        most_input=given["max_input"],
        most_output=given["max_output"],
    )


def _shape(given: dict[str, Any]) -> data.Shape:
    return data.Shape(
        requests=given["requests"] or 100,
        input=given["input_len"],
        output=given["output_len"],
        spread=given["spread"],
        prefix=given["prefix_len"],
        prefixes=given["prefixes"],
        pictures=given["images"],
        edge=given["image_size"],
    )


def _rounds(given: dict[str, Any]) -> rounds.Rounds:
    return rounds.Rounds(
        users=given["num_users"],
        rounds=given["num_rounds"],
        qps=given["qps"],
        system=given["shared_system_prompt"],
        history=given["user_history_prompt"],
        question=given["question_len"],
        answer=given["answer_len"],
        seconds=given["time"],
        requests=given["requests"],
    )


def _sides(given: dict[str, Any]) -> list[Side]:
    urls = given["ab"] or ((given["url"],) if given["url"] else ())
    if bool(given["ab"]) == bool(given["url"]):
        raise click.UsageError("give --url, or two URLs to --ab")
    headers = _headers(given["headers"])
    chat = given["api"] == "chat" or given["dataset"] in TALKS
    sides = []
    for url in urls:
        try:
            target = Target.of(url, headers)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        sides.append(Side(target, _form(target, chat, given)))
    return sides


def _form(target: Target, chat: bool, given: dict[str, Any]) -> Form:
    """How to ask this server. Raises ClickException."""
    try:
        name, context = learn.model(target, given["model"])
    except learn.Mute as error:
        raise click.ClickException(str(error)) from error
    return Form(name, chat, learn.known(target, name, context, given["vocab"]))


def _headers(given: Sequence[str]) -> dict[str, str]:
    """What each request says beside our own headers. Raises UsageError."""
    found = {}
    for each in given:
        # Not quoted: the value may be a key.
        if not (pair := HEADER.fullmatch(each.strip())):
            raise click.UsageError("--header wants 'NAME: VALUE', one line of Latin-1 characters")
        name = pair[1].lower()
        if name in OURS:
            raise click.UsageError(f"--header cannot say {name}: each request has its own")
        found[name] = pair[2].strip()
    return found


def _limits(given: Sequence[str]) -> dict[str, float]:
    """`ttft=500` and the like. Raises UsageError."""
    found = {}
    for each in given:
        name, _, limit = each.partition("=")
        try:
            found[name] = float(limit)
        except ValueError:
            name = ""
        if name not in LIMITS or not 0 < found[name] < math.inf:
            raise click.UsageError(f"--slo wants NAME=MS with one of {', '.join(LIMITS)}: {each!r}")
    return found


def _load(given: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, as JSON: no headers, for they may hold a key."""
    left = ("headers", "as_json", "output", "html", "url", "ab")
    told = {key: value for key, value in given.items() if key not in left}
    return told | {"file": given["file"] and given["file"].name, "slos": list(given["slos"])}


def _pair(found: Any) -> None:
    """Compare both sides of --ab, or say why that cannot be done."""
    try:
        a, b = found["targets"]
        found["comparison"] = compare(a, b, paired=True)
    except ValueError as error:
        found["uncompared"] = str(error)


def _writable(given: dict[str, Any]) -> None:
    """Raises UsageError before the load, not when there are results to lose."""
    for name in ("output", "html"):
        file = given[name]
        if file and not os.access(file if file.exists() else file.parent, os.W_OK):
            raise click.UsageError(f"--{name}: {file} cannot be written; is its folder there?")


def _give(found: Any, given: dict[str, Any]) -> None:
    """Results to the terminal first, since a disk may be full. Raises ClickException."""
    if given["as_json"]:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        screen.show(found, screen.console())
    try:
        if given["output"]:
            text = json.dumps(found, ensure_ascii=False) + "\n"
            given["output"].write_text(text, encoding="utf-8")
        if given["html"]:
            given["html"].write_text(page.page(found), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error


def _status(found: Any) -> int:
    runs = [run for target in found["targets"] for run in target["runs"]]
    if not any(run["succeeded"] for run in runs):
        return 1
    return 0 if all(run["valid"] for run in runs) else INVALID
