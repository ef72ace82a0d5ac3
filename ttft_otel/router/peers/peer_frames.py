# SPDX-License-Identifier: Apache-2.0
"""What replicas of a router tell one another, in MessagePack: load counts, and nothing of a request.

told_loads.py makes frames, peer_books.py reads them. Every number has a bound, which the decoder checks: a
replica is believed about how much it sent where, and about nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

# Datagrams that no network between two hosts has to cut in pieces (the least MTU of IPv6, less headers).
MAX_FRAME_BYTES: Final = 1200
MAX_URL_CHARS: Final = 512  # instances with longer URLs are not told
MAX_PARTS: Final = 512  # frames of one statement
# Bytes that are reserved for a frame's own fields, and what one item of each kind takes at most.
_FRAME_BYTES: Final = 96
_PLACE_BYTES: Final = 24  # beside leg and URL
_REQUEST_BYTES: Final = 33
_NUMBER_BYTES: Final = 9

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL_CHARS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]  # requests in flight
Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Pairs = Annotated[int, msgspec.Meta(ge=0, le=10**14)]
AgeUs = Annotated[int, msgspec.Meta(ge=0, le=3_600_000_000)]
PartCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTS)]


# array_like: the names of fields would be most of the bytes.
class PeerRequest(msgspec.Struct, array_like=True, frozen=True):
    """An attempt without a first token. number: counts the sender's attempts. age_us: since it was sent."""

    number: Number
    age_us: AgeUs
    tokens_to_compute: Tokens
    pairs: Pairs


class PeerPlace(msgspec.Struct, array_like=True, frozen=True):
    """What the sender has at one instance: requests in flight, ever sent, and without a first token."""

    leg: Name
    url: Url
    in_flight: Amount
    arrivals: Number
    requests: tuple[PeerRequest, ...] = ()


class PeerFrame(msgspec.Struct, array_like=True, frozen=True):
    """One datagram of process `sender` of a `replica`, its `sequence`th.

    time_ms: Unix time. parts: 0 for what has changed; else these are all of the frames of a statement of
    everything under way, this one being the `part`th from 0, and no attempt up to number `covered` is
    without a first token but those in them. ended: numbers of attempts that have theirs, or none to come.
    """

    replica: Name
    sender: Name
    sequence: Number
    time_ms: Number
    parts: PartCount = 0
    part: PartCount = 0
    covered: Number = 0
    places: tuple[PeerPlace, ...] = ()
    ended: tuple[Number, ...] = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(PeerFrame)


def encode_peer_frame(frame: PeerFrame) -> bytes:
    """The bytes of a datagram, before they are sealed."""
    return _ENCODER.encode(frame)


def decode_peer_frame(data: bytes) -> PeerFrame:
    """The frame in these bytes. Raises msgspec.MsgspecError for anything else."""
    return _DECODER.decode(data)


def split_load(
    places: Iterable[PeerPlace], ended: Iterable[int] = ()
) -> Iterator[tuple[tuple[PeerPlace, ...], tuple[int, ...]]]:
    """Cut into parts that each fit into a frame; at least one, which may be empty."""
    chosen: list[PeerPlace] = []
    used = _FRAME_BYTES
    for place in places:
        head_bytes = _PLACE_BYTES + len(place.leg.encode()) + len(place.url.encode())
        rest = place.requests
        while True:
            # With one request at least, or a place with many would never get on.
            if used + head_bytes + min(len(rest), 1) * _REQUEST_BYTES > MAX_FRAME_BYTES and chosen:
                yield tuple(chosen), ()
                chosen, used = [], _FRAME_BYTES
            fitting = max(1, (MAX_FRAME_BYTES - used - head_bytes) // _REQUEST_BYTES)
            chosen.append(msgspec.structs.replace(place, requests=rest[:fitting]))
            used += head_bytes + len(rest[:fitting]) * _REQUEST_BYTES
            rest = rest[fitting:]
            if not rest:
                break
    numbers = tuple(ended)
    fitting = max(0, (MAX_FRAME_BYTES - used) // _NUMBER_BYTES)
    yield tuple(chosen), numbers[:fitting]
    step = (MAX_FRAME_BYTES - _FRAME_BYTES) // _NUMBER_BYTES
    for begin in range(fitting, len(numbers), step):
        yield (), numbers[begin : begin + step]
