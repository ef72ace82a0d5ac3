# SPDX-License-Identifier: Apache-2.0
"""What the router accepts of clients and instances, and how long it waits for them.

Each field is a flag of `ttft-otel router` (commands/router/router_options.py declares it) and a row of
docs/reference/limits.md (docs/generate_reference.py writes it); the rooms get the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def declare_limit(default: float, text: str, answer: str, minimum: float = 1) -> Any:
    """Declare a limit: an int is a number or bytes, a float is seconds.

    text: help of the flag, with the unit. answer: what a request beyond it gets, for the table.
    minimum: the least value that the flag accepts; 0 where 0 means no limit.
    """
    return field(default=default, metadata={"text": text, "answer": answer, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """The values of all limits, one field per flag, named after it."""

    # Of clients: control/uvicorn_server.py and proxy/admission.py.
    max_connections: int = declare_limit(
        10_000,
        "Open connections of clients; fewer if the limit of file descriptors demands it.",
        "503",
    )
    # RFC 9112 section 3 recommends that request lines of at least 8000 octets are supported.
    max_target: int = declare_limit(
        8_000, "Bytes of a request's target: its path with the query.", "414"
    )
    max_headers: int = declare_limit(256, "Headers of a request, and trailers.", "431")
    max_header_bytes: int = declare_limit(
        65_536, "Bytes of a request's headers together.", "431", minimum=1024
    )
    head_timeout: float = declare_limit(
        20.0, "Seconds for a request's target and headers to arrive.", "408", minimum=0.1
    )
    # 64 MiB: media come as base64, which makes a third more of them.
    max_body: int = declare_limit(67_108_864, "Bytes of a request body.", "413")
    body_timeout: float = declare_limit(
        60.0, "Seconds for a request body to arrive.", "408", minimum=0.1
    )
    send_timeout: float = declare_limit(
        300.0,
        "Seconds for a client to read anything of an answer that waits for it.",
        "the connection ends",
        minimum=1,
    )
    # Sixteen bodies of the largest size; each stays until the instance that answers the client does.
    max_bodies: int = declare_limit(
        1_073_741_824, "Bytes of all request bodies together that the router holds.", "503"
    )
    max_held: int = declare_limit(
        1024, "Requests that --max-queue-ms holds, in each worker; the last one is refused.", "429"
    )
    max_key_requests: int = declare_limit(
        0, "Requests of one API key under way, in each worker; 0: any number.", "429", minimum=0
    )
    max_key_rate: int = declare_limit(
        0, "Requests of one API key a second, in each worker; 0: any number.", "429", minimum=0
    )
    max_key_bytes: int = declare_limit(
        0, "Of --max-bodies, those of one API key, in each worker; 0: all.", "429", minimum=0
    )

    # Of instances, and of work that one request makes: upstream/ and disagg/.
    max_items: int = declare_limit(
        128,
        "Different media items of a request; each is a call to an encoder, where there are encoders.",
        "400",
    )
    first_byte_timeout: float = declare_limit(
        600.0,
        "Seconds for an instance to begin its answer, queue and prefill included; 0: any time.",
        "504",
        minimum=0,
    )
    # Unlimited by default: a long generation is no fault, an engine that never begins is one.
    total_timeout: float = declare_limit(
        0.0,
        "Seconds for an instance's whole answer; 0: any time.",
        "504; a stream that has begun is cut",
        minimum=0,
    )
    # As long as the first byte may take: a request that is preempted computes its prompt anew.
    idle_timeout: float = declare_limit(
        600.0,
        "Seconds, at most twice as many, without a byte of an answer that has begun; 0: any time.",
        "what came, cut",
        minimum=0,
    )
    max_answer_header_bytes: int = declare_limit(
        65_536, "Bytes of one header of an instance's answer.", "502", minimum=1024
    )
    breaker_trial: float = declare_limit(
        10.0,
        "Seconds for which the first request after a circuit breaker's pause keeps others away.",
        "the next request is let in, too",
        minimum=0.1,
    )
