# SPDX-License-Identifier: Apache-2.0
"""HOT: which role this server has for a request, and whether its span is the request's outermost one.

hooks/api_server.py fills `identity` from vLLM's configuration and RequestTrace.request_role from the
request; recorder.py and asgi.py read the result. Reasons: docs/adr/013-outermost-behind-any-router.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ttft_otel.model import stages
from ttft_otel.tracing.request_trace import RequestTrace


@dataclass(slots=True)
class ServerIdentity:
    """This server's role and connectors; filled from vLLM's configuration when it starts.

    role: "" where each request decides (kv_both, ec_both).
    default_role: then, the role of a request without transfer parameters.
    kv_connector, ec_connector: names of the KV and encoder-cache connectors, "" without one.
    takes_encodings: whether the encoder-cache connector takes encodings from other instances.
    is_known: whether a configuration was read.
    can_see_outputs: whether the hooks that notice a request's first output are installed; can_see_ends: and
    the one that notices its last.
    """

    role: str = ""
    default_role: str = "mono"
    model: str = ""
    kv_connector: str = ""
    ec_connector: str = ""
    takes_encodings: bool = False
    is_known: bool = False
    # Given by the hooks, because this module must not import them.
    can_see_outputs: Callable[[], bool] = lambda: True
    can_see_ends: Callable[[], bool] = lambda: True


# One per process and filled in place: modules hold it before the server's start fills it.
identity: Final = ServerIdentity()


def resolve_role(trace: RequestTrace) -> str:
    """The role of this server for one request; asked for once its parameters are read, and kept in the trace.

    vLLM's configuration decides; where it leaves the role open, the router's header, then the
    request's transfer parameters. A header also overrides `mono`, which is what a server without
    any connector looks like.
    """
    if not trace.role:
        # TTFT_OTEL_ROLE and connector roles are in `identity.role`.
        if identity.role and not (identity.role == "mono" and trace.leg):
            trace.role = identity.role
        else:
            trace.role = trace.leg or trace.request_role or identity.default_role
    return trace.role


def is_outermost(trace: RequestTrace) -> bool:
    """Whether the client gets its first token from this server, as far as the server can know.

    With an `x-ttft-leg` header the router that sent it is the outermost. Without one there may still
    be a foreign router: encoders and prefill instances are never outermost, because a router does
    not relay their answers to the client.
    """
    return not trace.leg and resolve_role(trace) not in stages.INTERMEDIATE_ROLES
