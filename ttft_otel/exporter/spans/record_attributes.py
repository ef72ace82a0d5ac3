# SPDX-License-Identifier: Apache-2.0
"""Which attributes the spans of a Record have; used by span_writer.py and by its reference in tests."""

from __future__ import annotations

from functools import lru_cache

from ttft_otel.exporter.spans.attribute_writer import MAX_CACHED_PARTS
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Call, Record, Server, Ttft

_name_stage_attribute = lru_cache(MAX_CACHED_PARTS)(keys.name_stage_attribute)


def list_shared_attributes(record: Record) -> Attributes:
    """Attributes of all spans of the record."""
    return {keys.ROLE: record.role, keys.OUTERMOST: record.outermost}


def list_identity_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of both the server span and the `ttft` span. shared: list_shared_attributes() of it."""
    own: Attributes = shared | {keys.REQUEST_ID: record.request_id}
    if record.rank >= 0:
        own[keys.RANK] = record.rank
    return own | record.attributes


def list_stage_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of stage spans: also model and error, because metrics are made per span."""
    own = dict(shared)
    if keys.MODEL in record.attributes:
        own[keys.MODEL] = record.attributes[keys.MODEL]
    if record.ttft and record.ttft.error:
        own[keys.ERROR_TYPE] = record.ttft.error
    return own


def list_totals(ttft: Ttft) -> Attributes:
    """The complete partition as attributes of one span: backends cannot add up over child spans."""
    total = ttft.end - ttft.start
    totals: Attributes = {
        _name_stage_attribute(stage): length for stage, length in ttft.stages.items()
    }
    totals[keys.UNATTRIBUTED_US] = ttft.unattributed
    totals[keys.CLAMPED_US] = ttft.clamped
    totals[keys.TOTAL_US] = total
    if ttft.error:
        totals[keys.ERROR_TYPE] = ttft.error
    elif ttft.name == span_names.TTFT and ttft.attributes.get(keys.STREAMING):
        totals[keys.TIME_TO_FIRST_CHUNK] = total / 1e6  # by convention of streams; ours is on all
    if ttft.died:
        totals[keys.DIED_IN] = ttft.died
    return totals


def list_outcome(http: Server | Call) -> Attributes:
    """Status code and `error.type`; by the HTTP conventions a server fails from 500, a client from 400."""
    attributes: Attributes = {}
    if http.status:
        attributes[keys.HTTP_STATUS] = http.status
    error = http.error
    if not error and http.status >= (400 if isinstance(http, Call) else 500):
        error = str(http.status)
    if error:
        attributes[keys.ERROR_TYPE] = error
    return attributes


def list_kind_attributes(kind: str, name: str) -> Attributes:
    """`ttft.stage` or `ttft.part` of a piece, and its leg on a router's stage."""
    if kind == "stage":
        leg = "" if name in stages.ROUTER_STAGES else stages.split_stage(name)[0]
        found: Attributes = {keys.STAGE: name}
        return found | {keys.LEG: leg} if leg else found
    return {keys.PART: name} if kind == "part" else {}
