# SPDX-License-Identifier: Apache-2.0
"""Compare load generators against a server whose times are known: ours, vllm bench serve, guidellm, AIPerf.

    python -m benchmarks.peer_clients --tokenizer MODEL_FOLDER [--rounds 2] [--json FILE]
    python -m benchmarks.peer_clients --tokenizer MODEL_FOLDER --upstream URL --rate 2 --rates

With --upstream a real vLLM answers, its model named `tiny`; the notes are of a process that passes it on.

Each round plays all of them in turn, the order reversed every other time, at a constant rate: how far are the
mean and the percentiles of TTFT and time per token from the server's notes of the same requests, and what
does a request cost in processor time (the difference of a long run and a short one: starting costs nothing).
Then at each of several rates: the share of it at which the requests came to the server. guidellm
and AIPerf are installed from PyPI into environments of their own (uv), below the cache folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.tiny_models import get_cache_root
from lab.uv_command import find_uv

SHORT, LONG = 25, 200  # requests of the two runs whose difference is the cost of a request
OUTPUT_TOKENS = 8
INPUT_TOKENS = 32
RATES = (100, 400)
SECONDS = 4  # of a run at each of RATES
PERCENTILES = (50, 95, 99)


class Load(NamedTuple):
    """What a client is asked for. tokenizer: a folder."""

    url: str
    tokenizer: str
    rate: float
    requests: int


class Reading(NamedTuple):
    """Milliseconds of each request: TTFT, and mean time between tokens."""

    ttft_ms: list[float]
    itl_ms: list[float]


def run_ours(load: Load, folder: Path) -> Reading:
    """`ttft-otel bench`."""
    flags = ["--url", load.url, "--model", "tiny", "--arrivals", "constant", "--input-len"]
    flags += [str(INPUT_TOKENS), "--output-len", str(OUTPUT_TOKENS), "--rate", f"{load.rate:g}"]
    flags += [
        "--requests",
        str(load.requests),
        "--output",
        str(folder / "out.json"),
        "--api",
        "chat",
    ]
    # 3: it was late itself, and says so; its figures are compared all the same.
    run_command([sys.executable, "-m", "ttft_otel.commands.main", "bench", *flags], folder, (0, 3))
    rows = json.loads((folder / "out.json").read_text("utf-8"))["targets"][0]["runs"][0]["requests"]
    return Reading([row["ttft_ms"] for row in rows], [row["itl_ms"] for row in rows])


def run_vllm(load: Load, folder: Path) -> Reading:
    """`vllm bench serve`."""
    flags = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": load.url,
        "model": "tiny",
        "tokenizer": load.tokenizer,
        "dataset-name": "random",
        "random-input-len": INPUT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": load.requests,
        "request-rate": load.rate,
        # So large a shape of the gamma distribution is a constant rate.
        "burstiness": 1_000_000,
        "ready-check-timeout-sec": 0,
        "result-dir": folder,
        "result-filename": "out.json",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    switches = ["--save-result", "--save-detailed", "--disable-tqdm", "--ignore-eos"]
    program = "from vllm.entrypoints.cli.main import main; main()"
    run_command([sys.executable, "-c", program, "bench", "serve", *words, *switches], folder)
    found = json.loads((folder / "out.json").read_text("utf-8"))
    gaps = [1000 * statistics.fmean(each) for each in found["itls"] if each]
    return Reading([1000 * each for each in found["ttfts"]], gaps)


def run_guidellm(load: Load, folder: Path) -> Reading:
    """guidellm."""
    data = f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    flags = {
        "backend": f"kind=openai_http,target={load.url},model=tiny",
        "profile": f"kind=constant,rate={load.rate:g}",
        "constraint": f"kind=max_requests,count={load.requests}",
        "tokenizer": f"kind=huggingface_auto,model={load.tokenizer}",
        "data": data,
        "output": f"kind=json,path={folder / 'out.json'}",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    run_command([find_peer("guidellm"), "run", *words, "--disable-console"], folder)
    found = json.loads((folder / "out.json").read_text("utf-8"))
    rows = found["benchmarks"][0]["requests"]["successful"]
    return Reading(
        [row["time_to_first_token_ms"] for row in rows],
        [row["inter_token_latency_ms"] for row in rows],
    )


def run_aiperf(load: Load, folder: Path) -> Reading:
    """AIPerf."""
    flags = {
        "model": "tiny",
        "url": load.url,
        "endpoint-type": "chat",
        "tokenizer": load.tokenizer,
        "request-rate": f"{load.rate:g}",
        "request-rate-mode": "constant",
        "request-count": load.requests,
        "synthetic-input-tokens-mean": INPUT_TOKENS,
        "output-tokens-mean": OUTPUT_TOKENS,
        "extra-inputs": "ignore_eos:true",
        "output-artifact-dir": folder,
        "ui": "none",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    switches = ["--streaming", "--use-server-token-count"]
    run_command([find_peer("aiperf"), "profile", *switches, *words], folder)
    (file,) = folder.rglob("profile_export.jsonl")
    found = [json.loads(line)["metrics"] for line in file.read_text("utf-8").splitlines()]
    names = ("time_to_first_token", "inter_token_latency")
    return Reading(*([row[name]["value"] for row in found if name in row] for name in names))


CLIENTS: dict[str, Callable[[Load, Path], Reading]] = {
    "ttft-otel bench": run_ours,
    "vllm bench serve": run_vllm,
    "guidellm": run_guidellm,
    "AIPerf": run_aiperf,
}


def find_peer(name: str) -> str:
    """The command of a package in its own environment, which is made where there is none."""
    folder = get_cache_root() / "peers" / name
    if not (folder / "bin" / name).exists():
        uv = find_uv()
        subprocess.run([uv, "venv", "-q", str(folder)], check=True)
        python = ["--python", str(folder / "bin" / "python")]
        subprocess.run([uv, "pip", "install", "-q", *python, name], check=True)
    return str(folder / "bin" / name)


def run_command(words: Sequence[str], folder: Path, good: Sequence[int] = (0,)) -> None:
    """Run a client. Raises SystemExit with its last words."""
    # No look at a hub, which would delay the start or fail; AIPerf takes no folder with that set.
    is_aiperf = Path(words[0]).name == "aiperf"
    env = {**os.environ, **({} if is_aiperf else {"HF_HUB_OFFLINE": "1"})}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in good:
        raise SystemExit(
            f"{words[:4]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )


@contextmanager
def start_truth_server(upstream: str | None) -> Iterator[str]:
    """A server process; its URL. upstream: that of the real server whose answers it passes on."""
    words = [sys.executable, "-m", "benchmarks.truth_server", *([upstream] if upstream else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def take_notes(url: str) -> list[dict[str, Any]]:
    """The server's notes since the last time."""
    with urllib.request.urlopen(f"{url}/notes") as answer:
        notes: list[dict[str, Any]] = json.load(answer)
        return notes


def play_client(name: str, load: Load) -> tuple[Reading, list[dict[str, Any]], float]:
    """One run: what the client says, what the server noted, and seconds of processor time."""
    take_notes(load.url)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        reading = CLIENTS[name](load, Path(folder))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return reading, take_notes(load.url), spent


def measure_errors(reading: Reading, notes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds between what the client says and the truth: of the mean, and the largest percentile's."""
    tokens = [np.array(note["tokens"]) / 1e6 for note in notes]
    truths = Reading(
        [float(each[0] - note["came"] / 1e6) for each, note in zip(tokens, notes, strict=True)],
        [float(np.diff(each).mean()) for each in tokens],
    )
    errors = {}
    for name, said, truth in zip(Reading._fields, reading, truths, strict=True):
        errors[f"{name} mean"] = statistics.fmean(said) - statistics.fmean(truth)
        gaps = np.percentile(said, PERCENTILES) - np.percentile(truth, PERCENTILES)
        errors |= {f"{name} p{q}": float(gap) for q, gap in zip(PERCENTILES, gaps, strict=True)}
    return errors | {"missing": float(len(notes) - len(reading.ttft_ms))}


def main() -> None:
    """Run the rounds, then the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder of a model, for the peers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--rates", nargs="*", type=float, default=RATES)
    parser.add_argument("--upstream", help="URL of a real server")
    parser.add_argument("--rate", type=float, default=25.0, help="of the rounds")
    parser.add_argument("--requests", type=int, default=LONG, help="of a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        name: {"start_cpu_s": 0.0, "rounds": [], "rates": {}} for name in options.clients
    }
    with start_truth_server(options.upstream) as url:
        load = Load(url, str(Path(options.tokenizer).resolve()), options.rate, SHORT)
        for name in options.clients if not options.upstream else ():
            _, _, found[name]["start_cpu_s"] = play_client(name, load)
        load = load._replace(requests=options.requests)
        for number in range(options.rounds):
            for name in options.clients if number % 2 == 0 else reversed(options.clients):
                reading, notes, long_s = play_client(name, load)
                short_s = found[name]["start_cpu_s"]
                row = measure_errors(reading, notes)
                if short_s:
                    row["cpu_ms"] = 1000 * (long_s - short_s) / (load.requests - SHORT)
                found[name]["rounds"].append({key: round(value, 3) for key, value in row.items()})
                save_result(found, options.json)
        for rate in options.rates:
            for name in options.clients:
                requests = int(rate * SECONDS)
                _, notes, _ = play_client(name, load._replace(rate=rate, requests=requests))
                came_s = [note["came"] / 1e9 for note in notes]
                kept = (len(came_s) - 1) / (max(came_s) - min(came_s)) / rate
                found[name]["rates"][f"{rate:g}"] = round(kept, 3)
                save_result(found, options.json)


def save_result(found: dict[str, Any], file: Path | None) -> None:
    """Write what there is so far, or print it."""
    text = json.dumps(found, indent=1) + "\n"
    if file:
        file.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
