# SPDX-License-Identifier: Apache-2.0
"""An EC connector that lets the scheduler wait; a server loads it by `ec_connector_module_path`."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from . import control

# Waits that are over are dropped; aborted requests stay until this many have piled up.
LIMIT = 1024


class WaitingConnector(ECExampleConnector):  # type: ignore[misc]
    """The example connector whose items come `ec_wait` milliseconds after they were asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """No request has asked yet."""
        super().__init__(*args, **kwargs)
        self.asked: dict[str, int] = {}
        self.given: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False until the wait of this request is over; vLLM 0.20 does not ask."""
        name = request.request_id
        if name in self.given:
            return True
        wanted = control.seconds("ec_wait")
        began = self.asked.setdefault(name, time.monotonic_ns())
        if time.monotonic_ns() - began < wanted * 1e9:
            return False
        if wanted > 0:
            control.note("ec_wait", began)
        del self.asked[name]
        self.given.add(name)
        if len(self.given) > LIMIT:
            self.given = {name}
        return True
