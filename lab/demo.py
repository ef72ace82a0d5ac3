# SPDX-License-Identifier: Apache-2.0
"""The demo: start servers, router and receiver on this machine, send requests, write a report.

scripts/demo runs it. A run is a fault unless every trace is complete, has exact sums, and nothing in it is
unattributed or encoded twice. The report's own code writes report.json and report.html beside the database,
explain's says why the slowest request took so long.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import jsonschema

from lab import (
    progress_screen,
    report_files,
    tiny_models,
    ttft_client,
)
from lab.local_deployment import DeploymentPlan, LocalDeployment, start_deployment
from lab.local_servers import LocalServerError, exit_on_sigterm
from lab.progress_screen import ProgressScreen
from lab.report_files import ClientMeasurement
from lab.server_commands import EC_CPU_CONNECTOR, EC_EXAMPLE_CONNECTOR, VllmOptions
from lab.ttft_client import TimedRequest, TimedResponse
from lab.vllm_releases import PROJECT_ROOT
from ttft_otel.explain.explain.window_answer import answer_question
from ttft_otel.model import stages
from ttft_otel.model.endpoints import COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import header_names, keys
from ttft_otel.report.breakdown_source import ExplainQuestion
from ttft_otel.report.report_types import SPAN_KINDS, SourceChoice, StoredSpan
from ttft_otel.report.show import terminal
from ttft_otel.report.store.database_reader import DatabaseReader, StoredTrace, open_reader

SERVER_KIND: Final = SPAN_KINDS.index("server")
ENCODED_TWICE_REMEDY: Final = 'see "Encoded twice" in docs/router.md'


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """What is known of one request after its run.

    name: the key of its faults. status: of HTTP. legs: number of servers behind the router
    that it needs. trace: as the receiver stored it; None when no span of it arrived.
    """

    name: str
    status: int
    legs: int
    trace: StoredTrace | None


def find_missing_spans(trace: StoredTrace | None, legs: int) -> str:
    """What a routed request's trace lacks; "" when it is complete.

    legs: number of servers behind the router, each of which has a server and a `ttft` span.
    """
    if trace is None:
        return "no span of it was stored"
    # The router is a server too, with a server and a `ttft` span of its own.
    expected_servers = 1 + legs
    servers = [span for span in trace.spans if span.kind == SERVER_KIND]
    trunks = [span for span in trace.spans if span.is_ttft_span]
    # `<`, not `!=`: a leg that was tried twice has one more.
    if len(servers) < expected_servers or len(trunks) < expected_servers:
        return f"{len(servers)} server and {len(trunks)} ttft spans of {expected_servers} each"
    span_ids = {span.span_id for span in trace.spans}
    roots = [span for span in trace.spans if not span.parent_id]
    # A parent that never arrived: its process lost a record.
    orphans = [
        span.name for span in trace.spans if span.parent_id and span.parent_id not in span_ids
    ]
    if orphans:
        return f"parents are missing of {', '.join(orphans)}"
    # The demo's client sends no context, so the router's span is the one root.
    return "" if len(roots) == 1 else f"{len(roots)} roots"


def find_faults(observation: RequestObservation) -> list[str]:
    """What is wrong with one request, its trace, or its sums; [] when nothing is."""
    problems = [] if observation.status == 200 else [f"was answered with {observation.status}"]
    if missing := find_missing_spans(observation.trace, observation.legs):
        problems.append(f"its trace is not whole: {missing}")
    for span in observation.trace.spans if observation.trace else ():
        if span.is_ttft_span:
            problems += _find_sum_faults(span)
    return problems


def judge_requests(all_seen: Sequence[RequestObservation]) -> dict[str, list[str]]:
    """Request name -> its faults, for those that have any."""
    return {seen.name: found for seen in all_seen if (found := find_faults(seen))}


def _find_sum_faults(span: StoredSpan) -> list[str]:
    """Faults of one span that carries a breakdown, from its attributes alone."""
    attributes = span.attributes
    role = attributes.get(keys.ROLE)
    parts = [attributes[key] for key in attributes if keys.parse_stage_attribute(key)]
    # Attributes, not child spans: they hold the sums as the server made them.
    total = attributes[keys.TOTAL_US]
    problems = []
    if sum(parts) != total:
        problems.append(f"{role}: stages and unattributed are {sum(parts)} µs, ttft {total} µs")
    if any(part < 0 for part in parts):
        problems.append(f"{role}: a stage is negative")
    unattributed_us = attributes.get(keys.UNATTRIBUTED_US, 0)
    if unattributed_us and role != "router":
        problems.append(f"{role}: {unattributed_us} µs unattributed")
    if recomputed_items := attributes.get(keys.EC_RECOMPUTED_ITEMS):
        problems.append(
            f"{role}: encoded {recomputed_items} media items that an encoder had encoded; "
            f"{ENCODED_TWICE_REMEDY}"
        )
    if error := attributes.get(keys.ERROR_TYPE):
        problems.append(f"{role}: error {error}")
    return problems


LONG_PROMPT_WORDS: Final = 1300  # three or more chunks of 512 tokens
WARMUP_SEED_OFFSET: Final = 1_000_000  # seeds of images from here on are the warm-up's


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the demo; those of one wave are sent at the same moment."""

    kind: str
    request: TimedRequest
    wave: int

    @property
    def name(self) -> str:
        """Its x-request-id."""
        return self.request.request_id or ""

    def count_legs(self, shape: str) -> int:
        """Number of server legs in a topology: one encoder per image, then one or two.

        shape: key of demo.TOPOLOGIES.
        """
        encoders = len(self.request.pictures) if shape.startswith("e") else 0
        # The router does not split the Responses API into prefill and decode: it goes to D alone.
        split = shape != "epd" and self.request.path != RESPONSES_PATH
        return encoders + (2 if split else 1)


# Every API, streamed or not, and every kind of content: each takes another way through the code.
SINGLE_REQUESTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("text", {}),
    ("text", {"words": 60}),
    ("text", {"words": 200}),
    ("text, not streamed", {"stream": False}),
    ("completion", {"path": COMPLETIONS_PATH}),
    ("completion", {"path": COMPLETIONS_PATH, "words": 100}),
    ("completion, not streamed", {"path": COMPLETIONS_PATH, "stream": False}),
    ("responses", {"path": RESPONSES_PATH}),
    ("responses, not streamed", {"path": RESPONSES_PATH, "stream": False}),
    ("three chunks", {"words": LONG_PROMPT_WORDS}),
    ("three chunks", {"words": LONG_PROMPT_WORDS + 200}),
    ("one image", {"pictures": (1,)}),
    ("one image", {"pictures": (2,), "size": 224}),
    ("one image", {"pictures": (3,), "size": 448}),
    ("same image again", {"pictures": (1,)}),
    ("same image again", {"pictures": (3,), "size": 448}),
    ("two images", {"pictures": (4, 5)}),
    ("two images", {"pictures": (6, 7), "size": 224}),
    ("image, not streamed", {"pictures": (8,), "stream": False}),
    ("image, three chunks", {"pictures": (9,), "words": LONG_PROMPT_WORDS}),
)
# At the same moment, so that requests wait for one another: queues and stalls show.
CONCURRENT_REQUESTS: Final[tuple[tuple[tuple[str, dict[str, Any]], ...], ...]] = (
    # What users meet first: prompts that wait behind long ones.
    (("4 at once: three chunks", {"words": LONG_PROMPT_WORDS}),) * 4,
    (
        ("4 at once: image", {"pictures": (10,)}),
        ("4 at once: image", {"pictures": (11,), "size": 224}),
        ("4 at once: text", {}),
        ("4 at once: three chunks", {"words": LONG_PROMPT_WORDS}),
    ),
)


def build_demo_requests() -> list[DemoRequest]:
    """All requests of the demo, numbered in the order in which they are sent."""
    waves = [*((each,) for each in SINGLE_REQUESTS), *CONCURRENT_REQUESTS]
    demo_requests: list[DemoRequest] = []
    for wave, members in enumerate(waves):
        for kind, fields in members:
            name = f"demo-{len(demo_requests) + 1:02d}"
            # The name makes each prompt unique; otherwise later ones would hit the prefix cache.
            prompt = f"{name} what is in the picture"
            demo_requests.append(
                DemoRequest(kind, TimedRequest(prompt=prompt, request_id=name, **fields), wave)
            )
    return demo_requests


def build_warmup_waves(demo_requests: Sequence[DemoRequest]) -> list[list[TimedRequest]]:
    """The same waves with other images and words.

    They ask not to be sampled, which the router believes of no caller: they are not in the report, and in
    the store they are what explain compares with, which needs 20 requests of a kind.
    """
    waves: dict[int, list[TimedRequest]] = {}
    for demo_request in demo_requests:
        # Waves as they are: batches compile and allocate what single requests do not.
        waves.setdefault(demo_request.wave, []).append(make_unsampled(demo_request.request))
    return list(waves.values())


def make_unsampled(request: TimedRequest) -> TimedRequest:
    """A warm-up copy of `request`: different text and images, with an unsampled `traceparent`."""
    # Flags 00 of a W3C traceparent: not sampled.
    parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-00"
    return replace(
        request,
        prompt=f"warm {request.prompt}",
        request_id=f"warm-{request.request_id}",
        pictures=tuple(seed + WARMUP_SEED_OFFSET for seed in request.pictures),
        headers={header_names.TRACEPARENT: parent},
    )


CHUNK_TOKENS: Final = 512  # tokens per engine step: long prompts take several steps
SPAN_ARRIVAL_TIMEOUT_S: Final = 30.0  # for the last spans to reach the receiver
REPORT_SCHEMA: Final = PROJECT_ROOT / "tests" / "golden" / "report.schema.json"
INTERRUPTED_EXIT_CODE: Final = 130
TOPOLOGIES: Final = {
    "epd": "encoder, prefill-decode",
    "pd": "prefill, decode",
    "epd3": "encoder, prefill, decode",
}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo.

    faults: request -> what is wrong with its trace. reason: why the slowest request took so long.
    """

    report: dict[str, Any]
    faults: dict[str, list[str]]
    seconds: float
    reason: str


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/demo                  everything, then stop; about 3 minutes once installed
  scripts/demo --verbose        also each request and each stage
  scripts/demo --keep           leave the servers up and look at the page until Ctrl-C
  scripts/demo --topology pd    prefill and decode apart, KV blocks over NIXL; epd3: an encoder too
  scripts/demo --ec-connector ECExampleConnector     encodings through a shared folder, V1 model runner
  scripts/demo --json | jq '.summary.stages'
  scripts/demo --out DIR        report.json, report.html, spans.db and logs go there
Exit codes: 0 every request closed, 1 something did not (it says what), 130 interrupted.
""",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="[default: out/demo]")
@click.option("--keep", is_flag=True, help="Leave everything up until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json to stdout.")
@click.option(
    "--verbose", is_flag=True, help="Also a table of the requests, and one of the stages."
)
@click.option("--topology", type=click.Choice(tuple(TOPOLOGIES)), default="epd", show_default=True)
@click.option(
    "--ec-connector",
    type=click.Choice((EC_CPU_CONNECTOR, EC_EXAMPLE_CONNECTOR)),
    help="How encodings travel: over NIXL as deployments do it, or through a folder, vLLM's aid for "
    f"debugging.  [default: {EC_CPU_CONNECTOR}]",
)
def run_demo(
    out: Path | None,
    keep: bool,
    as_json: bool,
    verbose: bool,
    topology: str,
    ec_connector: str | None,
) -> None:
    """Trace requests through a real vLLM deployment behind our router, on this CPU."""
    if ec_connector and topology == "pd":
        raise click.UsageError(
            "--ec-connector is about encodings, and pd has no encoder; its KV blocks use NIXL"
        )
    # KV blocks alone need no V2 model runner, which starts more slowly on a CPU.
    connector = ec_connector or ("" if topology == "pd" else EC_CPU_CONNECTOR)
    # A shell's background job starts with Ctrl-C ignored; it must still stop everything.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with progress_screen.open_screen(stderr=as_json) as show, exit_on_sigterm():
        try:
            folder = (out or PROJECT_ROOT / "out" / "demo").resolve()
            show.begin_step("building the tiny models (once)")
            plan = plan_deployment(topology, connector, folder)
            code = trace_deployment(show, plan, folder, keep=keep, as_json=as_json, verbose=verbose)
        except KeyboardInterrupt:
            show.print_line("Interrupted; everything that was started is stopped.", "bold")
            code = INTERRUPTED_EXIT_CODE
        except (LocalServerError, OSError, http.client.HTTPException) as error:
            show.print_line(f"The demo could not run: {error}", "red")
            code = 1
    sys.exit(code)


def plan_deployment(shape: str, connector: str, out: Path) -> DeploymentPlan:
    """The deployment of topology `shape`, files in `out`; connector: of encodings, "" without any."""
    # Deep enough for the prefill of a long prompt to take longer than what its steps take beside it.
    recipe = tiny_models.ModelRecipe(hidden=256, layers=8)
    options = VllmOptions(model=tiny_models.build_model(recipe))
    if connector == EC_CPU_CONNECTOR:
        options = replace(options, runner="v2", connector=EC_CPU_CONNECTOR)
    return DeploymentPlan(shape, options, chunk_tokens=CHUNK_TOKENS, folder=out)


def trace_deployment(
    show: ProgressScreen,
    plan: DeploymentPlan,
    out: Path,
    *,
    keep: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Run the demo on the deployment of `plan`, files in `out`; returns the exit code."""
    remove_old_outputs(out)
    show.begin_step(f"starting receiver, {TOPOLOGIES[plan.shape]} and router (1 to 4 minutes)")
    try:
        with start_deployment(plan, progress=show.report_waiting) as fleet:
            result = measure_requests(show, fleet, out, plan.shape)
            if verbose:
                print_tables(show, result, out)
            print_results(show, result, out)
            if as_json:
                click.echo(json.dumps(result.report, indent=2, ensure_ascii=False))
            if keep:
                wait_for_interrupt(show, fleet)
            show.begin_step("stopping")
    finally:
        shutil.rmtree(out / "encoder-cache", ignore_errors=True)
    checkpoint_database(out / "spans.db")
    return 1 if result.faults else 0


def remove_old_outputs(out: Path) -> None:
    """Remove the files of an earlier demo from `out`, and nothing else; create the folder."""
    for name in ("report.json", "report.html", "spans.db", "spans.db-wal", "spans.db-shm"):
        (out / name).unlink(missing_ok=True)
    for name in ("logs", "encoder-cache"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def checkpoint_database(database: Path) -> None:
    """Merge SQLite's write-ahead log into the database, so that one file can be copied."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def measure_requests(
    show: ProgressScreen, fleet: LocalDeployment, out: Path, shape: str
) -> DemoResult:
    """Warm up, send all requests, wait for their traces, write the report and check it."""
    demo_requests = build_demo_requests()
    send_warmup(show, fleet, demo_requests)
    show.begin_step(f"asking {len(demo_requests)} requests through the router")
    started = time.monotonic()
    answers = send_demo_requests(show, fleet, demo_requests)
    seconds = time.monotonic() - started
    show.begin_step("waiting for the last spans")
    all_seen = await_traces(fleet, demo_requests, answers, shape)
    rows = [
        ClientMeasurement(
            demo_request.name,
            demo_request.kind,
            to_milliseconds(answers[demo_request.name].client_ttft_us),
        )
        for demo_request in demo_requests
    ]
    report = report_files.write_report_files(fleet.database, rows, out, "ttft-otel demo")
    faults = judge_requests(all_seen)
    for problem in validate_report(report):
        faults.setdefault("report.json", []).append(problem)
    slowest = find_slowest(report)
    reason = ""
    if slowest:
        question = ExplainQuestion(request_id=slowest["request_id"])
        reason = answer_question(SourceChoice(db=fleet.database), question).sentences[0]
    return DemoResult(report, faults, seconds, reason)


def send_warmup(
    show: ProgressScreen, fleet: LocalDeployment, demo_requests: Sequence[DemoRequest]
) -> None:
    """Send other requests of each kind first, because the first one imports and compiles code."""
    waves = build_warmup_waves(demo_requests)
    show.begin_step(f"warming up with {len(waves)} waves of other requests, not in the report")
    for number, wave in enumerate(waves, 1):
        show.update_status(f"warming up: {number} of {len(waves)}")
        ttft_client.send_timed_requests(fleet.front_url, wave)


def send_demo_requests(
    show: ProgressScreen, fleet: LocalDeployment, demo_requests: Sequence[DemoRequest]
) -> dict[str, TimedResponse]:
    """Send the requests wave by wave; returns request name -> response."""
    answers: dict[str, TimedResponse] = {}
    for wave in dict.fromkeys(each.wave for each in demo_requests):
        members = [each for each in demo_requests if each.wave == wave]
        show.update_status(f"{members[0].name} of {len(demo_requests)}: {members[0].kind}")
        responses = ttft_client.send_timed_requests(
            fleet.front_url, [each.request for each in members]
        )
        answers |= {each.name: answer for each, answer in zip(members, responses, strict=True)}
    return answers


def await_traces(
    fleet: LocalDeployment,
    demo_requests: Sequence[DemoRequest],
    answers: Mapping[str, TimedResponse],
    shape: str,
) -> list[RequestObservation]:
    """Wait until every trace is complete in the receiver, at most SPAN_ARRIVAL_TIMEOUT_S."""
    deadline = time.monotonic() + SPAN_ARRIVAL_TIMEOUT_S
    while True:
        with open_reader(fleet.database) as span_reader:
            all_seen = [
                observe_request(span_reader, demo_request, answers[demo_request.name], shape)
                for demo_request in demo_requests
            ]
        if not any(
            find_missing_spans(observation.trace, observation.legs) for observation in all_seen
        ):
            return all_seen
        if time.monotonic() > deadline:
            return all_seen
        time.sleep(0.5)


def observe_request(
    span_reader: DatabaseReader, demo_request: DemoRequest, answer: TimedResponse, shape: str
) -> RequestObservation:
    """One request with its trace as it is stored now."""
    stored = span_reader.find_request(demo_request.name)
    trace = span_reader.find_trace(stored.trace_id) if stored else None
    return RequestObservation(
        demo_request.name, answer.status, demo_request.count_legs(shape), trace
    )


def validate_report(report: Mapping[str, Any]) -> list[str]:
    """What is wrong with report.json: violations of its schema, or requests without a trace."""
    schema = json.loads(REPORT_SCHEMA.read_text("utf-8"))
    problems = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(report)
    ]
    if missing := report["summary"]["missing"]:
        problems.append(f"no trace of {', '.join(missing)}")
    if not report["summary"]["closed"]:
        problems.append("summary: not closed")
    return problems


def to_milliseconds(us: int | None) -> float | None:
    """Microseconds -> milliseconds; None stays None."""
    return None if us is None else us / 1000


def find_slowest(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request of report.json with the largest TTFT; None where no trace has come."""
    return max(report["requests"], key=lambda row: row["ttft_ms"], default=None)


def list_answer(report: Mapping[str, Any], reason: str) -> list[str]:
    """Where the time went, and which request was the slowest and why (`reason`)."""
    slowest = find_slowest(report)
    if slowest is None:
        return ["No trace of any request has come."]
    total_ms: Counter[str] = Counter()
    for row in report["requests"]:
        for name, ms in row["stages"].items():
            total_ms[stages.split_stage(name)[1]] += ms
    everything = sum(row["ttft_ms"] for row in report["requests"])
    largest = total_ms.most_common(3)
    shares = ", ".join(f"{name} {ms / everything:.0%}" for name, ms in largest)
    return [
        f"Where the time went: {shares} of a mean TTFT of {report['summary']['ttft']['mean']:.0f} ms.",
        f"The slowest was {slowest['request_id']} ({slowest['kind']}), {slowest['ttft_ms']:.0f} ms. {reason}",
    ]


def print_tables(show: ProgressScreen, result: DemoResult, out: Path) -> None:
    """Print a table of the requests, and one of the stages."""
    rows = result.report["requests"]
    show.print_line()
    show.console.print(progress_screen.build_requests_table(rows, result.faults))
    show.print_line()
    with open_reader(out / "spans.db") as span_reader:
        pairs, _ = report_files.join_measurements(
            span_reader, [ClientMeasurement(row["request_id"]) for row in rows]
        )
    terminal.print_summary([pair.request for pair in pairs], show.console)


def print_results(show: ProgressScreen, result: DemoResult, out: Path) -> None:
    """Print the answer, the verdict, and where to look."""
    show.print_line()
    for sentence in list_answer(result.report, result.reason):
        show.print_line(sentence)
    for name, sentences in result.faults.items():
        show.print_line(f"✗ {name}: {'; '.join(sentences)}", "red")
    if not result.faults:
        show.print_line(
            f"✓ {len(result.report['requests'])} requests in {result.seconds:.1f} s: every trace whole, "
            "every sum exact to the microsecond, nothing unattributed on any server",
            "green",
        )
    show.print_line(f"page      {out / 'report.html'}    data: report.json beside it")
    show.print_line(
        f"look at   ttft-otel serve --db {out / 'spans.db'}    then http://127.0.0.1:4318"
    )
    if slowest := find_slowest(result.report):
        why = f"ttft-otel explain --db {out / 'spans.db'} --request {slowest['request_id']}"
        show.print_line(f"ask why   {why}")


def wait_for_interrupt(show: ProgressScreen, fleet: LocalDeployment) -> None:
    """Keep all servers running until Ctrl-C, or until one of them ends."""
    show.print_line()
    show.print_line(f"live page {fleet.get_url('receiver')}", "bold")
    show.print_line(f"router    {fleet.front_url}    (model: tiny)", "bold")
    try:
        while all(server.is_alive for server in fleet.servers.values()):
            show.update_status("everything is up; Ctrl-C stops it")
            time.sleep(1)
        show.print_line("a server has ended by itself; see its log in the logs folder", "red")
    except KeyboardInterrupt:
        show.print_line("Ctrl-C: stopping")


if __name__ == "__main__":
    run_demo()
