# SPDX-License-Identifier: Apache-2.0
"""Compare the TTFT of `ttft-otel bench` with that of `vllm bench serve`, in alternating short rounds.

    python -m benchmarks.agreement --url http://127.0.0.1:8000 --model NAME --tokenizer MODEL_OR_DIR

A round is one request of each, one after the other, to the same server: random token ids that no cache
knows, of the same number; who comes first changes from round to round. (vllm bench serve is given its
ids by --extra-body: of itself it sends text, whose tokenizing would be the server's time, and its
`random` prompts count up from an offset, of which a small vocabulary has few, so that the prefix cache
knows some.) vLLM is imported once: this file is also the process that plays its rounds. From 40
rounds on it ends as soon as the median ratio is known to --within. One JSON object is printed: a pair
of TTFTs (ms) a round, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from click.testing import CliRunner

from ttft_otel.bench.request_factory import UNIVERSAL_TOKEN_IDS
from ttft_otel.commands import main as cli
from ttft_otel.model.statistics import find_interval

SPARE_ANSWER_TOKENS = 4  # tokens of an answer: enough for a second event, too few to matter
BOOTSTRAP_DRAWS = 2000
# Of fewer rounds a bootstrap interval tends to be too narrow, and would end the run by chance.
MIN_REQUESTS = 40


def main() -> None:
    """Run the rounds and print the result."""
    options = parse_agreement_arguments()
    if options.peer:
        serve_vllm_bench()
        return
    rounds: list[dict[str, float]] = []
    with start_vllm_bench_peer() as theirs:
        theirs(options, options.seed)  # both meet a warm server
        run_ttft_bench(options, options.seed)
        for number in range(options.rounds):
            order = (run_ttft_bench, theirs) if number % 2 == 0 else (theirs, run_ttft_bench)
            ttfts = {play: play(options, options.seed + number + 1) for play in order}
            rounds.append({"ours": ttfts[run_ttft_bench], "theirs": ttfts[theirs]})
            sys.stderr.write(f"round {number + 1}: {format_pair(rounds[-1])}\n")
            # --within is half a width: the interval is compared with twice as much.
            low, high = summarize_ratios(rounds)["paired_interval"]
            if number + 1 >= MIN_REQUESTS and high - low <= 2 * options.within:
                break
    json.dump(summarize_ratios(rounds), sys.stdout, indent=1)
    sys.stdout.write("\n")


def parse_agreement_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="its name on the server")
    parser.add_argument("--tokenizer", help="for vllm bench serve: the model's folder or name")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400, help="at most")
    parser.add_argument("--within", type=float, default=0.01, help="half the interval to reach")
    default_seed = (
        time.time_ns() // 10**6 % 10**9
    )  # a server's prefix cache knows the prompts of the last time
    parser.add_argument("--seed", type=int, default=default_seed)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.peer or options.tokenizer):
        parser.error(
            "vllm bench serve needs --tokenizer: the folder of the served model, or its name on the hub"
        )
    return options


def format_pair(ttfts: dict[str, float]) -> str:
    """One round as a line of text."""
    return ", ".join(f"{tool} {ttft:.1f} ms" for tool, ttft in ttfts.items())


def summarize_ratios(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Ratios ours/theirs: of the medians of all requests, of the means, and the rounds' median one."""
    ours_, theirs_ = ([pair[tool] for pair in pairs] for tool in ("ours", "theirs"))
    ratios = [pair["ours"] / pair["theirs"] for pair in pairs]
    # A fixed seed: the same pairs give the same interval, which decides when the run ends.
    chance = np.random.default_rng(0)
    # The median of ratios, not a ratio of medians: a slow moment of the server hits both tools of a round.
    medians = np.median(chance.choice(ratios, (BOOTSTRAP_DRAWS, len(ratios))), axis=1)
    return {
        "rounds": len(pairs),
        "ours_ms": {"median": statistics.median(ours_), "mean": statistics.mean(ours_)},
        "theirs_ms": {"median": statistics.median(theirs_), "mean": statistics.mean(theirs_)},
        "ratio_of_medians": statistics.median(ours_) / statistics.median(theirs_),
        "ratio_of_means": statistics.mean(ours_) / statistics.mean(theirs_),
        "paired_ratio": statistics.median(ratios),
        "paired_interval": [float(each) for each in find_interval(medians, 0.95)],
        "pairs": pairs,
    }


def run_ttft_bench(options: argparse.Namespace, seed: int) -> float:
    """One round of `ttft-otel bench`."""
    # In this process: starting Python and importing cost no TTFT, but many seconds over 400 rounds.
    command_line = ["bench", "--url", options.url, "--json", "--model", options.model]
    command_line += ["--seed", str(seed), "--output-len", str(SPARE_ANSWER_TOKENS)]
    command_line += ["--input-len", str(options.input_len), "--requests", "1", "--concurrency", "1"]
    output = CliRunner().invoke(cli.main, command_line).stdout
    rows = json.loads(output)["targets"][0]["runs"][0]["requests"]
    # Requests of unequal length would be a comparison of prompts, not of tools.
    assert [row["input_tokens"] for row in rows] == [options.input_len], output
    return float(rows[0]["ttft_ms"])


@contextlib.contextmanager
def start_vllm_bench_peer() -> Iterator[Any]:
    """A process with vLLM in it; call the value for one round of `vllm bench serve`."""
    words = [sys.executable, __file__, "--peer"]
    # No look at the hub, which would delay the start or fail: the tokenizer must be on this machine.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    pipe = subprocess.PIPE
    # One process for all rounds, because importing vLLM takes many seconds.
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin and process.stdout
        asked, answers = process.stdin, process.stdout

        def run_vllm_bench(options: argparse.Namespace, seed: int) -> float:
            asked.write(json.dumps(build_vllm_bench_flags(options, seed)) + "\n")
            asked.flush()
            return float(answers.readline())

        try:
            yield run_vllm_bench
        finally:
            # End of input ends the peer's loop; leaving the block waits for its exit.
            asked.close()


def build_vllm_bench_flags(options: argparse.Namespace, seed: int) -> list[str]:
    """The command line of `vllm bench serve` for the same load; no request before the first counted one."""
    # The pool of ids that every vocabulary has; the seeds of `run_ttft_bench` are not these.
    ids = random.Random(f"theirs/{seed}").choices(UNIVERSAL_TOKEN_IDS, k=options.input_len)
    named = {
        "backend": "openai",
        "base-url": options.url,
        "model": options.model,
        "tokenizer": options.tokenizer,
        "dataset-name": "random",
        "random-output-len": SPARE_ANSWER_TOKENS,
        "extra-body": json.dumps({"prompt": ids}),
        "num-prompts": 1,
        "max-concurrency": 1,
        # 0 switches off the test request that `vllm bench serve` sends first: it would warm the server.
        "ready-check-timeout-sec": 0,
        "temperature": 0,
    }
    command_line = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*command_line, "--ignore-eos", "--disable-tqdm"]


def serve_vllm_bench() -> None:
    """The peer's side: command lines come in, TTFTs in milliseconds go out, its own talk to stderr."""
    # Before vLLM is imported: its progress and tables go to stdout, between our answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    # Every request's TTFT is in the result only where it goes to a file, too.
    kept = ["--save-result", "--save-detailed", "--result-filename", "last.json"]
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            options = parser.parse_args([*json.loads(line), *kept, "--result-dir", folder])
            # In seconds; exactly one, as one request was asked for.
            (ttft,) = asyncio.run(main_async(options))["ttfts"]
            out.write(f"{1000 * ttft}\n")
            out.flush()


if __name__ == "__main__":
    main()
