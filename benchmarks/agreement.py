# SPDX-License-Identifier: Apache-2.0
"""Does `ttft-otel bench` measure the TTFT of `vllm bench serve`? Short rounds in turn, compared in pairs.

    python benchmarks/agreement.py --url http://127.0.0.1:8000 --model NAME --tokenizer MODEL_OR_DIR

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

from ttft_otel import cli
from ttft_otel.bench.ask import EVERYWHERE

SPARE = 4  # tokens of an answer: enough for a second event, too few to matter
DRAWS = 2000
FEWEST = 40


def main() -> None:
    """Play the rounds and print what came out."""
    wanted = arguments()
    if wanted.peer:
        serve()
        return
    pairs: list[dict[str, float]] = []
    with peer() as theirs:
        theirs(wanted, wanted.seed)  # both meet a warm server
        ours(wanted, wanted.seed)
        for number in range(wanted.rounds):
            order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
            found = {play: play(wanted, wanted.seed + number + 1) for play in order}
            pairs.append({"ours": found[ours], "theirs": found[theirs]})
            sys.stderr.write(f"round {number + 1}: {told(pairs[-1])}\n")
            low, high = summary(pairs)["paired_interval"]
            if number + 1 >= FEWEST and high - low <= 2 * wanted.within:
                break
    json.dump(summary(pairs), sys.stdout, indent=1)
    sys.stdout.write("\n")


def arguments() -> argparse.Namespace:
    """What people type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="its name on the server")
    parser.add_argument("--tokenizer", help="for vllm bench serve: the model's folder or name")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400, help="at most")
    parser.add_argument("--within", type=float, default=0.01, help="half the interval to reach")
    new = (
        time.time_ns() // 10**6 % 10**9
    )  # a server's prefix cache knows the prompts of the last time
    parser.add_argument("--seed", type=int, default=new)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if not (wanted.peer or wanted.tokenizer):
        parser.error(
            "vllm bench serve needs --tokenizer: the folder of the served model, or its name on the hub"
        )
    return wanted


def told(pair: dict[str, float]) -> str:
    """One round for the eye."""
    return ", ".join(f"{who} {ttft:.1f} ms" for who, ttft in pair.items())


def summary(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Ratios ours/theirs: of the medians of all requests, of the means, and the rounds' median one."""
    ours_, theirs_ = ([pair[who] for pair in pairs] for who in ("ours", "theirs"))
    ratios = [pair["ours"] / pair["theirs"] for pair in pairs]
    chance = np.random.default_rng(0)
    drawn = np.median(chance.choice(ratios, (DRAWS, len(ratios))), axis=1)
    return {
        "rounds": len(pairs),
        "ours_ms": {"median": statistics.median(ours_), "mean": statistics.mean(ours_)},
        "theirs_ms": {"median": statistics.median(theirs_), "mean": statistics.mean(theirs_)},
        "ratio_of_medians": statistics.median(ours_) / statistics.median(theirs_),
        "ratio_of_means": statistics.mean(ours_) / statistics.mean(theirs_),
        "paired_ratio": statistics.median(ratios),
        "paired_interval": [float(each) for each in np.percentile(drawn, (2.5, 97.5))],
        "pairs": pairs,
    }


def ours(wanted: argparse.Namespace, seed: int) -> float:
    """One round of `ttft-otel bench`."""
    words = ["bench", "--url", wanted.url, "--json", "--model", wanted.model]
    words += ["--seed", str(seed), "--output-len", str(SPARE)]
    words += ["--input-len", str(wanted.input_len), "--requests", "1", "--concurrency", "1"]
    said = CliRunner().invoke(cli.main, words).stdout
    rows = json.loads(said)["targets"][0]["runs"][0]["requests"]
    assert [row["input_tokens"] for row in rows] == [wanted.input_len], said
    return float(rows[0]["ttft_ms"])


@contextlib.contextmanager
def peer() -> Iterator[Any]:
    """A process with vLLM in it; call the value for one round of `vllm bench serve`."""
    words = [sys.executable, __file__, "--peer"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin and process.stdout
        asked, answers = process.stdin, process.stdout

        def theirs(wanted: argparse.Namespace, seed: int) -> float:
            asked.write(json.dumps(flags(wanted, seed)) + "\n")
            asked.flush()
            return float(answers.readline())

        try:
            yield theirs
        finally:
            asked.close()


def flags(wanted: argparse.Namespace, seed: int) -> list[str]:
    """The command line of `vllm bench serve` for the same load; no request before the first counted one."""
    # The pool of ids that every vocabulary has; the seeds of `ours` are not these.
    ids = random.Random(f"theirs/{seed}").choices(EVERYWHERE, k=wanted.input_len)
    named = {
        "backend": "openai",
        "base-url": wanted.url,
        "model": wanted.model,
        "tokenizer": wanted.tokenizer,
        "dataset-name": "random",
        "random-output-len": SPARE,
        "extra-body": json.dumps({"prompt": ids}),
        "num-prompts": 1,
        "max-concurrency": 1,
        "ready-check-timeout-sec": 0,
        "temperature": 0,
    }
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*words, "--ignore-eos", "--disable-tqdm"]


def serve() -> None:
    """The peer's side: command lines come in, TTFTs in milliseconds go out, its own talk to stderr."""
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
            wanted = parser.parse_args([*json.loads(line), *kept, "--result-dir", folder])
            (ttft,) = asyncio.run(main_async(wanted))["ttfts"]
            out.write(f"{1000 * ttft}\n")
            out.flush()


if __name__ == "__main__":
    main()
