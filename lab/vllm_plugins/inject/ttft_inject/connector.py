# SPDX-License-Identifier: Apache-2.0
"""An EC connector that lets the scheduler wait; a server loads it by `ec_connector_module_path`."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from . import control

# Waits that are over are dropped; aborted requests stay until this many have piled up.
MAX_FINISHED_WAITS = 1024


class WaitingConnector(ECExampleConnector):  # type: ignore[misc]
    """The example connector whose items come `ec_wait` milliseconds after they were asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """No request has asked yet."""
        super().__init__(*args, **kwargs)
        self.first_asked_ns: dict[str, int] = {}
        self.finished_waits: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False until the wait of this request is over; vLLM 0.20 does not ask."""
        name = request.request_id
        if name in self.finished_waits:
            return True
        wanted = control.read_delay_s("ec_wait")
        began = self.first_asked_ns.setdefault(name, time.monotonic_ns())
        if time.monotonic_ns() - began < wanted * 1e9:
            return False
        if wanted > 0:
            control.log_delay("ec_wait", began)
        del self.first_asked_ns[name]
        self.finished_waits.add(name)
        if len(self.finished_waits) > MAX_FINISHED_WAITS:
            self.finished_waits = {name}
        return True
