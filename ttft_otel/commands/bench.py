# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel bench`: check its flags, run the load, write the results."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic, monotonic_ns, sleep, time_ns
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console

from ttft_otel.bench import request_factory, result_document, terminal_report
from ttft_otel.bench.bench_session import BenchSession
from ttft_otel.bench.http_exchange import BenchTarget
from ttft_otel.bench.limit_search import MAX_ROUNDS, LimitSearch, parse_condition
from ttft_otel.bench.load_plan import (
    ARRIVALS,
    DEFAULT_REQUESTS,
    SHAPE_FLAGS,
    BenchSide,
    LoadPlan,
    read_data_file,
)
from ttft_otel.bench.request_factory import BenchInputError
from ttft_otel.bench.result_document import (
    RESULT_FORMAT,
    build_document,
    compare_targets,
    list_load_differences,
)
from ttft_otel.commands.command_options import (
    add_options,
    make_number_option,
    make_parsed_option,
)
from ttft_otel.commands.source_options import add_source_options
from ttft_otel.explain.diff import window_difference
from ttft_otel.explain.diff.window_difference import Condition
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show.terminal import remove_controls
from ttft_otel.report.store.database_reader import RequestFilter
from ttft_otel.report.store.database_schema import StoreError

FILE_FLAGS: Final = ("speed", "max_input", "max_output")
SLO_METRICS: Final = ("ttft", "tpot", "latency")
# RFC 9110: a token, then visible characters; a line feed in it would begin another header.
HEADER_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:([\t\x20-\x7e\x80-\xff]*)")
# Said a second time, they would contradict how http_exchange.py frames a request.
RESERVED_HEADERS: Final = ("content-length", "transfer-encoding", "connection")
# Not 2, which click uses for wrong flags.
EXIT_INVALID: Final = 3
EXIT_INTERRUPTED: Final = 130
WHATIF_RATE: Final = 1.5  # what is asked for: the same load, so many times as fast
WHATIF_REPETITIONS: Final = 20
SPANS_TIMEOUT_S: Final = 15.0  # exporters send every few seconds
POSITIVE_INT: Final = click.IntRange(min=1)
COUNT: Final = click.IntRange(min=0)
SECONDS: Final = click.FloatRange(min=0)
SHARE: Final = click.FloatRange(0, 1)
# Open at 0: no requests per second, or no seconds at all, would be no load.
POSITIVE_FLOAT: Final = click.FloatRange(min=0, min_open=True)
# Existence is not checked here: the same type names files to write and to read.
RESULT_FILE: Final = click.Path(path_type=Path, dir_okay=False)

PLAN: Final = LoadPlan()  # the defaults
MAX_RATES: Final = 20  # of a sweep
NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
RATES: Final = re.compile(r"(\d+(?:\.\d+)?)\.\.(\d+(?:\.\d+)?)")  # a ramp


def _read_rates(
    _context: click.Context, option: click.Parameter, text: str | None
) -> list[tuple[float, float | None]]:
    """The rates of a load, each with the one to which it grows. Raises BadParameter."""
    if text is None:
        return []
    is_whole = option.name == "concurrency"
    ramp = None if is_whole else RATES.fullmatch(text)
    try:
        rates = [float(each) for each in (ramp.groups() if ramp else text.split(","))]
    except ValueError:
        rates = []
    if not 0 < len(rates) <= MAX_RATES or not all(0 < each < math.inf for each in rates):
        raise click.BadParameter(f"{text!r}: give a number above 0, or up to {MAX_RATES} as 1,2,4")
    if is_whole and not all(each.is_integer() for each in rates):
        raise click.BadParameter(f"{text!r}: requests at once are whole numbers")
    return [(rates[0], rates[1])] if ramp else [(each, None) for each in sorted(set(rates))]


def _parse_slo_limit(text: str) -> tuple[str, float]:
    """A value of --slo (`ttft=500`) as name and milliseconds. Raises ValueError."""
    name, _, limit = text.partition("=")
    if name not in SLO_METRICS or not NUMBER.fullmatch(limit) or not float(limit):
        names = ", ".join(SLO_METRICS)
        raise ValueError(f"--slo needs NAME=MS with one of {names}: {text!r}")
    return name, float(limit)


def _parse_header(line: str) -> tuple[str, str]:
    """A value of --header as name and value. Raises ValueError."""
    # Errors do not quote the line, because its value may be an API key.
    if not (pair := HEADER_LINE.fullmatch(line.strip())):
        raise ValueError("--header needs 'NAME: VALUE', one line of Latin-1 characters")
    name = pair[1].lower()
    if name in RESERVED_HEADERS:
        raise ValueError(f"--header cannot say {name}: each request has its own")
    return name, pair[2].strip()


TARGET_OPTIONS: Final = (
    click.option("--url", metavar="URL", help="The server or router to measure: http://host:port"),
    click.option(
        # Two URLs of one flag and not two flags: sides are
        # measured in the same rounds or not at all.
        "--ab",
        nargs=2,
        metavar="URL_A URL_B",
        help="Compare two servers or routers, in alternating rounds.",
    ),
    click.option("--model", help="Model name.  [default: the first of /v1/models]"),
    make_parsed_option(
        "--header",
        "'NAME: VALUE'",
        _parse_header,
        "Add this header to every request.",
        list_name="headers",
    ),
    # As long as the router's --first-byte-timeout: a queue of minutes is a result, too.
    make_number_option(
        "--timeout", POSITIVE_FLOAT, 600.0, "Seconds until a request counts as failed."
    ),
)
DATA_OPTIONS: Final = (
    click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False)),
    click.option("--api", type=click.Choice(("completions", "chat")), help="API to use."),
    click.option(
        "--requests",
        type=POSITIVE_INT,
        help=f"Number of requests.  [default: {DEFAULT_REQUESTS}; of a FILE: all]",
    ),
    *(
        make_number_option(*each)
        for each in (
            ("--input-len", POSITIVE_INT, PLAN.input_len, "Tokens of each question."),
            ("--output-len", POSITIVE_INT, PLAN.output_len, "Output tokens."),
            ("--spread", SHARE, PLAN.spread, "Relative spread of both: 0.2 is ±20 %."),
            ("--prefix-len", COUNT, PLAN.prefix_len, "Tokens before the first question."),
            ("--prefixes", POSITIVE_INT, PLAN.prefixes, "Number of such prefixes, shared."),
            ("--turns", POSITIVE_INT, PLAN.turns, "Questions of each conversation."),
            ("--think", SECONDS, PLAN.think, "Mean seconds from an answer to a question."),
            # Images differ in all requests, so no cache of encodings spares an encoder its work.
            ("--images", COUNT, PLAN.images, "Images of each question."),
            ("--image-size", POSITIVE_INT, PLAN.image_size, "Width and height in pixels."),
            # Published traces are those of a cluster: below 1 they are bearable for one server.
            ("--speed", POSITIVE_FLOAT, 1.0, "Divide a trace's times by this."),
        )
    ),
    click.option("--max-input", type=POSITIVE_INT, help="Cut a trace's prompts to so many tokens."),
    click.option("--max-output", type=POSITIVE_INT, help="Cut a FILE's answers to so many tokens."),
)
LOAD_OPTIONS: Final = (
    # Without a default: open and closed loop answer different questions.
    click.option(
        "--rate",
        "rates",
        callback=_read_rates,
        metavar="RATES",
        help="Open loop: requests per second. 1,2,4: one after the other, a sweep; 1..8: growing.",
    ),
    click.option(
        "--arrivals",
        type=click.Choice(ARRIVALS),
        # As independent users arrive: constant gaps hide the queues that bursts make.
        default="poisson",
        show_default=True,
    ),
    click.option(
        "--concurrency",
        callback=_read_rates,
        metavar="NUMBERS",
        help="Closed loop: conversations at once. 1,2,4: a sweep.",
    ),
    # The first requests of a server can take seconds longer: compilation, empty caches.
    make_number_option("--warmup", COUNT, 0, "Requests before each run, not counted."),
    make_parsed_option(
        "--find",
        "CONDITION",
        parse_condition,
        "Find the highest rate at which 'ttft.p95<500' holds (ttft, tpot or latency; ms; several "
        "times: all hold), from --rate or 1 on; with --concurrency the highest of these.",
        list_name="conditions",
    ),
    # One round gives figures; compare_targets() needs three for an interval.
    make_number_option(
        "--repeat",
        POSITIVE_INT,
        1,
        f"Number of rounds; with --find at most, {MAX_ROUNDS} if not given.",
    ),
    make_number_option(
        "--seed", click.INT, 0, "Seed of prompts and arrival times; each round adds 1."
    ),
)
FAIL_IF_OPTION: Final = make_parsed_option(
    "--fail-if",
    "CONDITION",
    window_difference.parse_condition,
    "'ttft.p95 > +10%' of a comparison; several times. The exit code is 1 if one holds, 2 if that "
    "cannot be told.",
    list_name="gates",
)
OUTPUT_OPTIONS: Final = (
    make_parsed_option(
        "--slo",
        "NAME=MS",
        _parse_slo_limit,
        "Limit of ttft, tpot or latency for goodput.",
        list_name="slos",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
    click.option("--output", type=RESULT_FILE, help="Also write the JSON to this file."),
    click.option("--csv", type=RESULT_FILE, help="Also write each request as a line of CSV."),
    click.option(
        "--compare",
        "old",
        type=RESULT_FILE,
        metavar="OLD.json",
        help="Compare with this result of --output: new minus OLD, with 95 % intervals.",
    ),
    FAIL_IF_OPTION,
)


@click.command()
@click.argument("a", type=RESULT_FILE)
@click.argument("b", type=RESULT_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@FAIL_IF_OPTION
def compare_files(a: Path, b: Path, as_json: bool, gates: list[Condition]) -> None:
    """Compare two results of `ttft-otel bench --output`: B minus A, with 95 % intervals."""
    comparison = _compare_results(_read_results(a), _read_results(b), f"{a} and {b}")
    if as_json:
        click.echo(json.dumps(comparison, indent=2, ensure_ascii=False))
    else:
        terminal_report.print_comparison(comparison, Console())
    if gates:
        sys.exit(_judge_comparison(comparison, gates))


def _compare_results(old: Any, new: Any, subject: str) -> dict[str, Any]:
    """New minus old. Raises ClickException with `subject`."""
    try:
        # Not paired: two files were measured at different times, so
        # their rounds have nothing in common.
        comparison = compare_targets(old["targets"][0], new["targets"][0], paired=False)
        differences = list_load_differences(old, new)
    # The files come from anywhere: each missing field or wrong type of one ends up here.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"{subject} cannot be compared: {error}") from error
    if differences:
        # To stderr, so that --json stays JSON; a warning, since a
        # change of load may be the question.
        click.echo(f"The loads differ in: {', '.join(differences)}", err=True)
    return comparison


def _judge_comparison(comparison: Mapping[str, Any] | None, gates: Sequence[Condition]) -> int:
    """The exit code of --fail-if, whose verdicts are printed to stderr; 2 where nothing was compared."""
    verdicts = window_difference.judge_comparison(gates, comparison)
    for line in window_difference.list_lines(verdicts):
        click.echo(line, err=True)
    return window_difference.EXIT_CODES[window_difference.find_outcome(verdicts)]


def _read_results(path: Path) -> Any:
    """Read a result file. Raises ClickException."""
    try:
        results = json.loads(path.read_text("utf-8"))
        # Looked up within `try`: JSON of another program lacks it, or is no object.
        is_current_format = results["format"] == RESULT_FORMAT
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if not is_current_format:
        raise click.ClickException(f"{path} is not of this version's form, {RESULT_FORMAT}")
    return results


class BenchCommand(click.Command):
    """A command that has a subcommand: `bench compare A B` beside `bench --url ...`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """The context of `compare` where that is the first of `args`, else of `bench`."""
        if args[:1] == ["compare"]:
            return compare_files.make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=BenchCommand,
    epilog="""\b
Examples:
  ttft-otel bench --url http://127.0.0.1:8000 --rate 4
  ttft-otel bench --url http://127.0.0.1:8000 --concurrency 8 --slo ttft=500 --slo tpot=50
  ttft-otel bench --url http://127.0.0.1:8000 --find 'ttft.p95<500' --find 'tpot.p95<50' --rate 4
  ttft-otel bench --url http://127.0.0.1:8000 --rate 1,2,4,8
  ttft-otel bench --url http://127.0.0.1:8000 trace.jsonl --speed 2
  ttft-otel bench --url http://127.0.0.1:8000 --turns 5 --think 10 --concurrency 20
  ttft-otel bench --ab http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 4 --repeat 5
  ttft-otel bench compare A.json B.json     two files that --output wrote

\b
Exit status: 0, 1 if no request succeeded, 3 if the run is not valid, 130 after Ctrl-C; else --fail-if's.""",
)
@add_options(*TARGET_OPTIONS, *DATA_OPTIONS, *LOAD_OPTIONS, *OUTPUT_OPTIONS)
@add_source_options
def bench(**given: Any) -> None:
    """Send load to a server, and break each request's time to first token down into stages.

    FILE: a trace in Mooncake's form, or texts in that of ShareGPT, instead of random prompts.
    """
    _check_flags(given)
    # Before the load: an hour of it should not end in a file that cannot be written, or read.
    _check_writable(given)
    old = _read_results(given["old"]) if given["old"] else None
    progress = terminal_report.ProgressLine(Console(stderr=True))
    session = BenchSession(progress)
    try:
        plans = _build_plans(given)
        # Sends the first requests to the servers, so the other flags are judged before it.
        sides = _build_sides(given, plans)
        with session.count_interrupts():
            with closing(progress):
                sides, sweep = _send_load(given, session, sides)
            was_interrupted = bool(session.interrupts)
            # Still in the block, where Ctrl-C is only counted: results are written completely.
            results = build_document(_describe_load(given), sides, dict(given["slos"]), sweep)
            if given["ab"]:
                try:
                    one, other = results["targets"]
                    results["comparison"] = compare_targets(one, other, paired=True)
                except ValueError as error:
                    results["uncompared"] = str(error)
            elif old is not None:
                results["comparison"] = _compare_results(old, results, str(given["old"]))
            _write_results(results, given)
    except BenchInputError as error:
        raise click.ClickException(str(error)) from error
    runs = [run for target in results["targets"] for run in target["runs"]]
    status = 0 if all(run["valid"] for run in runs) else EXIT_INVALID
    if was_interrupted:
        status = EXIT_INTERRUPTED
    elif not any(run["succeeded"] for run in runs):
        status = 1
    if given["gates"] and status in (0, EXIT_INVALID):
        status = _judge_comparison(results["comparison"], given["gates"])
    sys.exit(status)


def _send_load(
    options: dict[str, Any], session: BenchSession, sides: list[BenchSide]
) -> tuple[list[BenchSide], dict[str, Any] | None]:
    """The sides with their runs, and of several rates or a search what it has found."""
    search = None
    if options["conditions"]:
        (side,) = sides
        search = LimitSearch(
            options["conditions"],
            side.rate or 1.0,
            is_whole=side.plan.concurrency is not None,
            max_rounds=side.plan.repeat if side.plan.repeat > 1 else MAX_ROUNDS,
            round_requests=options["requests"],
        )
        probes = session.run(session.send_search(side, search))
    else:
        session.run(session.send_rounds(sides))
        if options["ab"] or len(sides) == 1:
            return sides, None
        probes = [side for side in sides if side.runs] or sides[:1]  # Ctrl-C came before the others
    sweep = result_document.describe_sweep(probes, search)
    # What is to hold at a higher rate: the conditions, or the p95 at the knee.
    limits = {
        f"{each.metric}_p{100 - 100 * each.tail:.0f}": each.limit_ms
        for each in options["conditions"]
    }
    for row, probe in zip(sweep["rates"], probes, strict=True):
        if row["rate"] == (search.low if search else sweep["knee"]):
            limits = limits or {"ttft_p95": row["ttft_ms"]["p95"]}
            targets = ",".join(f"{name}={ms:f}" for name, ms in limits.items())
            sweep["whatif"] = _ask_whatif(options["source"], targets, probe)
            return [probe] if search else probes, sweep
    # Of a search in which nothing holds, the lowest rate that was tried.
    return probes[:1] if search else probes, sweep


def _check_flags(options: dict[str, Any]) -> None:
    """Raise UsageError where flags contradict each other."""
    rates, file = options["rates"] or options["concurrency"], options["file"]
    is_single = len(rates) <= 1 and not any(last for _, last in rates)
    needs_chat = options["images"] or options["turns"] > 1
    refusals = {
        "give --url, or two URLs to --ab": bool(options["ab"]) == bool(options["url"]),
        "--rate and --concurrency exclude each other": options["rates"] and options["concurrency"],
        "--find takes one --url and at most one rate, from which it starts": options["conditions"]
        and (options["ab"] or not is_single),
        "--ab and --compare take one rate": (options["ab"] or options["old"]) and len(rates) > 1,
        "--images and --turns need --api chat": needs_chat and options["api"] == "completions",
        "--speed divides a trace's own times; with --rate or --concurrency it has none": rates
        and options["speed"] != 1,
        "--compare and --ab exclude each other": options["old"] and options["ab"],
        "--fail-if needs --compare or --ab": options["gates"]
        and not (options["old"] or options["ab"]),
        f"{file} is not a file": file and not file.is_file(),
    }
    for refusal, is_so in refusals.items():
        if is_so:
            raise click.UsageError(refusal)
    # What makes prompts up does nothing with a file, and the other way round.
    if file:
        _refuse_flags([each for each in SHAPE_FLAGS if each != "think"], "with a FILE")
    else:
        _refuse_flags(FILE_FLAGS, "without a FILE")


def _refuse_flags(names: Sequence[str], where: str) -> None:
    """Raise UsageError for those of the flags that are on the command line."""
    sources = {name: click.get_current_context().get_parameter_source(name) for name in names}
    given = [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)} would do nothing {where}")


def _build_plans(options: dict[str, Any]) -> list[LoadPlan]:
    """The plan of each rate. Raises UsageError, and BenchInputError for a file that cannot be read."""
    file = read_data_file(options["file"]) if options["file"] else None
    if file:
        if file.is_trace:
            _refuse_flags(["think"], "with a trace")
        else:
            _refuse_flags(["speed", "max_input"], "with texts")
        file = replace(file, **{key: options[key] for key in FILE_FLAGS})
    paced = options["rates"] or options["concurrency"]
    if not paced and not options["conditions"] and not (file and file.is_trace):
        raise click.UsageError("give --rate (open loop) or --concurrency (closed loop)")
    keys = ("arrivals", "warmup", "repeat", "seed")
    plan = LoadPlan(
        file=file,
        request_count=options["requests"],
        timeout_s=options["timeout"],
        **{key: options[key] for key in (*SHAPE_FLAGS, *keys)},
    )
    if options["concurrency"]:
        return [replace(plan, concurrency=int(number)) for number, _ in paced]
    return [replace(plan, rate=rate, last_rate=last) for rate, last in paced] or [plan]


def _ask_whatif(source: SourceChoice, targets_text: str, side: BenchSide) -> str | None:
    """What `whatif` would change so that targets hold at WHATIF_RATE times the rate of `side`.

    targets_text: as of `whatif --autotune`. None without a source or a rate.
    """
    if not (source.db or source.tempo) or not side.plan.rate:
        return None
    # Imported here: without --db and --tempo nothing of it is needed.
    from ttft_otel.explain.whatif import what_if
    from ttft_otel.explain.whatif.window_check import PlannedChange
    from ttft_otel.explain.window.request_facts import CannotTellError
    from ttft_otel.explain.window.window_reading import record_window
    from ttft_otel.report.breakdown_source import open_source

    run, offset_ns = side.runs[-1], time_ns() - monotonic_ns()
    wanted = RequestFilter(since_ns=run.start_ns + offset_ns, until_ns=run.end_ns + offset_ns)
    deadline_s = monotonic() + SPANS_TIMEOUT_S
    try:
        targets = what_if.parse_targets(targets_text)
        with open_source(source) as opened:
            while True:
                recording, _ = record_window(opened, wanted)
                count = sum(not each.error for each in run.results)
                if len(recording.requests) >= count or monotonic() > deadline_s:
                    break
                sleep(1)
        learned = what_if.learn_fleet(recording, PlannedChange())
        change = PlannedChange(rate=WHATIF_RATE)
        found = what_if.search_plan(learned, targets, change, WHATIF_REPETITIONS)
    except (CannotTellError, StoreError, ValueError) as error:
        return f"whatif cannot tell: {remove_controls(str(error))}"
    rate = f"{WHATIF_RATE:g} times {side.rate:g} requests/s"
    return f"At {rate}, by whatif: {what_if.name_found(found)}"


def _build_sides(options: dict[str, Any], plans: Sequence[LoadPlan]) -> list[BenchSide]:
    """A side for each server and rate. Raises UsageError and BenchInputError."""
    headers = dict(options["headers"])
    uses_texts = plans[0].file is not None and not plans[0].file.is_trace
    uses_chat = options["api"] == "chat" or uses_texts or options["images"] or options["turns"] > 1
    sides = []
    for number, url in enumerate(options["ab"] or (options["url"],)):
        try:
            target = BenchTarget.parse_url(url, headers)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        factory = request_factory.discover_factory(
            target, options["model"], bool(uses_chat), number
        )
        # All targets before one is loaded: half of a comparison is worth nothing.
        plans[0].check_context(factory)
        sides += [BenchSide(target, factory, plan) for plan in plans]
    return sides


def _describe_load(options: dict[str, Any]) -> dict[str, Any]:
    """The flags of the load, for the result; without headers, which may contain an API key."""
    omitted = "headers as_json output csv url ab conditions source old gates".split()
    load = {key: value for key, value in options.items() if key not in omitted}
    load["file"] = options["file"] and options["file"].name
    # As it will be read: tuples become lists, and equal those of an earlier result.
    return dict(json.loads(json.dumps(load)))


def _check_writable(options: dict[str, Any]) -> None:
    """Check that result files can be written, before the load is sent. Raises UsageError."""
    for name in ("output", "csv"):
        file = options[name]
        if file and not os.access(file if file.exists() else file.parent, os.W_OK):
            raise click.UsageError(f"--{name}: {file} cannot be written; is its folder there?")


def _write_results(results: Any, options: dict[str, Any]) -> None:
    """Print the results, then write files, because a disk may be full. Raises ClickException."""
    if options["as_json"]:
        click.echo(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        terminal_report.print_document(results, Console())
    try:
        if options["output"]:
            text = json.dumps(results, ensure_ascii=False) + "\n"
            options["output"].write_text(text, encoding="utf-8")
        if options["csv"]:
            with options["csv"].open("w", encoding="utf-8", newline="") as file:
                result_document.write_csv(results, file)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
