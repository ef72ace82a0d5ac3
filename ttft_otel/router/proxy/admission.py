# SPDX-License-Identifier: Apache-2.0
"""What a request passes before an instance gets it: key, content type, model, bytes of its body, its turn.

endpoint.py asks before it reads a request's body, reads it here, and asks again for what it says. Last, it is
held if it would only wait in every instance's queue (--max-queue-ms). An engine serves its queue in the order
of arrival. What waits here goes on by vLLM's `priority`, lower values first, and short prompts before long
ones within a bound, to the instance that is best when it goes. Queues and prefills are as the policy predicts
them.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import math
import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final

import msgspec

from ttft_otel.http.bodies import ByteBudget
from ttft_otel.model.endpoints import KNOWN_ROUTES
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.stages import HELD_BY_PRIORITY
from ttft_otel.router.disagg.request_body import RequestBody
from ttft_otel.router.errors import FirstByteTimeout, RequestRejected, RouterError
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, RoutingPolicy
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.timeline import Exchange, Hold, RequestTimeline
from ttft_otel.router.types import AsgiReceive, AsgiScope, Instance, RoutingRequest
from ttft_otel.router.upstream.connection_pool import build_authorization
from ttft_otel.router.upstream.failures import build_unavailable_error
from ttft_otel.router.upstream.http_headers import ClientHeaders
from ttft_otel.tracing import clock

JSON_TYPE: Final = "application/json"
# Servers differ in whether these separate segments: what is checked here may be another path there.
_ODD_SEPARATOR: Final = re.compile(rb"\\|%2f|%5c", re.IGNORECASE)
# Microseconds between two requests for a model that no instance has listed.
MODEL_REFRESH_INTERVAL_US: Final = 1_000_000
MAX_JOINED_BYTES: Final = 4 << 20  # of a body that is joined on the loop: about a millisecond
# A prompt goes before those that come later than so many times its own prefill after it, however short they
# are. In the simulation the mean TTFT hardly falls beyond 4; by arrival alone, 0, it is above that without.
PATIENCE: Final = 4.0
# Seconds between two looks. The longest without an event: instances come back, and lines are learnt anew.
MIN_PAUSE_S: Final = 0.001
MAX_PAUSE_S: Final = 0.25

FindCandidates = Callable[[str, str], Sequence[Instance]]
Schedule = Callable[[float, Callable[[], None]], object]  # after so many seconds


class AdmissionGate:
    """Admits or rejects requests; `is_shut` rejects all, while the router is being stopped.

    client_keys: keys of clients, not forwarded. upstream_authorization: sent to instances instead.
    requests_under_way: requests in flight. refusal_counts: every refusal of the router, by reason.
    """

    def __init__(
        self, upstream: UpstreamClient, client_keys: Sequence[str] = (), upstream_key: str = ""
    ) -> None:
        self.upstream = upstream
        self.is_shut = False
        self.requests_under_way = 0
        self.is_draining = False  # the router is to stop: /readyz responds 503
        self.is_memory_short = False  # its container's is used up nearly
        self.upstream_authorization = build_authorization(upstream_key)
        self.refusal_counts: Counter[str] = Counter()
        self._requests_by_owner: Counter[str] = Counter()
        self._due_by_owner: dict[str, float] = {}  # microseconds; what --max-key-rate has booked
        self._refreshed_us = 0
        self.client_keys: tuple[bytes, ...] = ()
        self.set_client_keys(client_keys)

    def set_client_keys(self, client_keys: Sequence[str]) -> None:
        """Accept these `client_keys` from now on; without any, keys are not checked."""
        self.client_keys = tuple(key.encode() for key in client_keys)
        self._owners = {key: sha256(key).hexdigest()[:16] for key in self.client_keys}

    def admit_request(
        self, scope: AsgiScope, client_headers: ClientHeaders, requires_json: bool
    ) -> str:
        """Check a request before its body is read; returns its owner. Raises RequestRejected.

        scope: for the path. client_headers: changed to what instances get.
        requires_json: whether the body must be JSON.
        """
        if self.is_shut:
            raise RequestRejected(503, "The router is shutting down.", reason="draining")
        # Not the only one: whatever holds the memory then does not wait for a request's end.
        if self.is_memory_short and self.requests_under_way > 1:
            raise RequestRejected(503, "The router's memory is nearly used up.", reason="memory")
        path = scope["path"]
        # A known route of which nothing was encoded, as equal lengths show, needs no check.
        if path not in KNOWN_ROUTES or len(scope.get("raw_path", path)) != len(path):
            _check_path(path, scope.get("raw_path", b""))
        forwarded = client_headers.forwarded
        owner = ""
        # A client's key ends here: instances get the router's own, or none.
        if self.client_keys:
            owner = self.check_api_key(forwarded.pop("authorization", ""))
            forwarded.pop("x-api-key", None)  # where clients of /v1/messages put the same key
        if self.upstream_authorization:
            forwarded["authorization"] = self.upstream_authorization
        # Nearly all clients send exactly this, and only the others have to be parsed.
        if requires_json and forwarded.get("content-type") != JSON_TYPE:
            media_type = forwarded.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != JSON_TYPE:
                raise RequestRejected(415, f"Unsupported media type: send {JSON_TYPE}.")
        if owner:
            # Last: what is refused before has no share to give back.
            self._take_share(owner)
        return owner

    def _take_share(self, owner: str) -> None:
        limits = self.upstream.limits
        if limits.max_key_requests and self._requests_by_owner[owner] >= limits.max_key_requests:
            raise RequestRejected(
                429, "Too many requests of this API key are under way.", reason="share"
            )
        if limits.max_key_rate:
            now_us, pause_us = clock.now_us(), 1e6 / limits.max_key_rate
            due_us = max(self._due_by_owner.get(owner, 0.0), now_us)
            # A second's requests may come at once.
            if due_us - now_us > 1e6 - pause_us:
                raise RequestRejected(
                    429, "Too many requests a second of this API key.", reason="share"
                )
            self._due_by_owner[owner] = due_us + pause_us
        self._requests_by_owner[owner] += 1

    def end_request(self, owner: str) -> None:
        """A request of `owner` that was admitted is over."""
        self._requests_by_owner[owner] -= 1

    def check_api_key(self, authorization: str) -> str:
        """The owner of what has the key in `authorization`: the same for one key, whichever worker asks.

        Raises RequestRejected unless the key is valid; compares in constant time.
        """
        scheme, _, given_key = authorization.partition(" ")
        # As bytes: compare_digest takes text only if it is ASCII.
        data = given_key.strip().encode("utf-8", "surrogateescape")
        # A list: every key is compared, so that it takes as long whichever it is not.
        is_known = any([hmac.compare_digest(data, key) for key in self.client_keys])
        # Schemes are case-insensitive (RFC 9110 section 11.1), keys are not.
        if scheme.lower() != "bearer" or not is_known:
            raise RequestRejected(401, "Send an API key: Authorization: Bearer KEY.")
        return self._owners[data]

    def check_body(
        self, parsed_body: RequestBody, client_headers: ClientHeaders, requires_json: bool
    ) -> None:
        """Raise RequestRejected for JSON that cannot be read, or with more media items than --max-items.

        requires_json: whether the body must be JSON. On every other path what servers would take for
        JSON is refused too: what the router cannot read may hold transfer parameters.
        """
        if parsed_body.problem and (
            requires_json
            or (parsed_body.data and is_json_type(client_headers.forwarded.get("content-type", "")))
        ):
            raise RequestRejected(400, parsed_body.problem, reason="json")
        max_items = self.upstream.limits.max_items
        if len(parsed_body.media_items) > max_items:
            message = f"The request has more than {max_items} different media items."
            raise RequestRejected(400, message, reason="items")

    async def check_model(self, parsed_body: RequestBody, leg: str, authorization: str) -> None:
        """Raise RequestRejected if `leg` does not have the model of the body.

        authorization: the client's header, for instances that require a key to list their models.
        """
        model = parsed_body.model
        pool = self.upstream.pool
        # An instance that has not listed its models yet may have it, and can refuse it itself.
        if not model or pool.knows_model(leg, model):
            return
        now_us = clock.now_us()
        if (
            now_us - self._refreshed_us > MODEL_REFRESH_INTERVAL_US
        ):  # the model may have been loaded a moment ago
            # Before the wait, so that requests that come meanwhile do not ask, too.
            self._refreshed_us = now_us
            await self.upstream.health_monitor.refresh_leg_models(leg, authorization, kept_s=0)
        if not pool.knows_model(leg, model):
            # Cut: a client chooses its length.
            message = f"The model `{model[:256]}` does not exist."
            raise RequestRejected(404, message, reason="model", parameter="model")


def read_ttft_limit(text: str) -> float:
    """The seconds that a client allows in x-ttft-limit-ms, 0 for "". Raises RequestRejected."""
    try:
        limit_ms = float(text or 0)
    except ValueError:
        limit_ms = -1.0
    if not 0 <= limit_ms < math.inf or (text and not limit_ms):
        message = f"{header_names.TTFT_LIMIT} is a number of milliseconds above 0."
        raise RequestRejected(400, message)
    return limit_ms / 1000


def _check_path(path: str, raw_path: bytes) -> None:
    """Raise RequestRejected for a path that an instance may take for another one, even outside /v1.

    path: decoded. raw_path: as it is forwarded.
    """
    # Some servers read a backslash as a slash.
    segments = path.replace("\\", "/").split("/")
    is_plain = "." not in segments and ".." not in segments and path.isprintable()
    if not is_plain or _ODD_SEPARATOR.search(raw_path):
        message = "The path has `.` or `..` segments, an encoded separator or a control character."
        raise RequestRejected(400, message, reason="path")


def is_json_type(content_type: str) -> bool:
    """Whether a server reads a body of this `content_type` as JSON; FastAPI does so without any, too."""
    media_type = content_type.partition(";")[0].strip().lower()
    main_type, _, subtype = media_type.partition("/")
    return not media_type or (
        main_type == "application" and (subtype == "json" or subtype.endswith("+json"))
    )


class ClientBody(msgspec.Struct, eq=False):
    """The body of one request, which the task `reader` reads.

    owner: whose key it came with, "" without keys. owner_bytes: of the owner's share.
    data: all of it, once it is here; b"" again when it was taken. error: why the reader was cancelled, None
    unless that was done here.
    """

    _reader: asyncio.Task[Any] | None
    owner: str
    owner_bytes: int = 0
    counted_bytes: int = 0
    data: bytes = b""
    error: RequestRejected | None = None

    def take_data(self) -> bytes:
        """All of it, for the only one who holds it from here on: it may be large, and the answer long."""
        data, self.data = self.data, b""
        return data

    def time_out(self) -> None:
        """End the reading: the body did not arrive in time."""
        message = "The body of the request did not arrive in time."
        self.refuse(RequestRejected(408, message, reason="body_timeout"))

    def refuse(self, error: RequestRejected) -> None:
        """End the reading with `error`."""
        # First, so that the reader finds it when the cancellation arrives.
        self.error = error
        if self._reader is not None:
            self._reader.cancel()


class BodyBudget:
    """All bodies that the router holds; all of it runs on the event loop."""

    def __init__(self, limits: RouterLimits) -> None:
        self.limits = limits
        self._arriving: DeadlineQueue[ClientBody] = DeadlineQueue(limits.body_timeout)
        self._bytes: ByteBudget[ClientBody] = ByteBudget(limits.max_bodies, self._arriving)
        self._bytes_by_owner: Counter[str] = Counter()  # with --max-key-bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.counted_bytes

    def begin_body(self, reader: asyncio.Task[Any] | None, owner: str) -> ClientBody:
        """A body of `owner` is expected, by the task `reader`."""
        body = ClientBody(reader, owner)
        self._arriving.watch(body)
        return body

    def add_bytes(self, body: ClientBody, number: int) -> None:
        """Count bytes that arrived. Raises RequestRejected if `body` is refused for them."""
        # The limit of one body first: a body that is too large must not push out others.
        if body.counted_bytes + number > self.limits.max_body:
            raise build_too_large_error()
        if body.owner and (most := self.limits.max_key_bytes):
            if self._bytes_by_owner[body.owner] + number > most:
                message = "Too many bytes of this API key's bodies are under way."
                raise RequestRejected(429, message, reason="share")
            self._bytes_by_owner[body.owner] += number
            body.owner_bytes += number
        for each in self._bytes.add_bytes(body, number):
            error = RequestRejected(
                503, "The router holds too many request bodies.", reason="bodies"
            )
            # The caller gets an exception; readers of others wait, and are cancelled.
            if each is body:
                raise error
            self.end_reading(each)
            each.refuse(error)

    def end_reading(self, body: ClientBody) -> None:
        """Nothing more of `body` will arrive; its bytes count until it is released. Idempotent."""
        self._arriving.forget(body)

    def release_body(self, body: ClientBody) -> None:
        """No instance gets it any more, or its request is over. Idempotent."""
        self._bytes.release(body)
        if body.owner_bytes:
            self._bytes_by_owner[body.owner] -= body.owner_bytes
            body.owner_bytes = 0
        body.error = None  # its frames hold the body


def build_too_large_error() -> RequestRejected:
    """A body that exceeds --max-body."""
    return RequestRejected(413, "The request body is too large.", reason="body")


async def read_body(
    receive: AsgiReceive,
    client_headers: ClientHeaders,
    budget: BodyBudget,
    client_body: ClientBody,
    exchange: Exchange,
) -> bool:
    """Read the request body into `client_body`; False if the client disconnected first.

    budget: counts its bytes. Raises RequestRejected.
    """
    content_length = client_headers.get("content-length")
    chunks: list[bytes] = []
    try:
        # What is announced is refused before it is read; a chunked body announces nothing.
        if content_length.isdigit() and int(content_length) > budget.limits.max_body:
            raise build_too_large_error()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.record_failure(keys.ERROR_DISCONNECTED)
                return False
            chunk = message.get("body", b"")
            budget.add_bytes(client_body, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                if len(chunks) == 1:
                    client_body.data = chunks[0]
                elif client_body.counted_bytes > MAX_JOINED_BYTES:
                    # in a thread, which lets go of the interpreter while it copies
                    client_body.data = await asyncio.to_thread(b"".join, chunks)
                else:
                    client_body.data = b"".join(chunks)
                return True
    except asyncio.CancelledError:
        # By the budget or its timer, which leave an error; otherwise the server is being stopped.
        if client_body.error is None:
            raise
        raise client_body.error from None
    finally:
        budget.end_reading(client_body)


def schedule_on_loop(delay_s: float, action: Callable[[], None]) -> object:
    """Call `action` after `delay_s` seconds."""
    return asyncio.get_running_loop().call_later(delay_s, action)


class HeldPrompt(msgspec.Struct, eq=False):
    """A request that waits; on_end is called once: without an error when it may go on.

    rank: its priority, until when it has patience (microseconds), and the order of arrival. judge_us: when
    its time limit is to be judged again, 0 for none.
    """

    request: RoutingRequest
    rank: tuple[int, int, int]
    hold: Hold
    on_end: Callable[[RouterError | None], None]
    judge_us: int = 0


class HoldQueue:
    """The requests that wait. All times are arguments or come from `now_us`, so that simulations can use it.

    find_candidates: instances by leg and model. schedule: calls something later. counts: how holds ended.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        find_candidates: FindCandidates,
        limits: RouterLimits,
        schedule: Schedule = schedule_on_loop,
        now_us: Callable[[], int] = clock.now_us,
    ) -> None:
        self.policy, self.limits = policy, limits
        self.counts: Counter[str] = Counter()
        self.max_queue_s = policy.state.options.max_queue_s
        self._find_candidates, self._schedule, self._now_us = find_candidates, schedule, now_us
        self._held: list[HeldPrompt] = []  # by rank
        self._numbers = itertools.count()
        self._due_us = 0  # of the next look, 0 for none
        policy.state.pending.on_removed = self._look_soon

    def __len__(self) -> int:
        return len(self._held)

    async def wait_turn(
        self, request: RoutingRequest, priority: int, timeline: RequestTimeline
    ) -> None:
        """Wait until `request` may go to an instance. Raises RouterError.

        The caller sends it before it awaits anything else: the next one is judged with its load.
        """
        if self.is_free(request):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hold = Hold(self._now_us())
        held = self.add_request(request, priority, hold, partial(_end_turn, turn))
        timeline.record_hold(hold)
        try:
            await turn
            hold.released_us = self._now_us()
        finally:
            if held in self._held:  # its client has left
                self._end(held, "left")

    def is_free(self, request: RoutingRequest) -> bool:
        """Whether `request` may go on at once."""
        return not self._held and self._predict_wait(request, self._now_us())[0] <= 0

    def add_request(
        self,
        request: RoutingRequest,
        priority: int,
        hold: Hold,
        on_end: Callable[[RouterError | None], None],
    ) -> HeldPrompt:
        """Let `request` wait. Raises SloUnreachable if it would be too late by now.

        Of more than --max-held the last one is refused, which may be another one.
        """
        now_us = self._now_us()
        prefill_s = self._predict_wait(request, now_us)[1]
        patient_until_us = now_us + round(PATIENCE * prefill_s * US_PER_SECOND)
        rank = priority, patient_until_us, next(self._numbers)
        held = HeldPrompt(request, rank, hold, on_end)
        self._judge_limit(held, now_us)
        insort(self._held, held, key=lambda each: each.rank)
        if len(self._held) > self.limits.max_held:
            message = "The router holds too many requests until an instance can take them."
            self._end(self._held[-1], "full", RequestRejected(429, message, reason="max_held"))
        self._look_soon()
        return held

    def _predict_wait(self, request: RoutingRequest, now_us: int) -> tuple[float, float]:
        """Seconds by which the shortest queue exceeds the limit, 0 or less if it does not; of the prefill."""
        candidates = self._find_candidates(request.leg, request.model)
        # Without an instance it is refused where instances are chosen.
        queue_s, prefill_s = (
            self.policy.predict_wait(request, candidates, now_us) if candidates else (0.0, 0.0)
        )
        return queue_s - self.max_queue_s, prefill_s

    def _judge_limit(self, held: HeldPrompt, now_us: int) -> None:
        """Raise SloUnreachable if the time that it may take cannot be kept; else note when it may be so."""
        request, policy = held.request, self.policy
        slo_s = policy.state.find_slo_s(request)
        candidates = self._find_candidates(request.leg, request.model)
        if not slo_s or not candidates:
            return
        choice = policy.choose_instance(request, candidates, now_us, True)
        end_us = now_us + round((policy.state.predict_ttft(choice) or 0.0) * US_PER_SECOND)
        slack_us = request.arrived_us + round(slo_s * US_PER_SECOND) - end_us
        held.judge_us = now_us + max(slack_us, round(MIN_PAUSE_S * US_PER_SECOND))

    def _look_soon(self) -> None:
        """Something has changed: who can go on is judged again, once for all that happens now."""
        if self._held:
            self._look_after(0.0)

    def _look_after(self, delay_s: float) -> None:
        due_us = self._now_us() + round(delay_s * US_PER_SECOND)
        if not self._due_us or due_us < self._due_us:
            self._due_us = due_us
            self._schedule(delay_s, partial(self._look, due_us))

    def _look(self, due_us: int) -> None:
        """Let the first one go on that can, and end those that are too late."""
        if due_us != self._due_us:  # a later look has taken its place
            return
        self._due_us = 0
        now_us, pause_s = self._now_us(), MAX_PAUSE_S
        excess_s: dict[str, float] = {}  # by model
        for held in tuple(self._held):
            model = held.request.model
            if model not in excess_s:
                excess_s[model] = self._predict_wait(held.request, now_us)[0]
            if excess_s[model] <= 0:
                self._release(held)
                # Its load is there at the next look.
                pause_s = 0.0
                break
            try:
                self._check_time(held, now_us)
            except RouterError as error:
                self._end(held, "late", error)
            else:
                until_judged_s = (held.judge_us - now_us) / US_PER_SECOND
                waits = (pause_s, excess_s[model], until_judged_s if held.judge_us else pause_s)
                pause_s = max(min(waits), MIN_PAUSE_S)
        if self._held:
            self._look_after(pause_s)

    def _check_time(self, held: HeldPrompt, now_us: int) -> None:
        """Raise RouterError if `held` has waited too long."""
        timeout_s = self.limits.first_byte_timeout
        if timeout_s and now_us - held.hold.began_us >= timeout_s * US_PER_SECOND:
            reason = FirstByteTimeout(f"none could take the request within {timeout_s:g} s")
            raise build_unavailable_error(held.request.leg, reason)
        if held.judge_us and now_us >= held.judge_us:
            self._judge_limit(held, now_us)

    def _release(self, held: HeldPrompt) -> None:
        for other in self._held:
            # Those that came before it.
            is_urgent = held.rank[0] < other.rank[0] and held.rank[2] > other.rank[2]
            if is_urgent and other.request.model == held.request.model:
                other.hold.reason = HELD_BY_PRIORITY
        self._end(held, "sent")

    def _end(self, held: HeldPrompt, result: str, error: RouterError | None = None) -> None:
        self._held.remove(held)
        self.counts[result] += 1
        held.on_end(error)


def _end_turn(turn: asyncio.Future[None], error: RouterError | None) -> None:
    if turn.done():  # cancelled
        return
    if error is None:
        turn.set_result(None)
    else:
        turn.set_exception(error)
