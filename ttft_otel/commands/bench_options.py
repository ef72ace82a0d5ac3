# SPDX-License-Identifier: Apache-2.0
"""The flags of `ttft-otel bench`, in groups, which bench.py adds to the command."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from ttft_otel.bench.load_plan import DATASETS, DatasetShape
from ttft_otel.bench.multi_round import MultiRoundOptions
from ttft_otel.bench.trace_replay import BLOCK_TOKENS
from ttft_otel.commands.command_options import make_number_option

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
        type=click.Choice(("poisson", "constant")),
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
    # One round gives figures; comparison.py needs three for an interval.
    make_number_option("--repeat", POSITIVE_INT, 1, "Number of rounds."),
    make_number_option(
        "--seed", click.INT, 0, "Seed of prompts and arrival times; each round adds 1."
    ),
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
    click.option("--html", type=RESULT_FILE, help="Also write an HTML page with charts."),
)
