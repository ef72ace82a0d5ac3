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
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console

from ttft_otel.bench import (
    multi_round,
    request_factory,
    result_document,
    terminal_report,
    trace_replay,
)
from ttft_otel.bench.bench_session import (
    BenchSide,
    InterruptCounter,
    check_plan,
    run_plan,
    run_search,
)
from ttft_otel.bench.comparison import compare_targets, list_load_differences
from ttft_otel.bench.http_exchange import BenchTarget
from ttft_otel.bench.limit_search import MAX_ROUNDS, LimitCondition, LimitSearch, parse_condition
from ttft_otel.bench.load_plan import ARRIVALS, CHAT_DATASETS, DATASETS, DatasetShape, LoadPlan
from ttft_otel.bench.multi_round import MultiRoundOptions
from ttft_otel.bench.request_factory import BenchInputError, RequestFactory
from ttft_otel.bench.request_statistics import find_window
from ttft_otel.bench.result_document import RESULT_FORMAT, build_document
from ttft_otel.bench.trace_replay import BLOCK_TOKENS
from ttft_otel.commands.command_options import add_options, make_number_option
from ttft_otel.commands.source_options import add_source_options
from ttft_otel.explain.diff import release_gate
from ttft_otel.explain.diff.release_gate import Condition
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show.terminal import remove_controls
from ttft_otel.report.store.database_reader import RequestFilter
from ttft_otel.report.store.database_schema import StoreError

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
NON_NEGATIVE_INT: Final = click.IntRange(min=0)
# Open at 0: no requests per second, or no seconds at all, would be no load.
POSITIVE_FLOAT: Final = click.FloatRange(min=0, min_open=True)
# Existence is not checked here: the same type names files to write and to read.
RESULT_FILE: Final = click.Path(path_type=Path, dir_okay=False)

SHAPE: Final = DatasetShape()  # the defaults
ROUNDS: Final = MultiRoundOptions()


def _require_block_divisor(_context: click.Context, _option: click.Parameter, value: int) -> int:
    """Check that `value` divides a trace's blocks. Raises BadParameter."""
    # Else a shrunk block would not be a whole number of tokens,
    # and shared prefixes would end elsewhere.
    if BLOCK_TOKENS % value:
        raise click.BadParameter(
            f"{value} does not divide blocks of {BLOCK_TOKENS} tokens. Give a power of two, 1 to "
            f"{BLOCK_TOKENS}; "
            "--max-input cuts prompts to any length."
        )
    return value


def list_misplaced_flags(context: click.Context, dataset: str) -> list[str]:
    """Flags on the command line that belong to a dataset other than `dataset`.

    A flag belongs to the dataset with whose name its help begins ("replay: ...").
    """
    # The help texts say what belongs where: a second list could go out of step with them.
    other_datasets = {f"{candidate}:" for candidate in DATASETS} - {f"{dataset}:"}
    return [
        candidate.opts[0]
        for candidate in context.command.params
        if isinstance(candidate, click.Option)
        and (candidate.help or "").split(" ")[0] in other_datasets
        # Defaults are always there; only what was written can be a mistake.
        and context.get_parameter_source(candidate.name or "") is ParameterSource.COMMANDLINE
    ]


def _read_conditions(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> list[LimitCondition]:
    try:
        return [parse_condition(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _read_gates(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> list[Condition]:
    try:
        return [release_gate.parse_condition(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


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
    click.option(
        # The second side would else find the first one's prompts in the cache that both share.
        "--apart",
        is_flag=True,
        help="With --ab: different prompts for B, for two routers that share a prefix cache.",
    ),
    click.option("--model", help="Model name.  [default: the first of /v1/models]"),
    click.option(
        "--header",
        "headers",
        multiple=True,
        metavar="'NAME: VALUE'",
        help="Add this header to every request.",
    ),
    # As long as the router's --first-byte-timeout: a queue of minutes is a result, too.
    make_number_option(
        "--timeout", POSITIVE_FLOAT, 600.0, "Seconds until a request counts as failed."
    ),
)
DATASET_OPTIONS: Final = (
    click.option("--dataset", type=click.Choice(DATASETS), default="random", show_default=True),
    # An argument, because only `replay` reads one; bench.py refuses it elsewhere.
    click.argument("file", required=False, type=click.Path(path_type=Path)),
    click.option("--api", type=click.Choice(("completions", "chat")), help="API to use."),
    click.option(
        "--requests",
        type=POSITIVE_INT,
        help="Number of requests.  [default: 100; replay: all; multi-round: until --time]",
    ),
    make_number_option(
        "--input-len",
        POSITIVE_INT,
        SHAPE.input_tokens,
        "Prompt tokens (shared-prefix: after the prefix).",
    ),
    make_number_option("--output-len", POSITIVE_INT, SHAPE.output_tokens, "Output tokens."),
    make_number_option(
        "--spread",
        click.FloatRange(0, 1),
        SHAPE.length_spread,
        "Relative spread of both lengths: 0.2 is ±20 %.",
    ),
    make_number_option(
        "--prefix-len",
        NON_NEGATIVE_INT,
        SHAPE.prefix_tokens,
        "shared-prefix: tokens of each prefix.",
    ),
    make_number_option(
        "--prefixes", POSITIVE_INT, SHAPE.prefix_count, "shared-prefix: number of prefixes."
    ),
    # Images differ in all requests, so no cache of encodings spares an encoder its work.
    make_number_option(
        "--images", POSITIVE_INT, SHAPE.images_per_request, "images: images per request."
    ),
    make_number_option(
        "--image-size", POSITIVE_INT, SHAPE.image_edge_px, "images: width and height in pixels."
    ),
    click.option(
        "--vocab",
        # IDs below 100 are left out as special tokens, so fewer would leave hardly any to draw.
        type=click.IntRange(min=200),
        help="Draw token IDs from 100 to this number.  [default: IDs of common words, asked of the "
        "server]",
    ),
    # Published traces are those of a cluster: below 1 they become bearable for one server.
    make_number_option("--speed", POSITIVE_FLOAT, 1.0, "replay: divide the trace's times by this."),
    click.option(
        "--shrink",
        type=click.IntRange(1, BLOCK_TOKENS),
        default=1,
        show_default=True,
        callback=_require_block_divisor,
        help="replay: divide prompt lengths by this power of two.",
    ),
    click.option("--max-input", type=POSITIVE_INT, help="replay: cut prompts to this many tokens."),
    click.option(
        "--max-output", type=POSITIVE_INT, help="replay: limit outputs to this many tokens."
    ),
)
MULTI_ROUND_OPTIONS: Final = tuple(
    make_number_option(name, kind, default, f"multi-round: {text}")
    # Names as in production-stack's multi-round-qa.py, so that its settings can be taken over.
    for name, kind, default, text in (
        ("--num-users", POSITIVE_INT, ROUNDS.user_count, "concurrent users."),
        ("--num-rounds", POSITIVE_INT, ROUNDS.rounds_per_user, "questions per user."),
        ("--qps", POSITIVE_FLOAT, ROUNDS.qps, "questions per second of all users together."),
        (
            "--shared-system-prompt",
            NON_NEGATIVE_INT,
            ROUNDS.system_tokens,
            "tokens shared by all users.",
        ),
        (
            "--user-history-prompt",
            NON_NEGATIVE_INT,
            ROUNDS.history_tokens,
            "first tokens of each user.",
        ),
        ("--question-len", POSITIVE_INT, ROUNDS.question_tokens, "tokens per question."),
        ("--answer-len", POSITIVE_INT, ROUNDS.answer_tokens, "tokens per answer."),
        ("--time", POSITIVE_FLOAT, ROUNDS.duration_s, "duration in seconds."),
    )
)
LOAD_OPTIONS: Final = (
    # Without a default: open and closed loop answer different questions.
    click.option("--rate", type=POSITIVE_FLOAT, help="Open loop: requests per second."),
    click.option(
        "--arrivals",
        type=click.Choice(ARRIVALS),
        # As independent users arrive: constant gaps hide the queues that bursts make.
        default="poisson",
        show_default=True,
    ),
    click.option("--concurrency", type=POSITIVE_INT, help="Closed loop: concurrent requests."),
    click.option(
        "--max-unfinished",
        "most",
        type=POSITIVE_INT,
        help="Delay requests while this many are unfinished.",
    ),
    # The first requests of a server can take seconds longer: compilation, empty caches.
    make_number_option("--warmup", NON_NEGATIVE_INT, 0, "Requests before each run, not counted."),
    click.option(
        "--find",
        "conditions",
        multiple=True,
        metavar="CONDITION",
        callback=_read_conditions,
        help="Find the highest rate at which 'ttft.p95<500' holds (ttft, tpot or latency; ms; several "
        "times: all hold), from --rate or 1 on; with --concurrency the highest of these.",
    ),
    # One round gives figures; comparison.py needs three for an interval.
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
FAIL_IF_OPTION: Final = click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="CONDITION",
    callback=_read_gates,
    help="'ttft.p95 > +10%' of a comparison; several times. The exit code is 1 if one holds, 2 if that "
    "cannot be told.",
)
OUTPUT_OPTIONS: Final = (
    click.option(
        "--slo",
        "slos",
        multiple=True,
        metavar="NAME=MS",
        help="Limit of ttft, tpot or latency for goodput.",
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
    verdicts = release_gate.judge_comparison(gates, comparison)
    for line in release_gate.list_lines(verdicts):
        click.echo(line, err=True)
    return release_gate.EXIT_CODES[release_gate.find_outcome(verdicts)]


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
  ttft-otel bench --url http://127.0.0.1:8000 --dataset replay trace.jsonl --speed 2
  ttft-otel bench --url http://127.0.0.1:8000 --dataset multi-round --qps 2 --time 120
  ttft-otel bench --ab http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 4 --repeat 5
  ttft-otel bench compare A.json B.json     two files that --output wrote

\b
Exit status: 0, 1 if no request succeeded, 3 if the run is not valid, 130 after Ctrl-C; else --fail-if's.""",
)
@add_options(
    *TARGET_OPTIONS, *DATASET_OPTIONS, *MULTI_ROUND_OPTIONS, *LOAD_OPTIONS, *OUTPUT_OPTIONS
)
@add_source_options
def bench(**given: Any) -> None:
    """Send load to a server, and break each request's time to first token down into stages."""
    slo_ms = _parse_slo_limits(given["slos"])
    plan = _build_plan(given)
    # Before the load: an hour of it should not end in a file that cannot be written, or read.
    _check_writable(given)
    old = _read_results(given["old"]) if given["old"] else None
    # Sends the first requests to the servers, so the other flags are judged before it.
    sides = _build_sides(given)
    progress = terminal_report.ProgressLine(Console(stderr=True))
    interrupts = InterruptCounter()
    try:
        check_plan(plan, sides)
        with interrupts.count_interrupts():
            limit = None
            with closing(progress):
                if given["conditions"]:
                    search = _build_search(given, plan)
                    probes = run_search(plan, sides[0], search, progress, interrupts)
                    limit = result_document.describe_limit(search, probes)
                    sides = [result_document.choose_probe(search, probes)]
                    limit["whatif"] = _ask_whatif(given["source"], search, sides[0])
                else:
                    run_plan(plan, sides, progress, interrupts)
            interrupts.ignore_interrupts()  # results are written completely
            results = build_document(_describe_load(given), sides, slo_ms, limit)
            if given["ab"]:
                _compare_sides(results)
            elif old is not None:
                results["comparison"] = _compare_results(old, results, str(given["old"]))
            _write_results(results, given)
    except BenchInputError as error:
        raise click.ClickException(str(error)) from error
    status = EXIT_INTERRUPTED if interrupts.count else _choose_exit_status(results)
    if given["gates"] and status in (0, EXIT_INVALID):
        status = _judge_comparison(results["comparison"], given["gates"])
    sys.exit(status)


def _check_load_flags(options: dict[str, Any]) -> None:
    """Raise UsageError where flags of the load contradict each other."""
    dataset, file = options["dataset"], options["file"]
    if (dataset == "replay") != (file is not None):
        raise click.UsageError("a FILE belongs to --dataset replay, and only to it")
    if file is not None and not file.is_file():
        raise click.UsageError(f"{file} is not a file")
    paced = options["rate"] is not None, options["concurrency"] is not None
    if all(paced) or (any(paced) and dataset == "multi-round"):
        raise click.UsageError("--rate, --concurrency and --dataset multi-round exclude each other")
    if options["conditions"] and (options["ab"] or dataset == "multi-round"):
        raise click.UsageError("--find takes one --url, and no --dataset multi-round")
    if not any(paced) and not options["conditions"] and dataset not in ("replay", "multi-round"):
        raise click.UsageError("give --rate (open loop) or --concurrency (closed loop)")
    if dataset in CHAT_DATASETS and options["api"] == "completions":
        raise click.UsageError(f"--dataset {dataset} needs --api chat")
    if misplaced_flags := list_misplaced_flags(click.get_current_context(), dataset):
        raise click.UsageError(
            f"{', '.join(misplaced_flags)} would do nothing with --dataset {dataset}"
        )
    if any(paced) and options["speed"] != 1:
        raise click.UsageError(
            "--speed divides a trace's own times; with --rate or --concurrency it has none"
        )
    if options["apart"] and not options["ab"]:
        raise click.UsageError("--apart needs --ab")
    if options["old"] and options["ab"]:
        raise click.UsageError("--compare and --ab exclude each other")
    if options["gates"] and not (options["old"] or options["ab"]):
        raise click.UsageError("--fail-if needs --compare or --ab")


def _build_plan(options: dict[str, Any]) -> LoadPlan:
    """The LoadPlan for the flags. Raises UsageError where they contradict each other."""
    _check_load_flags(options)
    return LoadPlan(
        dataset=options["dataset"],
        shape=DatasetShape(
            request_count=options["requests"] or 100,
            input_tokens=options["input_len"],
            output_tokens=options["output_len"],
            length_spread=options["spread"],
            prefix_tokens=options["prefix_len"],
            prefix_count=options["prefixes"],
            images_per_request=options["images"],
            image_edge_px=options["image_size"],
        ),
        trace=trace_replay.ReplayTrace(
            path=options["file"] or Path(),
            max_requests=options["requests"],
            speed=options["speed"],
            shrink=options["shrink"],
            max_input_tokens=options["max_input"],
            max_output_tokens=options["max_output"],
        ),
        rounds=multi_round.MultiRoundOptions(
            user_count=options["num_users"],
            rounds_per_user=options["num_rounds"],
            qps=options["qps"],
            system_tokens=options["shared_system_prompt"],
            history_tokens=options["user_history_prompt"],
            question_tokens=options["question_len"],
            answer_tokens=options["answer_len"],
            duration_s=options["time"],
            max_requests=options["requests"],
        ),
        **{
            key: options[key]
            for key in ("rate", "arrivals", "concurrency", "warmup", "repeat", "seed", "apart")
        },
        timeout_s=options["timeout"],
        max_unfinished=options["most"],
    )


def _build_search(options: dict[str, Any], plan: LoadPlan) -> LimitSearch:
    """The search that --find asks for."""
    return LimitSearch(
        options["conditions"],
        plan.concurrency or plan.rate or 1.0,
        is_whole=plan.concurrency is not None,
        max_rounds=plan.repeat if plan.repeat > 1 else MAX_ROUNDS,
        round_requests=options["requests"],
    )


def _ask_whatif(source: SourceChoice, search: LimitSearch, side: BenchSide) -> str | None:
    """What `whatif` would change so that the conditions hold at WHATIF_RATE times the rate that holds.

    None without a source, or with conditions that it does not know.
    """
    # Imported here: without --db and --tempo nothing of it is needed.
    from ttft_otel.explain.whatif import plan_search, what_if, what_if_text
    from ttft_otel.explain.whatif.planned_change import PlannedChange
    from ttft_otel.explain.window.request_facts import CannotTellError
    from ttft_otel.explain.window.window_reading import record_window
    from ttft_otel.report.breakdown_source import open_source

    texts = [
        f"{each.metric}_p{100 - 100 * each.tail:.0f}={each.limit_ms:f}"
        for each in search.conditions
    ]
    if not (source.db or source.tempo) or search.is_whole or not search.low:
        return None
    since_ns, until_ns = find_window(side.runs[-1])
    wanted = RequestFilter(since_ns=since_ns, until_ns=until_ns)
    deadline_s = monotonic() + SPANS_TIMEOUT_S
    try:
        targets = plan_search.parse_targets(",".join(texts))
        with open_source(source) as opened:
            while True:
                recording, _ = record_window(opened, wanted)
                count = sum(not each.error for each in side.runs[-1].results)
                if len(recording.requests) >= count or monotonic() > deadline_s:
                    break
                sleep(1)
        learned = what_if.learn_fleet(recording, PlannedChange())
        change = PlannedChange(rate=WHATIF_RATE)
        found = plan_search.search_plan(learned, targets, change, WHATIF_REPETITIONS)
    except (CannotTellError, StoreError, ValueError) as error:
        return f"whatif cannot tell: {remove_controls(str(error))}"
    rate = f"{WHATIF_RATE:g} times {search.low:g} {search.unit}"
    return f"At {rate}, by whatif: {what_if_text.name_found(found)}"


def _build_sides(options: dict[str, Any]) -> list[BenchSide]:
    urls = options["ab"] or ((options["url"],) if options["url"] else ())
    if bool(options["ab"]) == bool(options["url"]):
        raise click.UsageError("give --url, or two URLs to --ab")
    headers = _parse_headers(options["headers"])
    chat = options["api"] == "chat" or options["dataset"] in CHAT_DATASETS
    sides = []
    for url in urls:
        try:
            target = BenchTarget.parse_url(url, headers)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        sides.append(BenchSide(target, _build_request_factory(target, chat, options)))
    return sides


def _build_request_factory(
    target: BenchTarget, chat: bool, options: dict[str, Any]
) -> RequestFactory:
    """Ask the server for its model and context. Raises ClickException."""
    try:
        model, context_tokens = request_factory.discover_model(target, options["model"])
    except BenchInputError as error:
        raise click.ClickException(str(error)) from error
    return RequestFactory(
        model,
        chat,
        request_factory.discover_profile(target, model, context_tokens, options["vocab"]),
    )


def _parse_headers(header_lines: Sequence[str]) -> dict[str, str]:
    """The values of --header as a dict. Raises UsageError."""
    headers = {}
    for line in header_lines:
        # Errors do not quote the line, because its value may be an API key.
        if not (pair := HEADER_LINE.fullmatch(line.strip())):
            raise click.UsageError("--header needs 'NAME: VALUE', one line of Latin-1 characters")
        name = pair[1].lower()
        if name in RESERVED_HEADERS:
            raise click.UsageError(f"--header cannot say {name}: each request has its own")
        headers[name] = pair[2].strip()
    return headers


def _parse_slo_limits(limit_texts: Sequence[str]) -> dict[str, float]:
    """The values of --slo (`ttft=500`) as name -> milliseconds. Raises UsageError."""
    limits_ms = {}
    for limit_text in limit_texts:
        name, _, limit = limit_text.partition("=")
        try:
            limits_ms[name] = float(limit)
        except ValueError:
            name = ""
        if name not in SLO_METRICS or not 0 < limits_ms[name] < math.inf:
            raise click.UsageError(
                f"--slo needs NAME=MS with one of {', '.join(SLO_METRICS)}: {limit_text!r}"
            )
    return limits_ms


def _describe_load(options: dict[str, Any]) -> dict[str, Any]:
    """The flags of the load, for the result; without headers, which may contain an API key."""
    omitted = (
        "headers",
        "as_json",
        "output",
        "csv",
        "url",
        "ab",
        "conditions",
        "source",
        "old",
        "gates",
    )
    load = {key: value for key, value in options.items() if key not in omitted}
    return load | {"file": options["file"] and options["file"].name, "slos": list(options["slos"])}


def _compare_sides(results: Any) -> None:
    """Add the comparison of both sides of --ab to the results, or the reason why there is none."""
    try:
        a, b = results["targets"]
        results["comparison"] = compare_targets(a, b, paired=True)
    except ValueError as error:
        results["uncompared"] = str(error)


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


def _choose_exit_status(results: Any) -> int:
    runs = [run for target in results["targets"] for run in target["runs"]]
    if not any(run["succeeded"] for run in runs):
        return 1
    return 0 if all(run["valid"] for run in runs) else EXIT_INVALID
