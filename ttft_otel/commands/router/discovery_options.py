# SPDX-License-Identifier: Apache-2.0
"""Flags that name sources of instances, and the discovery that they ask for; command.py uses both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options
from ttft_otel.router.discovery.discovery import Discovery, InstanceSource
from ttft_otel.router.discovery.found_instances import FoundInstances
from ttft_otel.router.discovery.source_address import (
    DNS_SCHEME,
    SourceAddress,
    parse_source_address,
)

DISCOVER_INTERVAL_S: Final = 5.0  # seconds between two questions to DNS; the TTL of cluster DNS


def add_discovery_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add the flags to a command."""
    return add_options(
        declare_option(
            "--discover",
            multiple=True,
            callback=check_sources,
            metavar="SOURCE",
            help="dns://SERVICE:PORT or k8s://NAMESPACE/SELECTOR, with ?role=ROLE; repeatable.",
        ),
        declare_option(
            "--discover-interval",
            default=DISCOVER_INTERVAL_S,
            type=click.FloatRange(0.05),
            help="Seconds between two questions to DNS, and until a source that failed is asked again.",
        ),
        declare_option(
            "--kubernetes-api",
            default="",
            metavar="URL",
            help="API server for k8s://, like that of `kubectl proxy`; by default the pod's own.",
        ),
    )


def check_sources(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return `texts`. Raises BadParameter for one that names no source."""
    for each in texts:
        try:
            parse_source_address(each)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return texts


def build_discovery(
    texts: Sequence[str], interval_s: float, api_url: str, found: FoundInstances
) -> Discovery:
    """Build the discovery of all sources. Raises UsageError for k8s:// outside a cluster."""
    addresses = [parse_source_address(each) for each in dict.fromkeys(texts)]
    try:
        sources = [_build_source(each, interval_s, api_url) for each in addresses]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Discovery(sources, found, interval_s)


def _build_source(address: SourceAddress, interval_s: float, api_url: str) -> InstanceSource:
    # Each kind is imported where it is used: dnspython costs a router without it 50 ms.
    if address.scheme == DNS_SCHEME:
        from ttft_otel.router.discovery.dns_source import DnsSource

        return DnsSource(address, interval_s)
    from ttft_otel.router.discovery.kubernetes_api import KubernetesApi, find_cluster
    from ttft_otel.router.discovery.kubernetes_source import KubernetesSource

    api = KubernetesApi(find_cluster(api_url), address.place, address.selector)
    return KubernetesSource(address, api)
