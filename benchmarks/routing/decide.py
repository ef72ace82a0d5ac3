# SPDX-License-Identifier: Apache-2.0
"""What a decision costs: microseconds of the ttft policy by part, for fleets of several sizes, on stdout.

    python benchmarks/routing/decide.py

Prompts of 8 192 tokens in blocks of 16, a third of them cached on some instance, four prompts waiting on
each. Tokenizing is not in it. The least of several rounds: what it costs when nothing else runs.
"""

from __future__ import annotations

import random
import sys
import timeit
from collections.abc import Callable

from ttft_otel.router.choose import Asked, Choice, instance
from ttft_otel.router.policies.index import Holders
from ttft_otel.router.policies.model import Line, Models
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.ttft import Ttft

TOKENS, SIZE = 8192, 16
SIZES = (2, 16, 128, 1000)


def asked(number: int, blocks: tuple[int, ...]) -> Asked:
    """A request with such a prompt."""
    return Asked("mono", "/v1/completions", "m", str(number), {}, b"", tokens=TOKENS, blocks=blocks)


def best(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(call, number=20, repeat=25)) / 20 * 1e6


def main() -> None:
    """A line for each size of fleet: lookup, all of `trapezoid`, all of `calibrated`, and the accounts."""
    sys.stdout.write("instances  lookup  trapezoid  calibrated  accounts\n")
    for size in SIZES:
        chance = random.Random(size)
        fleet = tuple(instance(f"http://10.0.{at // 250}.{at % 250}", "mono") for at in range(size))
        models = Models(Line(0.005, 40e-6, 1.3e-9))
        index = Holders(SIZE)
        calibrated = State(index, models=models)
        trapezoid = State(index, Options(score="trapezoid"), calibrated.pending)
        prompt = tuple(range(TOKENS // SIZE))
        for at, each in enumerate(fleet):
            index.add(each.url, prompt[: chance.randrange(len(prompt) // 3)])
            for n in range(4):
                other = tuple(chance.randrange(10**12) for _ in prompt)
                calibrated.sent(asked(4 * at + n, other), Choice(each, 0, ""), 0)
        request = asked(-1, prompt)

        def account(state: State = calibrated, request: Asked = request) -> None:
            state.sent(request, Choice(fleet[0], 0, ""), 0)  # noqa: B023
            state.left(request, 0)

        parts = (
            best(lambda: index.match(prompt, [each.url for each in fleet])),  # noqa: B023
            best(lambda: Ttft(trapezoid).choose(request, fleet, 10, False)),  # noqa: B023
            best(lambda: Ttft(calibrated).choose(request, fleet, 10, False)),  # noqa: B023
            best(account),
        )
        sys.stdout.write(f"{size:9}" + "".join(f"{each:10.1f}" for each in parts) + "\n")


if __name__ == "__main__":
    main()
