# SPDX-License-Identifier: Apache-2.0
"""Who may come in, and with what; forward.py asks before the body is read and once it is parsed."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Final

from ttft_otel import clock
from ttft_otel.router.answer import Rejected
from ttft_otel.router.body import Body
from ttft_otel.router.headers import Incoming
from ttft_otel.router.legs import Legs

JSON: Final = "application/json"
AGAIN: Final = 1_000_000  # microseconds between two looks for a model nobody has listed


class Gate:
    """API keys, the content type, the model; `shut` while the router is being stopped.

    `keys` are the clients' and stay here; `key` is the instances' own. `inside`: requests under way.
    """

    def __init__(self, legs: Legs, keys: Sequence[str] = (), key: str = "") -> None:
        self.legs, self.shut, self.inside = legs, False, 0
        self.draining = False  # told to stop: not ready, whoever asks
        self.key = f"Bearer {key}" if key else ""
        self._looked = 0
        self.keys: tuple[bytes, ...] = ()
        self.let(keys)

    def let(self, keys: Sequence[str]) -> None:
        """From now on these keys open; none: everybody may come in."""
        self.keys = tuple(key.encode() for key in keys)

    def enter(self, found: Incoming, json: bool) -> None:
        """Before the body is read. Raises Rejected."""
        if self.shut:
            raise Rejected(503, "The router is shutting down.", "UnavailableError", again=1)
        passed = found.passed
        if self.keys:
            self.check(passed.pop("authorization", ""))
            passed.pop("x-api-key", None)  # where clients of /v1/messages put the same key
        if self.key:
            passed["authorization"] = self.key
        if json and passed.get("content-type") != JSON:
            kind = passed.get("content-type", "").partition(";")[0].strip().lower()
            if kind != JSON:
                raise Rejected(415, f"Unsupported media type: send {JSON}.")

    def check(self, authorization: str) -> None:
        """Raise Rejected unless it is one of our keys; takes as long whichever it is not."""
        scheme, _, given = authorization.partition(" ")
        data = given.strip().encode("utf-8", "surrogateescape")
        # every key is compared, and compare_digest does not stop at the first difference
        right = [hmac.compare_digest(data, key) for key in self.keys]
        if scheme.lower() != "bearer" or not any(right):
            raise Rejected(
                401, "Send an API key: Authorization: Bearer KEY.", "AuthenticationError"
            )

    async def look(self, request: Body, leg: str, key: str) -> None:
        """Once the body is parsed. Raises Rejected for what is no JSON object, or no model here.

        key: the client's, for instances that ask for one to say what they have.
        """
        if not request.valid:
            raise Rejected(400, "The body is not a JSON object.")
        model = request.model
        fleet = self.legs.fleet
        if not model or fleet.knows(leg, model):
            return
        moment = clock.now()
        if moment - self._looked > AGAIN:  # it may have been loaded a moment ago
            self._looked = moment
            await asyncio.gather(*(self.legs.health.learn(each, key) for each in fleet.get(leg)))
        if not fleet.knows(leg, model):
            message = f"The model `{model[:256]}` does not exist."
            raise Rejected(404, message, "NotFoundError", param="model")
