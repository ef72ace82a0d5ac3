# SPDX-License-Identifier: Apache-2.0
"""Which role a server has in a request, and who is outermost: one span per request behind any router."""

from __future__ import annotations

import pytest

from ttft_otel.model.stages import ROLES
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity, is_outermost, resolve_role
from ttft_otel.tracing.settings import Settings

pytestmark = pytest.mark.usefixtures("blank_identity", "no_state_left")


def make_trace(leg: str = "", request_role: str = "") -> RequestTrace:
    """A trace with this leg header and this role from its transfer parameters."""
    made = RequestTrace(1000, start_context("", "", Settings(on=True)), False)
    made.leg, made.request_role = leg, request_role
    return made


@pytest.mark.parametrize(
    ("configured", "leg", "request_role", "role"),
    [
        ("", "", "", "mono"),
        ("", "decode", "", "decode"),
        ("", "", "prefill", "prefill"),
        ("", "decode", "prefill", "decode"),
        ("mono", "prefill", "", "prefill"),
        ("encode", "prefill", "decode", "encode"),
        ("decode", "", "prefill", "decode"),
    ],
)
def test_configuration_then_header_then_request(
    configured: str, leg: str, request_role: str, role: str
) -> None:
    """Configuration counts first; where it cannot tell, the router's word; then the request's own."""
    identity.role = configured

    assert resolve_role(make_trace(leg, request_role)) == role


@pytest.mark.parametrize("role", [each for each in ROLES if each != "router"])
def test_only_who_answers_the_client_is_outermost(role: str) -> None:
    """Encoders and prefill instances feed another one: theirs is not the client's first token."""
    identity.role = role

    assert is_outermost(make_trace()) == (role in ("decode", "prefill_decode", "mono"))
