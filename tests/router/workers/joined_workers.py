# SPDX-License-Identifier: Apache-2.0
"""Workers of one router without processes or sockets: each has a pool, policies and books of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers import messages
from ttft_otel.router.workers.process_loads import OwnLoads, RemoteLoads
from ttft_otel.tracing import clock

LEG = "mono"
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


class JoinedWorker:
    """One worker; `outbox` has what it says, until somebody delivers it."""

    def __init__(self, policy: str) -> None:
        instances = tuple(types.parse_instance_url(url, LEG) for url in URLS)
        self.pool = InstancePool({LEG: instances})
        self.routing = RoutingService(self.pool, policy)
        self.state = self.routing.get_policy(LEG).state
        self.state.index = SentHistory(16, 1000)
        self.outbox: list[messages.LoadMessage] = []
        self.own = OwnLoads(self.pool, self.routing, self.outbox.append)
        self.own.start()
        self.remote = RemoteLoads(self.pool.find_instance, lambda _: self.state)

    def choose(self, request: types.RoutingRequest) -> types.Decision:
        """Which instance its policy chooses now."""
        return self.routing.choose_instance(request, self.pool.get(LEG), clock.now_us(), False)

    def send(self, request: types.RoutingRequest, url: str = "") -> Attempt:
        """Send a request where its policy says, or to `url`."""
        decision = self.choose(request)
        if url:
            instance = self.pool.find_instance(LEG, url)
            assert instance is not None
            decision = types.Decision(instance, 0.0, "test")
        now_us = clock.now_us()
        load_entry = self.routing.add_load_entry(request, decision, request.request_id, now_us)
        attempt = Attempt(LEG, "/", decision.instance, request.request_id, now_us)
        attempt.policy, attempt.load_entry = self.routing.get_policy_name(LEG), load_entry
        self.pool.record_sent(attempt)
        return attempt

    def hear(self, slot: int, message: messages.LoadMessage) -> None:
        """Take in a message of the worker on `slot`."""
        handlers: dict[type, Callable[[int, Any], None]] = {
            messages.InFlight: self.remote.apply_in_flight,
            messages.Sent: self.remote.apply_sent,
            messages.FirstToken: self.remote.apply_first_token,
            messages.Ended: self.remote.apply_ended,
        }
        _, (heard,) = messages.decode_frame(messages.encode_frame(slot, [message]))
        handlers[type(message)](slot, heard)

    def hear_all(self, slot: int, other: JoinedWorker) -> bool:
        """Compare with the totals of the worker on `slot`; hear everything anew if they differ."""
        if self.remote.agrees_with(slot, other.own.build_totals()):
            return True
        self.remote.forget_process(slot, clock.now_us())
        for sent in other.own.list_pending():
            self.hear(slot, sent)
        assert self.remote.agrees_with(slot, other.own.build_totals())
        return False

    def count_elsewhere(self) -> int:
        """Requests in flight of others, as it believes."""
        return sum(each.all_in_flight - each.in_flight for each in self.pool)


def build_request(number: int, tokens: int = 64) -> types.RoutingRequest:
    """A request of so many prompt tokens, whose blocks no other one has."""
    blocks = tuple(number * 1000 + each for each in range(tokens // 16))
    return types.RoutingRequest(
        *(LEG, "/v1/completions", "tiny", f"request-{number}", {}, b""),
        prompt_tokens=tokens,
        block_keys=blocks,
    )
