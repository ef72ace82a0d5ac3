# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache parameters: read from encoder responses, merged, added to the prefill request.

An EC connector announces in the encoder's answer where each encoding can be fetched from
(`ec_transfer_params`, an object by the item's hash). A consumer fetches only what its own request
carries. encoders.py gives the answers; endpoint.py and request_plan.py put what is made of them into a body.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from ttft_otel.router.errors import InvalidAnswer, UpstreamUnavailable

EC_PARAMS_FIELD: Final = "ec_transfer_params"
# An entry of vLLM 0.32's ECCPUConnector is about 200 bytes, with a video's timestamps some thousand.
MAX_ANSWER_BYTES: Final = 1 << 20  # bytes of one encoder's answer
MAX_PARAMS_BYTES: Final = 4 << 20  # bytes of all entries of one request
MAX_ENTRIES: Final = 4096  # entries of one request, and of one answer
MAX_NESTING_DEPTH: Final = 32  # objects and lists inside one another in one entry

T = TypeVar("T")

_EMPTY_OBJECT: Final = re.compile(rb"\s*\{\s*\}\s*")
_WHITESPACE: Final = b" \t\n\r"


class _EncoderAnswer(msgspec.Struct):
    """The only field that is read; msgspec skips the others without building objects."""

    ec_transfer_params: Raw = Raw(b"null")


_answer_decoder: Final = msgspec.json.Decoder(_EncoderAnswer)
_entries_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_any_decoder: Final = msgspec.json.Decoder()
_NO_OBJECT_MESSAGE: Final = f"its answer, or {EC_PARAMS_FIELD} in it, is not a JSON object"
_TOO_DEEP_MESSAGE: Final = f"its answer, or {EC_PARAMS_FIELD} in it, is nested too deeply"


class TransferParams:
    """The entries of all encoder answers of one request, by the hash of the item.

    What an entry holds is the connector's own and passes byte for byte, unknown keys included.
    `item_indices` too, although they count within the encoder's request, which has one item: no
    consumer of vLLM 0.32 reads them (they are written in ec_connector/utils.py and nowhere read).
    """

    __slots__ = ("_entries", "_size_bytes")

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._size_bytes = 0  # bytes

    def add_answer(self, data: bytes) -> None:
        """Add the parameters in `data`, an encoder's answer; it may have none.

        Raises InvalidAnswer, and UpstreamUnavailable where all answers of the request are too much, which
        one with very many items can cause too.

        Of two announcements of one hash the longer one stays: an encoder that has evicted the
        encoding announces the item without an address (vLLM 0.32, ec_connector/cpu/scheduler,
        request_finished), and another encoder's entry may have one.
        """
        params = _decode(_answer_decoder, data, _NO_OBJECT_MESSAGE).ec_transfer_params
        if bytes(params) == b"null":
            return
        entries = _decode(_entries_decoder, params, _NO_OBJECT_MESSAGE)
        if len(entries) > MAX_ENTRIES:
            raise InvalidAnswer(f"its {EC_PARAMS_FIELD} have more than {MAX_ENTRIES} entries")
        for mm_hash, raw in entries.items():
            entry = bytes(raw)
            if entry == b"null":
                continue
            _check_entry(entry)
            known_entry = self._entries.get(mm_hash, b"")
            if len(entry) > len(known_entry):
                self._size_bytes += (
                    len(entry) - len(known_entry) + (0 if known_entry else len(mm_hash))
                )
                self._entries[mm_hash] = entry
            if self._size_bytes > MAX_PARAMS_BYTES or len(self._entries) > MAX_ENTRIES:
                raise UpstreamUnavailable(
                    502,
                    f"The encode instances' answers cannot be used: {EC_PARAMS_FIELD} of one request "
                    f"exceed {MAX_PARAMS_BYTES} bytes or {MAX_ENTRIES} entries.",
                )

    def to_json(self) -> bytes:
        if not self._entries:
            return b""
        return msgspec.json.encode({key: Raw(entry) for key, entry in self._entries.items()})


def splice_params(body: bytes, params: bytes) -> bytes:
    """Append `params` as the last member of the JSON object `body`, without parsing it.

    Parsers take the last of equal names, so that nothing in the body can override it.
    """
    end = len(body.rstrip(_WHITESPACE)) - 1  # where the closing brace is
    comma = b"" if _EMPTY_OBJECT.fullmatch(body) else b","
    name = b'"%b":' % EC_PARAMS_FIELD.encode()
    # One copy: the body may hold megabytes of media.
    return b"".join((memoryview(body)[:end], comma, name, params, b"}"))


def _check_entry(entry: bytes) -> None:
    """Raise InvalidAnswer for an entry that is not a JSON object or that a consumer could not parse."""
    if not entry.startswith(b"{"):
        raise InvalidAnswer(f"an entry of its {EC_PARAMS_FIELD} is not a JSON object")
    # parsed in full, because msgspec does not validate what it skips
    value = _decode(_any_decoder, entry, f"a number in its {EC_PARAMS_FIELD} is out of range")
    if _measure_nesting(value) > MAX_NESTING_DEPTH:
        raise InvalidAnswer(_TOO_DEEP_MESSAGE)


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, mistyped: str) -> T:
    """Decode JSON, or raise InvalidAnswer; with the text `mistyped` where it is other JSON than wanted."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidAnswer(mistyped) from error
    except RecursionError as error:
        raise InvalidAnswer(_TOO_DEEP_MESSAGE) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidAnswer("its answer is not JSON") from error


def _measure_nesting(value: Any) -> int:
    """How many objects and lists are inside one another; stops soon after MAX_NESTING."""
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING_DEPTH:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        if any(isinstance(each, dict | list) for each in level):
            depth += 1
        level = inner
    return depth
