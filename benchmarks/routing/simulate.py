# SPDX-License-Identifier: Apache-2.0
"""The router's own policies, and other routers' rules, in a discrete-event simulation: cases.json in, JSON
and tables out.

    python -m benchmarks.routing.simulate --traces DIR [--seeds N ...] [--json FILE] [--table]

DIR (or TTFT_OTEL_TRACES) has conversation_trace.jsonl and synthetic_trace.jsonl of Mooncake. Real: the
policies, what they know and how they learn it. Simulated: the instances, by the engine of ttft-otel whatif
(chunked prefill, a budget of tokens for each step, decodes), and their prefix caches. A step takes 5 ms +
40 us per token + 1.3 ns per pair + 40 ns per token that decodes read, about an 8B model on an H100, times
noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.routing import trace_options
from benchmarks.routing.fleet_simulation import simulate_case
from benchmarks.routing.load_kinds import read_rows
from benchmarks.routing.simulation_tables import (
    format_cases,
    format_goals_table,
    format_means_table,
    format_misses_table,
)


def parse_simulation_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = trace_options.make_parser(__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="*", help="only these; without a name none")
    parser.add_argument("--policies", nargs="*", help="only these")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="1: the traces as they are"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--json", type=Path, help="where to; what is in it already stays")
    parser.add_argument("--table", action="store_true", help="print Markdown tables")
    return trace_options.parse_options(parser)


def run_case(case: dict[str, Any], folder: Path, policies: list[str], seed: int) -> dict[str, Any]:
    """One case with one seed: figures of each policy."""
    rows = read_rows(case["kind"], folder, seed, case["requests"])
    return {name: simulate_case(case, name, rows, seed) for name in policies}


def merge_cases(
    listed: dict[str, Any], previous_cases: list[dict[str, Any]], new_case: dict[str, Any]
) -> list[Any]:
    """The kept cases with what is new, in the order in which they are listed."""
    # What is in the file stays, so that a list of cases can be worked off over several runs.
    by_name = {each["name"]: each for each in previous_cases}
    case = by_name.setdefault(new_case["case"]["name"], {**new_case["case"], "seeds": {}})
    seed = str(new_case["seed"])  # JSON has only strings for keys
    case["seeds"][seed] = {**case["seeds"].get(seed, {}), **new_case["found"]}
    return [by_name[each["name"]] for each in listed["cases"] if each["name"] in by_name]


def main() -> None:
    """Run the cases; what is done is written at once."""
    arguments = parse_simulation_options()
    listed = json.loads(arguments.list.read_text("utf-8"))
    finished_cases: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        finished_cases = json.loads(arguments.json.read_text("utf-8"))["cases"]
    policies = arguments.policies or [*listed["policies"], "oracle"]
    cases = [
        each
        for each in listed["cases"]
        if arguments.cases is None or each["name"] in arguments.cases
    ]
    # Processes: the simulation is pure Python, which threads would not speed up.
    with ProcessPoolExecutor(arguments.jobs) as pool:
        jobs = {
            pool.submit(run_case, case, arguments.traces, policies, seed): (case, seed)
            for seed in arguments.seeds
            for case in cases
        }
        # Written after each case: a run of hours that is stopped keeps what it has.
        for job in as_completed(jobs):
            case, seed = jobs[job]
            new = {"case": case, "seed": seed, "found": job.result()}
            finished_cases = merge_cases(listed, finished_cases, new)
            means = {name: each["mean"] for name, each in new["found"].items()}
            sys.stderr.write(f"{case['name']} {seed} {means}\n")
            if arguments.json:
                arguments.json.write_text(format_cases(finished_cases), "utf-8")
    if arguments.table:
        sys.stdout.write(
            "\n\n".join(
                (
                    format_goals_table(finished_cases),
                    format_means_table(finished_cases),
                    format_misses_table(finished_cases),
                )
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
