# SPDX-License-Identifier: Apache-2.0
"""Every policy on instances that never serve, with a clock that the test moves: whom it chooses, and why."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ttft_otel.router.choose import Asked, Choice, Instance, instance
from ttft_otel.router.policies.index import History, Holders
from ttft_otel.router.policies.model import Line, Models
from ttft_otel.router.policies.pending import SECOND, Pending
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.ttft import Late
from ttft_otel.router.policies.work import trapezoid, work

SIZE = 16
ABC = tuple(instance(f"http://127.0.0.1:{port}", "prefill") for port in (8001, 8002, 8003))
A, B, C = ABC
LINE = Line(0.01, 1e-4, 1e-8)


def asked(number: int = 0, tokens: int = 0, blocks: Sequence[int] = (), **more: object) -> Asked:
    """A request with a prompt of this length and these full blocks."""
    body = json.dumps({"model": "m", **more}).encode()
    return Asked(
        "prefill", "/v1/completions", "m", str(number), {}, body, tokens=tokens, blocks=(*blocks,)
    )


def state(**options: object) -> State:
    """Nothing known yet; ties are broken the same way each time."""
    return State(Holders(SIZE), Options(**options), random=random.Random(7))  # type: ignore[arg-type]


def send(of: State, request: Asked, to: Instance, cached: int = 0, now: int = 0) -> None:
    """The request goes there, whoever chose it."""
    of.sent(request, Choice(to, 0.0, "test", cached), now)


def choose(name: str, of: State, request: Asked, now: int = 0) -> Choice:
    """What a new policy of this name chooses."""
    return POLICIES[name](of).choose(request, ABC, now, False)


# By hand from the formula: tokens, cached, pairs.
WORKED = [
    (0, 0, 0),
    (1, 0, 1),
    (1, 1, 0),
    (2, 0, 3),
    (2, 1, 2),
    (3, 1, 5),
    (10, 0, 55),
    (10, 4, 45),
    (16, 16, 0),
    (100, 0, 5050),
    (100, 99, 100),
    (1000, 512, 369_172),
    (4096, 0, 8_390_656),
    (4096, 2048, 6_292_480),
    (20_260, 260, 205_210_000),
    (131_072, 0, 8_590_000_128),
    (131_072, 131_056, 2_097_032),
]


@pytest.mark.parametrize(("tokens", "cached", "pairs"), WORKED)
def test_trapezoid(tokens: int, cached: int, pairs: int) -> None:
    """The formula's worked cases, exactly; and it is the sum that it stands for."""
    assert trapezoid(tokens, cached) == pairs
    if tokens <= 20_260:
        assert sum(range(cached + 1, tokens + 1)) == pairs


# Pending prompts (tokens, cached) of A, B and C; what each has cached of the new one of 64; the scores.
SCORES = [
    ([[], [], []], (0, 0, 48), (2080, 2080, 904)),
    ([[(64, 0)], [(64, 48)], []], (0, 16, 0), (4160, 2848, 2080)),
    ([[(10, 0)], [(10, 4), (3, 1)], [(100, 99)]], (32, 32, 32), (1607, 1602, 1652)),
    ([[(1000, 512)], [(100, 0)], [(100, 0), (2, 0)]], (48, 0, 0), (370_076, 7130, 7133)),
]


@pytest.mark.parametrize(("pending", "cached", "scores"), SCORES)
def test_original_score(
    pending: list[list[tuple[int, int]]], cached: tuple[int, ...], scores: tuple[int, ...]
) -> None:
    """An instance's score is its pending prompts' pairs and the new one's; the least wins."""
    known = state(score="trapezoid")
    prompt = range(4)
    for at, each in enumerate(ABC):
        known.index.add(each.url, prompt[: cached[at] // SIZE])  # type: ignore[attr-defined]
        for number, (tokens, had) in enumerate(pending[at]):
            send(known, asked(10 * at + number, tokens), each, had)
    request = asked(99, 64, prompt)

    every = [POLICIES["ttft"](known).choose(request, (each,), 0, False).score for each in ABC]
    best = choose("ttft", known, request)

    assert every == [*scores]
    assert best.score == min(scores)
    assert (best.instance, best.reason) == (ABC[scores.index(min(scores))], "trapezoid")


def test_one_token() -> None:
    """A prompt that is cached to its last token is computed from its last block on."""
    known = state()
    known.index.add(A.url, range(4))  # type: ignore[attr-defined]

    assert known.cached(asked(0, 64, range(4)), ABC) == [48, 0, 0]
    assert known.cached(asked(0, 65, range(4)), ABC) == [64, 0, 0]


def test_shared() -> None:
    """With a cache that all share, the longest prefix counts for each."""
    known = state(shared=True)
    known.index.add(B.url, range(2))  # type: ignore[attr-defined]

    assert known.cached(asked(0, 64, range(4)), ABC) == [32, 32, 32]


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_known(name: str) -> None:
    """Without tokens, history, session or models each policy still chooses one of those offered."""
    assert choose(name, state(), asked()).instance in ABC


@pytest.mark.parametrize("name", ["least_requests", "ttft"])
def test_ties(name: str) -> None:
    """Among equals any is taken, about as often; the same seed takes the same ones."""
    one, other = (POLICIES[name](state()) for _ in range(2))
    took = [one.choose(asked(), ABC, 0, False).instance.url for _ in range(300)]
    again = [other.choose(asked(), ABC, 0, False).instance.url for _ in range(300)]

    assert took == again
    assert min(Counter(took).values()) > 60


def test_least() -> None:
    """The fewest under way, as the fleet counts."""
    busy = [replace(each, in_flight=count) for each, count in zip(ABC, (3, 1, 2), strict=True)]

    assert POLICIES["least_requests"](state()).choose(asked(), busy, 0, False).instance is busy[1]


def test_qps() -> None:
    """The fewest sent within the window, however many of them have ended; then all is forgotten."""
    known = state()
    for number, to in enumerate((A, A, B, B, B, C)):
        send(known, asked(number), to, now=number * SECOND)
    known.left(asked(5), 6 * SECOND)

    assert choose("qps", known, asked(9), 10 * SECOND).instance is C
    assert choose("qps", known, asked(9), 61 * SECOND).instance is A
    assert choose("qps", known, asked(9), 90 * SECOND).score == 0


def test_session() -> None:
    """A session stays where it is; when an instance goes, only its own sessions move."""
    policy = POLICIES["session"](state(session="user"))

    def of(user: object, among: Sequence[Instance]) -> str:
        return policy.choose(asked(user=user), among, 0, False).instance.url

    before = {user: of(user, ABC) for user in range(300)}
    after = {user: of(user, (A, C)) for user in range(300)}

    assert min(Counter(before.values()).values()) > 60
    assert all(after[user] == url for user, url in before.items() if url != B.url)
    assert {after[user] for user, url in before.items() if url == B.url} == {A.url, C.url}


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"x-user": "ann"}, b""), ({}, b'{"X-User": "ann"}'), ({"x-user": "ann"}, b"no json")],
)
def test_session_key(headers: dict[str, str], body: bytes) -> None:
    """The key is a header or one of the body's own."""
    request = replace(asked(), headers=headers, body=body)
    plain = replace(asked(), headers={"x-user": "ann"})

    found = choose("session", state(session="X-User"), request)

    assert found.reason == "session"
    assert found.instance is choose("session", state(session="x-user"), plain).instance


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"user": {"id": 1}}', b'{"user": ""}', b"\xff"])
def test_no_session(body: bytes) -> None:
    """Whoever names no session goes where the fewest were sent."""
    assert choose("session", state(session="user"), replace(asked(), body=body)).reason == "qps"


def test_prefix() -> None:
    """The longest beginning that an instance was sent, computed or not; else the fewest under way."""
    known = state()
    known.index.add(A.url, range(2))  # type: ignore[attr-defined]
    send(known, asked(1, 64, range(4)), B)

    found = choose("prefix", known, asked(2, 80, range(5)))

    assert (found.instance, found.cached, found.reason) == (B, 64, "prefix")
    assert choose("prefix", known, asked(3, 80, range(50, 55))).reason == "least_requests"


def test_prefix_shared() -> None:
    """What all prompts begin with draws nobody: the match must be a good part of the prompt."""
    known = state()
    known.index.add(A.url, range(3))  # type: ignore[attr-defined]
    own = [*range(3), *range(100, 107)]

    assert choose("prefix", known, asked(1, 160, own)).reason == "least_requests"
    assert choose("prefix", known, asked(2, 144, own[:9])).instance is A


def test_prefix_busy() -> None:
    """Not even a whole prefix is worth many more requests than elsewhere; among equals the fewest count."""
    known = state()
    for each in (A, B):
        known.index.add(each.url, range(5))  # type: ignore[attr-defined]
    policy = POLICIES["prefix"](known)

    def chosen(*counts: int) -> tuple[int, str]:
        busy = [replace(each, in_flight=count) for each, count in zip(ABC, counts, strict=True)]
        found = policy.choose(asked(1, 80, range(5)), busy, 0, False)
        return busy.index(found.instance), found.reason

    assert chosen(8, 9, 0) == (0, "prefix")
    assert chosen(9, 9, 0) == (2, "least_requests")
    assert chosen(29, 29, 20) == (0, "prefix") or chosen(29, 29, 20) == (1, "prefix")
    assert chosen(31, 31, 20) == (2, "least_requests")


@pytest.mark.parametrize(("threshold", "reason"), [(16, "kvaware"), (15, "session")])
def test_kvaware(threshold: int, reason: str) -> None:
    """The longest cached prefix, if no more than the threshold is missing; else by session."""
    known = state(session="user", threshold=threshold)
    known.index.add(C.url, range(4))  # type: ignore[attr-defined]
    known.index.add(A.url, range(3))  # type: ignore[attr-defined]
    request = asked(1, 80, range(5), user="ann")

    found = choose("kvaware", known, request)

    assert found.reason == reason
    assert reason == "session" or found.instance is C


@pytest.mark.parametrize("shared", [False, True])
def test_kvaware_among_equals(shared: bool) -> None:
    """What several have cached goes to each of them alike, or by session: never all to the first one."""
    known = state(session="user", shared=shared)
    for each in (A,) if shared else (A, C):
        known.index.add(each.url, range(4))  # type: ignore[attr-defined]
    policy, sent = POLICIES["kvaware"](known), Counter[str]()
    for number in range(300):
        request = asked(number, 80, range(4))
        found = policy.choose(request, ABC, number, False)
        assert (found.reason, found.cached, found.score) == ("kvaware", 64, 16)
        known.sent(request, found, number)
        sent[found.instance.url] += 1

    assert sent == ({each.url: 100 for each in ABC} if shared else {A.url: 150, C.url: 150})
    of = [asked(number, 80, range(4), user="ann") for number in range(300, 309)]
    assert len({policy.choose(each, ABC, 300, False).instance.url for each in of}) == 1


def test_calibrated() -> None:
    """What is waiting and what is new, in seconds; the running one's part that is done is taken off."""
    known = state()
    known.models = Models(LINE)
    send(known, asked(1, 1000), A)
    send(known, asked(2, 500), A)
    send(known, asked(3, 1400), B)
    one = LINE.seconds(work(1000, 0))
    new = LINE.seconds(work(100, 0))

    def time(each: Instance, now: float) -> float | None:
        request = asked(9, 100)
        policy = POLICIES["ttft"](known)
        return policy.choose(request, (each,), round(now * SECOND), False).predicted

    start = one + LINE.seconds(work(500, 0)) + new
    assert time(C, 0.05) == pytest.approx(new)
    assert time(A, 0) == pytest.approx(start)
    assert time(A, 0.05) == pytest.approx(start - 0.05)
    assert time(A, 60) == pytest.approx(start - 0.9 * one)  # late: it may end any moment
    assert choose("ttft", known, asked(9, 100)).instance is C
    known.first(asked(1, 1000), SECOND, 1.0, 0)
    assert time(A, 1) == pytest.approx(LINE.seconds(work(500, 0)) + new)  # the next one began now


def test_others() -> None:
    """The busier the fleet, the longer a request waits where its prompt is cached: others need the time."""
    known = state()
    known.models = Models(Line(0, 1e-3, 0))
    request = asked(99, 1600, range(100))
    known.index.add(A.url, range(50))  # type: ignore[attr-defined]
    send(known, asked(1, 1000), A)
    send(known, asked(2, 100), B)
    send(known, asked(3, 100), C)

    quiet = choose("ttft", known, request)
    for number in range(10, 400):
        now = number * SECOND // 10
        send(known, asked(number, 1), ABC[number % 3], now=now)
        known.left(asked(number), now)
    send(known, asked(1, 1000), A, now=now)
    send(known, asked(2, 100), B, now=now)
    send(known, asked(3, 100), C, now=now)
    busy = choose("ttft", known, request, now)

    assert quiet.instance is not A  # 1.7 s there, 1.8 s at A
    assert busy.instance is A  # 0.8 s of work instead of 1.6 s
    assert (busy.predicted, quiet.predicted) == (pytest.approx(1.8), pytest.approx(1.7))


def test_near() -> None:
    """Among about equal ones the instance that had the least to compute lately; what is better still wins."""
    known = state()
    known.models = Models(Line(0, 1e-3, 0))
    for number, each in enumerate((A, A, B, C, C)):
        send(known, asked(number, 1000), each)
        known.left(asked(number), 0)

    assert choose("ttft", known, asked(9, 1000)).instance is B
    known.index.add(A.url, range(2))  # type: ignore[attr-defined]
    assert choose("ttft", known, asked(9, 1000, range(60))).instance is B  # A: 3 % less
    known.index.add(A.url, range(6))  # type: ignore[attr-defined]
    assert choose("ttft", known, asked(9, 1000, range(60))).instance is A


def test_speculative() -> None:
    """A prefix that waits on an instance counts as cached there, but not for the original formula."""
    known = state()
    known.models = Models(Line(0, 1e-3, 0))
    send(known, asked(1, 160, range(10)), A)
    send(known, asked(2, 160, range(20, 30)), B)
    request = asked(3, 320, range(20))
    original = State(Holders(SIZE), Options(score="trapezoid"), known.pending)

    assert [POLICIES["ttft"](known).choose(request, (x,), 0, False).cached for x in ABC] == [
        160,
        0,
        0,
    ]
    assert POLICIES["ttft"](original).choose(request, (A,), 0, False).cached == 0


def test_slow() -> None:
    """An instance of half the speed gets the request only where the faster one's queue is longer."""
    known = state()
    for number in range(1, 60):
        todo = work(100 * number, 0)
        known.models.add("m", A.url, todo, LINE.seconds(todo))
        known.models.add("m", B.url, todo, 2 * LINE.seconds(todo))
    policy = POLICIES["ttft"](known)
    chosen = []
    for number in range(6):
        choice = policy.choose(asked(number, 1000), (A, B), 0, False)
        known.sent(asked(number, 1000), choice, 0)
        chosen.append(choice.instance)

    assert chosen.count(A) == 4
    assert chosen[0] is A


def test_start() -> None:
    """Before there are enough samples the pairs decide; then seconds, also for an instance without any."""
    known = state()
    reasons = []
    for number in range(10):
        choice = choose("ttft", known, asked(number, 100))
        reasons.append(choice.reason)
        known.sent(asked(number, 100), replace(choice, instance=A), number)
        known.first(asked(number, 100), number, 0.1, 0)

    assert reasons == ["trapezoid"] * 8 + ["calibrated"] * 2
    assert choose("ttft", known, asked(11, 100)).predicted == pytest.approx(0.1)


def test_late() -> None:
    """Where nobody can make it in time, it says so, and when somebody might."""
    known = state(slo=0.5)
    known.models = Models(Line(0, 1e-3, 0))
    for number, (each, tokens) in enumerate(zip(ABC, (800, 700, 900), strict=True)):
        send(known, asked(number, tokens), each)

    with pytest.raises(Late) as late:
        choose("ttft", known, asked(9, 100))

    assert late.value.after == pytest.approx(0.3)
    assert choose("ttft", known, asked(9, 100), 31 * SECOND // 100).instance is B


def test_late_idle() -> None:
    """Waiting makes an idle instance no faster: it serves what is late anyway, and shows how late."""
    known = state(slo=0.5)
    known.models = Models(Line(0, 1e-3, 0))
    assert choose("ttft", known, asked(9, 2000)).predicted == pytest.approx(2)
    send(known, asked(1, 100), A)
    send(known, asked(2, 3000), B)
    assert choose("ttft", known, asked(9, 2000)).instance is C
    send(known, asked(3, 3000), C)
    with pytest.raises(Late) as late:
        choose("ttft", known, asked(9, 2000))
    assert late.value.after == pytest.approx(0.1)  # then A is idle


def test_late_besides() -> None:
    """What an instance takes around queue and prefill counts against the limit, too."""
    known = state(slo=0.5)
    known.models = Models(Line(0, 1e-3, 0))
    for number, each in enumerate(ABC):
        send(known, asked(number, 200), each)
        known.beside(each.url, 0.3)
    with pytest.raises(Late) as late:
        choose("ttft", known, asked(9, 100))
    assert late.value.after == pytest.approx(0.1)


def test_late_unknown() -> None:
    """A request of no known work, such as one that loads an adapter, is never too late."""
    known = state(slo=0.5)
    known.models = Models(Line(0, 1e-3, 0))
    for number, each in enumerate(ABC):
        send(known, asked(number, 1000), each)
    assert choose("ttft", known, asked(9)).instance in ABC


def test_outcome() -> None:
    """What was predicted is held against what came."""
    known = state()
    known.models = Models(Line(0, 1e-3, 0))
    for number in range(4):
        request = asked(number, 100 * (1 + number % 2))
        choice = replace(choose("ttft", known, request, number * SECOND), instance=A)
        known.sent(request, choice, number * SECOND)
        known.first(request, number * SECOND + 1250 * request.tokens, 0.1, 0)

    assert known.outcomes[A.url].mape == pytest.approx(0.2)
    assert known.outcomes[A.url].r2 == pytest.approx(0.6, rel=0.01)


def test_elsewhere() -> None:
    """A request that is sent again is no longer where it was."""
    known = state()
    send(known, asked(1, 100), A)
    send(known, asked(1, 100), B, now=5)

    assert [known.pending.at(each.url).pairs for each in ABC] == [0, 5050, 0]
    assert len(known.pending) == 1


def test_time_out() -> None:
    """What nobody told the end of is forgotten; instances without requests leave nothing."""
    pending = Pending(patience=10 * SECOND)
    known = State(Holders(SIZE), pending=pending)
    send(known, asked(1, 100), A)
    send(known, asked(2, 100), B, now=9 * SECOND)
    send(known, asked(3, 100), B, now=11 * SECOND)

    assert pending.at(A.url).entries == {}
    assert len(pending) == 2


def test_history() -> None:
    """What was sent counts as cached; the latest blocks stay, ends of prompts go before beginnings."""
    index = History(SIZE, 6)
    index.served(A.url, range(4))
    index.served(B.url, range(2))
    urls = [each.url for each in ABC]

    assert index.match(range(5), urls) == [4, 2, 0]
    index.served(A.url, range(10, 14))
    assert index.match(range(5), urls) == [2, 2, 0]
    for number in range(0, 10_000, 3):
        index.served(A.url, range(number, number + 3))
        index.served(B.url, range(number, number + 3))
    assert len(index) == 6
