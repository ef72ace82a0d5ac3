# SPDX-License-Identifier: Apache-2.0
"""Which instances workers have: orders that one of them got, and all of it for a worker that is new."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from ttft_otel.router.control.admin import apply_order
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.workers.messages import Order

REGISTER: Final = "register"
DEREGISTER: Final = "deregister"

log: Final = logging.getLogger("ttft_otel")


class Member(msgspec.Struct, array_like=True):
    """One instance of a worker's pool."""

    leg: str
    url: str
    is_draining: bool


class Roster(msgspec.Struct, array_like=True):
    """A worker's instances, and the roles of those that registered, by URL."""

    members: list[Member]
    roles: dict[str, str]


def follow_order(app: RouterApp, order: Order) -> None:
    """Do what another worker was asked for, and did."""
    # Not by the handlers, whose listeners would tell the others once more.
    try:
        if order.action == REGISTER and app.registrations is not None:
            app.registrations.register_instance(order.leg, order.url)
        elif order.action == DEREGISTER and app.registrations is not None:
            app.registrations.deregister_instance(order.url)
        else:
            instance = parse_instance_url(order.url, order.leg)
            apply_order(app.endpoint.upstream.pool, order.action, instance)
    # This worker may have other instances for a moment: one order must not end it.
    except (RequestRejected, ValueError) as error:
        log.warning(
            "ttft-otel: %s of %s, which another worker did, failed here: %s",
            order.action,
            order.url,
            error,
        )


def encode_roster(app: RouterApp) -> bytes:
    """This worker's roster."""
    roles = {} if app.registrations is None else app.registrations.list_roles()
    members = [
        Member(each.leg, each.url, each.state == "draining") for each in app.endpoint.upstream.pool
    ]
    return msgspec.msgpack.encode(Roster(members, roles))


def apply_roster(app: RouterApp, data: bytes) -> None:
    """Have the instances of another worker's roster: operators' orders are in no configuration."""
    roster = msgspec.msgpack.decode(data, type=Roster)
    pool = app.endpoint.upstream.pool
    # Registered ones first, by role: these are swept when they stay away.
    for url, role in roster.roles.items():
        follow_order(app, Order(REGISTER, role, url))
    for member in roster.members:
        instance = pool.find_instance(member.leg, member.url)
        # Not registered: an operator added it.
        if instance is None:
            instance = parse_instance_url(member.url, member.leg)
            pool.add_instance(instance)
        if member.is_draining:
            pool.set_draining(instance, True)
    # What goes comes last, so that no leg is empty in between.
    kept = {(member.leg, member.url) for member in roster.members}
    for instance in list(pool):
        if (instance.leg, instance.url) not in kept:
            pool.remove_instance(instance)
