# SPDX-License-Identifier: Apache-2.0
"""What --discover says: one place that names instances, and how they are used; discovery.py asks it.

dns://SERVICE:PORT, dns://_PORT._tcp.SERVICE (SRV) or k8s://NAMESPACE/SELECTOR, each with options as a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from ttft_otel.model.stages import DECODE, ENCODE, MONO, PREFILL, PREFILL_DECODE

DNS_SCHEME: Final = "dns"
KUBERNETES_SCHEME: Final = "k8s"
# Words for roles: those of our own flags, and of llm-d's label.
ROLES_BY_WORD: Final = {
    ENCODE: ENCODE,
    "encoder": ENCODE,
    PREFILL: PREFILL,
    DECODE: DECODE,
    PREFILL_DECODE: PREFILL_DECODE,
    "prefill-decode": PREFILL_DECODE,
    "both": PREFILL_DECODE,
    "backend": PREFILL_DECODE,
    MONO: PREFILL_DECODE,
}
# Any other is refused: an option that is misspelt must not be left out in silence.
OPTIONS_BY_SCHEME: Final = {
    DNS_SCHEME: ("role", "nameserver"),
    KUBERNETES_SCHEME: ("role", "port"),
}


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """One --discover, parsed; `text` is how the user wrote it, for logs and /readyz.

    place: the DNS name, or the namespace. port: of instances, a number or the name of a slice's port; ""
    where the source says it. role: "" where labels say it. nameserver: IP:PORT, "" for the system's.
    """

    text: str
    scheme: str
    place: str
    selector: str = ""
    port: str = ""
    role: str = ""
    nameserver: str = ""


def parse_source_address(text: str) -> SourceAddress:
    """Parse one --discover. Raises ValueError with what to write instead."""
    parts = urlsplit(text)
    if parts.scheme not in OPTIONS_BY_SCHEME or not parts.netloc or parts.fragment:
        raise ValueError(
            f"{text!r} names no source: write dns://SERVICE:PORT or k8s://NAMESPACE/SELECTOR"
        )
    # With blank values, or `role=` would pass for no option.
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = OPTIONS_BY_SCHEME[parts.scheme]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"{text!r}: {unknown[0]!r} is not one of {', '.join(known)}")
    role = _parse_role(text, options)
    if parts.scheme == DNS_SCHEME:
        nameserver = options.get("nameserver", "")
        return _parse_dns(text, parts.netloc, parts.path, role, nameserver)
    # A selector may need escapes, for `?` and blanks.
    selector = unquote(parts.path.removeprefix("/"))
    if not selector:
        raise ValueError(
            f"{text!r} selects nothing: write the label selector of the Service's EndpointSlices, "
            "like k8s://default/kubernetes.io/service-name=vllm"
        )
    port = options.get("port", "")
    # The name of a port can only be found in the slices, a number is checked here.
    if port.isdigit():
        _check_port(text, port)
    return SourceAddress(text, KUBERNETES_SCHEME, parts.netloc, selector, port, role)


def _parse_role(text: str, options: dict[str, str]) -> str:
    if "role" not in options:
        return ""
    if options["role"] not in ROLES_BY_WORD:
        raise ValueError(
            f"{text!r}: {options['role']!r} is not a role: {', '.join(sorted(ROLES_BY_WORD))}"
        )
    return ROLES_BY_WORD[options["role"]]


def _parse_dns(text: str, netloc: str, path: str, role: str, nameserver: str) -> SourceAddress:
    name, _, port = netloc.partition(":")
    is_srv = name.startswith("_")
    # SRV records say the port, addresses do not: it has to be written for these only.
    if path.strip("/") or not name or bool(port) == is_srv:
        raise ValueError(
            f"{text!r}: write dns://SERVICE:PORT, or dns://_PORT._tcp.SERVICE for SRV records, "
            "which say the port"
        )
    if port:
        _check_port(text, port)
    if nameserver:
        # After the last colon, as the nameserver may be IPv6.
        _check_port(text, nameserver.rpartition(":")[2])
    return SourceAddress(text, DNS_SCHEME, name, "", port, role, nameserver)


def _check_port(text: str, port: str) -> None:
    # isdigit() and int() take digits of any script.
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r}: {port!r} is not a port")
