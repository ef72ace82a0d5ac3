# SPDX-License-Identifier: Apache-2.0
"""Instances, what is asked of routing and what it answers; and the words the rooms share.

The circuit breaker of one instance stands here, too.
upstream/instance_pool.py calls its transitions and runs its timers; nothing here waits or logs.
The protocol lets timeline.py name what routing/ makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    from ttft_otel.model.timing import ServerTiming
import random

# An instance that has recovered gets a trial after this time at the latest, give or take jitter.
MAX_OPEN_PERIOD_S: Final = 30.0
MAX_DOUBLINGS: Final = 16  # of the open period
OVERDUE_AFTER_S: Final = 30.0  # a long prompt may keep an engine as long as this
_OVERDUE_AFTER_US: Final = int(OVERDUE_AFTER_S * 1e6)
_NEVER_US: Final = 1 << 62

BreakerState = Literal["closed", "open", "half-open"]


class CircuitBreaker(msgspec.Struct, eq=False):
    """Closed: requests pass. Open: none does. Half-open: one does, the trial, and others wait for it.

    The trial keeps others away until the instance responds to anything, the trial ends, or
    `release_trial` is called because it takes too long or a health probe succeeded.
    """

    state: BreakerState = "closed"
    consecutive_failures: int = 0  # of requests, in a row
    opening_number: int = 0  # of the current open period: timers of earlier ones are ignored
    is_trial_in_flight: bool = False
    _consecutive_openings: int = 0  # doubles the open period
    _trial_number: int = 0

    @property
    def admits_requests(self) -> bool:
        """Whether a request may be sent now."""
        return self.state != "open" and not self.is_trial_in_flight

    def record_failure(self, max_failures: int) -> bool:
        """Count a failure; returns whether it is one too many, so that `open` has to follow."""
        self.consecutive_failures += 1
        return self.state != "open" and (
            self.state == "half-open" or self.consecutive_failures >= max_failures
        )

    def record_success(self) -> None:
        """Record that a request was answered to its end without a failure."""
        self.consecutive_failures = self._consecutive_openings = 0

    def open(self, first_period_s: float) -> float:
        """Admit nothing; returns the seconds after which `half_open` has to be called.

        first_period_s: of the first opening, doubled with each further one in a row.
        """
        # MAX_DOUBLINGS keeps the power small, however long an instance is away.
        doubled_s: float = first_period_s * 2**self._consecutive_openings
        period_s = min(doubled_s, MAX_OPEN_PERIOD_S)
        self.state = "open"
        self.is_trial_in_flight = False
        self._consecutive_openings = min(self._consecutive_openings + 1, MAX_DOUBLINGS)
        self.opening_number += 1
        # Jitter, so that several routers do not try a recovering instance at the same time.
        return period_s * random.uniform(0.8, 1.2)

    def half_open(self) -> bool:
        """Admit a trial; returns whether the breaker was open."""
        was_open = self.state == "open"
        if was_open:
            self.state = "half-open"
        return was_open

    def begin_trial(self) -> int:
        """Keep other requests away while a trial is in flight; returns its number."""
        self.is_trial_in_flight = True
        self._trial_number += 1
        return self._trial_number

    def release_trial(self, trial_number: int = 0) -> bool:
        """Admit the next trial, also if this one is not over; returns whether one was in flight.

        trial_number: only if it is this one that keeps the others away; 0: whichever it is.
        """
        # The timer of a trial that is over must not release a later one.
        was_in_flight = self.is_trial_in_flight and trial_number in (0, self._trial_number)
        if was_in_flight:
            self.is_trial_in_flight = False
        return was_in_flight

    def close(self) -> bool:
        """Admit everything, because the instance responds; returns whether it was not closed."""
        was_closed = self.state == "closed"
        self.state = "closed"
        self.is_trial_in_flight = False
        return not was_closed


# How the first token of a request with two legs reaches the client; docs/router.md.
MODE_OFF: Final = "off"
MODE_STRIP: Final = "strip"
FIRST_TOKEN_MODES: Final = (MODE_OFF, MODE_STRIP)
DEFAULT_POLICY: Final = "round_robin"  # needs no knowledge of requests
OTHER_LEGS_POLICY: Final = "least_requests"

# What decoding others' JSON or MessagePack raises.
# RecursionError: somebody can nest deeper than Python's recursion limit lets a decoder go.
JSON_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]
InstanceState = Literal["healthy", "failed", "draining"]


# eq=False: dicts and sets hold it by identity, and its fields change.
@dataclass(slots=True, eq=False)
class Instance:
    """One server of a leg and its state, which instance_pool.py updates.

    url: without a trailing slash. host, port: for spans. models: names it lists, None if not known yet.
    """

    url: str
    leg: str
    host: str
    port: int
    # Healthy until a probe says otherwise: the router serves from its first moment.
    state: InstanceState = "healthy"
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    in_flight: int = 0
    # Of these, those that it has not begun to answer, and from when on it is late with them.
    owed_answers: int = 0
    overdue_from_us: int = _NEVER_US
    # Of other workers and replicas: workers/messages.py keeps what they have sent to it.
    in_flight_elsewhere: int = 0  # of all of them
    # Results of ended attempts, by worker.
    results_elsewhere: dict[Hashable, Mapping[str, int]] = field(default_factory=dict)
    # Processes of other replicas whose circuit breaker is open (shared_state/store_link.py).
    breaker_openers: set[str] = field(default_factory=set)
    missed_probes: int = 0  # of health probes, in a row
    was_probed: bool = False
    models: frozenset[str] | None = None
    model_cards: tuple[dict[str, Any], ...] = ()  # `data` of its /v1/models
    base_models: dict[str, str] = field(default_factory=dict)  # by the name of a LoRA adapter
    max_model_len: int = 0  # the smallest context of these models, in tokens; 0 if unknown
    attempt_results: Counter[str] = field(default_factory=Counter)
    # Media items encoded again although an encoder had encoded them (encoders.py).
    recomputed_items: int = 0

    def record_model_cards(self, model_cards: tuple[dict[str, Any], ...]) -> bool:
        """Record what it lists, `data` of its /v1/models. Returns whether these are other models."""
        listed = frozenset(card["id"] for card in model_cards)
        has_changed, self.models = listed != self.models, listed
        self.model_cards = model_cards
        # Names of listed models only, which are bounded.
        self.base_models = {
            card["id"]: parent
            for card in model_cards
            if isinstance(parent := card.get("parent"), str) and parent in listed
        }
        lengths = [card.get("max_model_len") for card in model_cards]
        known = [each for each in lengths if isinstance(each, int) and each > 0]
        self.max_model_len = min(known, default=0)
        return has_changed

    @property
    def all_in_flight(self) -> int:
        """Requests in flight there, of this process, other workers and other replicas."""
        return self.in_flight + self.in_flight_elsewhere

    def record_sent(self, now_us: int) -> None:
        """A request goes to it."""
        self.in_flight += 1
        if not self.owed_answers:
            self.overdue_from_us = now_us + _OVERDUE_AFTER_US
        self.owed_answers += 1

    def record_begun(self, now_us: int) -> None:
        """The first byte of an answer is here, of a call that needs all of it the last."""
        self.owed_answers = max(self.owed_answers - 1, 0)
        self.overdue_from_us = now_us + _OVERDUE_AFTER_US if self.owed_answers else _NEVER_US

    def record_ended(self, was_begun: bool) -> None:
        """A request is over; not `was_begun`: without an answer, as it failed, or its client left."""
        self.in_flight -= 1
        if not was_begun:
            self.owed_answers = max(self.owed_answers - 1, 0)
            if not self.owed_answers:
                self.overdue_from_us = _NEVER_US

    def measure_overdue_s(self, now_us: int) -> float:
        """Seconds beyond OVERDUE_AFTER_S for which it owes answers and has begun none; 0 for none."""
        return max((now_us - self.overdue_from_us) / 1e6, 0.0)


# A Struct, as what comes for each request: made in C, in a twentieth of a frozen dataclass's time.
class Decision(msgspec.Struct, frozen=True):
    """The choice of a policy; `reason` is one word for spans and logs.

    score: lower is better, in the unit of the policy. cached_tokens: prompt tokens cached at the instance.
    predicted_ttft_s: seconds, None without prediction. candidate_scores, candidate_cached_tokens: of every
    candidate in the given order; empty if the policy computes none.
    """

    instance: Instance
    score: float
    reason: str
    cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    candidate_scores: Sequence[float] = ()
    candidate_cached_tokens: Sequence[int] = ()


def find_base_model(instances: Sequence[Instance], model: str) -> str:
    """The model whose weights compute the prompts of `model`: an adapter's own base model.

    By the first of `instances` whose list of models is known; one that was just discovered has none yet.
    """
    told = next((each for each in instances if each.model_cards), instances[0])
    return told.base_models.get(model, model)


class RoutingRequest(msgspec.Struct, frozen=True):
    """A request on one leg, as policies and the upstream client see it.

    single_use: do not retry, because the KV blocks that the body names may be gone after one attempt.
    prompt_tokens, block_keys: length and keys of the full blocks of the prompt; 0 and empty if unknown.
    tokens_estimated: prompt_tokens is an estimate.
    cached_tokens_by_url: tokens of the prompt cached at instances; None if not looked up.
    item_tokens: placeholder tokens of each media part, in order; empty if unknown.
    arrived_us: when the router received it; 0 to ignore the time since then.
    slo_s: the client's own limit of the TTFT, 0 for none.
    encode_wait_s: predicted seconds until encoders are done. encoders_busy: that includes a queue.
    media_encoded: encoders have encoded its media items, which a header tells the instance.
    media_item: of an encoder request, the content part to encode, as JSON. body_frame: what is sent
    before and after it, in place of `body`; the requests for all items of a body share it.
    """

    leg: str
    path: str
    model: str
    request_id: str
    headers: dict[str, str]
    body: bytes
    single_use: bool = False
    prompt_tokens: int = 0
    tokens_estimated: bool = False
    block_keys: tuple[int, ...] = ()
    cached_tokens_by_url: Mapping[str, int] | None = None
    item_tokens: tuple[int, ...] = ()
    arrived_us: int = 0
    encode_wait_s: float = 0.0
    encoders_busy: bool = False
    media_encoded: bool = False
    media_item: bytes = b""
    body_frame: tuple[bytes, bytes] | None = None
    slo_s: float = 0.0


class AttemptLoad(Protocol):
    """One attempt's entry in what its leg's policy decides by; routing_service.LoadEntry.

    requested_timing: the policy, and nobody else, asked the server for its breakdown.
    awaits_delta: the first chunks had no token, so that more of them have to be read.
    predicted_ttft_s, prediction_error_s: seconds; None where nothing was predicted or measured.
    """

    requested_timing: bool
    awaits_delta: bool
    predicted_ttft_s: float | None
    prediction_error_s: float | None

    def record_first_token(
        self, first_token_us: int, server_timing: ServerTiming | None, is_streaming: bool
    ) -> None:
        """The first token, or a whole answer, came at `first_token_us` (CLOCK_MONOTONIC)."""

    def record_chunk(self, data: bytes) -> None:
        """More of an answer whose first token is still to come."""

    def record_end(self) -> None:
        """The attempt is over, however it ended. Idempotent."""


def parse_instance_url(url: str, leg: str) -> Instance:
    """Parse `url`, http(s)://HOST[:PORT][/PREFIX], into an instance of `leg`.

    Raises ValueError, with the remedy, for anything else.
    """
    # For the command line and the admin API, which show it to who wrote the URL.
    remedy = f"{url!r} is not a server's URL; write it like http://127.0.0.1:8001"
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for what is no number, or above 65535.
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(remedy) from error
    # Paths are appended, so there can be no query; a user's name would be shown in logs.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError(remedy)
    return Instance(url.rstrip("/"), leg, parts.hostname, port)
