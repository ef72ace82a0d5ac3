# SPDX-License-Identifier: Apache-2.0
"""Flags about replicas of the router on other hosts, and what joins them; command.py uses both."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options
from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.router.discovery.source_address import (
    DNS_SCHEME,
    SourceAddress,
    parse_source_address,
)

if TYPE_CHECKING:
    from ttft_otel.router.peers.peer_link import LonePeerLink, PeerLink, PeerSettings
    from ttft_otel.router.routing.routing_service import RoutingService
    from ttft_otel.router.upstream.instance_pool import InstancePool
    from ttft_otel.router.workers.worker_link import WorkerLink


def add_peer_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add the flags to a command."""
    return add_options(
        declare_option(
            "--peers",
            default="",
            callback=check_peers,
            metavar="SOURCE",
            help="dns://SERVICE:PORT, the other replicas, with which load is shared by UDP on that port.",
        ),
        declare_option(
            "--peers-key-file",
            default="",
            metavar="FILE",
            help="Keys that all replicas have, one a line: the first one signs, each is accepted.",
        ),
        declare_option(
            "--peers-host",
            default="",
            metavar="HOST",
            help="The address to listen on for other replicas; by default --host.",
        ),
    )


def parse_peers(text: str) -> SourceAddress:
    """Parse --peers. Raises ValueError with what to write instead."""
    address = parse_source_address(text)
    if address.scheme != DNS_SCHEME or not address.port or address.role:
        raise ValueError(f"{text!r}: write dns://SERVICE:PORT, with ?nameserver=IP:PORT or nothing")
    return address


def check_peers(_: click.Context, __: click.Parameter, text: str) -> str:
    """Return `text`. Raises BadParameter if it names no replicas."""
    if text:
        try:
            parse_peers(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return text


def build_peer_settings(options: RouterOptions, replica: str = "") -> PeerSettings | None:
    """What --peers says, None without it. replica: what all workers of one router call it.

    Raises UsageError, with the remedy.
    """
    if not options.peers:
        if options.peers_key_file or options.peers_host:
            raise click.UsageError("--peers-key-file and --peers-host need --peers.")
        return None
    if not options.peers_key_file:
        raise click.UsageError(
            "--peers needs --peers-key-file FILE: whoever can send to its port could else tell any load."
        )
    # dnspython costs a router without it 50 ms.
    from ttft_otel.router.peers.peer_link import PeerSettings
    from ttft_otel.router.peers.peer_seal import read_keys

    try:
        keys = read_keys(options.peers_key_file)
    except ValueError as error:
        raise click.UsageError(f"--peers-key-file: {error}") from error
    host = options.peers_host or options.host
    return PeerSettings(parse_peers(options.peers), keys, host, replica or secrets.token_hex(8))


def build_lone_link(
    options: RouterOptions, pool: InstancePool, routing: RoutingService
) -> LonePeerLink | None:
    """What joins a router without --workers to its peers; None without --peers. Raises UsageError."""
    settings = build_peer_settings(options)
    # Workers have one each (worker_processes.py); here it is only checked.
    if settings is None or options.workers > 1:
        return None
    from ttft_otel.router.peers.peer_link import LonePeerLink

    return LonePeerLink(settings, pool, routing)


def build_worker_link(options: RouterOptions, link: WorkerLink) -> PeerLink | None:
    """What joins one of several workers to peers; None without --peers. Raises UsageError."""
    settings = build_peer_settings(options, link.seat.replica)
    if settings is None:
        return None
    from ttft_otel.router.peers.peer_link import PORT_SEAT, PeerLink
    from ttft_otel.router.workers.load_counts import CountReader

    seat, loads = link.seat, link.loads
    has_port = seat.number == PORT_SEAT
    peers = PeerLink(
        *(settings, link.pool, loads.own, loads.siblings, CountReader(seat.counts, seat.number)),
        has_port,
        loads.pass_on if has_port else None,
    )
    loads.take_from_replica = peers.take_body
    link.app.metrics.collect_peers = peers.collect_metrics
    return peers
