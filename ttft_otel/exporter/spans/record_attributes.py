# SPDX-License-Identifier: Apache-2.0
"""Which attributes the spans of a Record have; used by span_writer.py and by its reference in tests."""

from __future__ import annotations

from functools import lru_cache

from ttft_otel.exporter.spans.attribute_writer import MAX_CACHED_PARTS
from ttft_otel.model import names, stages
from ttft_otel.model.record import Attributes, Call, Record, Server, Ttft

_name_stage_attribute = lru_cache(MAX_CACHED_PARTS)(names.name_stage_attribute)


def list_shared_attributes(record: Record) -> Attributes:
    """Attributes of all spans of the record."""
    return {names.ROLE: record.role, names.OUTERMOST: record.outermost}


def list_identity_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of both the server span and the `ttft` span. shared: list_shared_attributes() of it."""
    own: Attributes = shared | {names.REQUEST_ID: record.request_id}
    if record.rank >= 0:
        own[names.RANK] = record.rank
    return own | record.attributes


def list_stage_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of stage spans: also model and error, because metrics are made per span."""
    own = dict(shared)
    if names.MODEL in record.attributes:
        own[names.MODEL] = record.attributes[names.MODEL]
    if record.ttft and record.ttft.error:
        own[names.ERROR_TYPE] = record.ttft.error
    return own


def list_totals(ttft: Ttft) -> Attributes:
    """The complete partition as attributes of one span: backends cannot add up over child spans."""
    total = ttft.end - ttft.start
    totals: Attributes = {
        _name_stage_attribute(stage): length for stage, length in ttft.stages.items()
    }
    totals[names.UNATTRIBUTED_US] = ttft.unattributed
    totals[names.CLAMPED_US] = ttft.clamped
    totals[names.TOTAL_US] = total
    if ttft.error:
        totals[names.ERROR_TYPE] = ttft.error
    elif ttft.name == names.TTFT and ttft.attributes.get(names.STREAMING):
        totals[names.FIRST_CHUNK] = total / 1e6  # by convention of streams; ours is on all
    if ttft.died:
        totals[names.DIED_IN] = ttft.died
    return totals


def list_outcome(http: Server | Call) -> Attributes:
    """Status code and `error.type`; by the HTTP conventions a server fails from 500, a client from 400."""
    attributes: Attributes = {}
    if http.status:
        attributes[names.HTTP_STATUS] = http.status
    error = http.error
    if not error and http.status >= (400 if isinstance(http, Call) else 500):
        error = str(http.status)
    if error:
        attributes[names.ERROR_TYPE] = error
    return attributes


def list_kind_attributes(kind: str, name: str) -> Attributes:
    """`ttft.stage` or `ttft.part` of a piece, and its leg on a router's stage."""
    if kind == "stage":
        leg = "" if name in stages.ROUTER_STAGES else stages.split_stage(name)[0]
        found: Attributes = {names.STAGE: name}
        return found | {names.LEG: leg} if leg else found
    return {names.PART: name} if kind == "part" else {}
