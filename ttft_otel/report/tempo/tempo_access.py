# SPDX-License-Identifier: Apache-2.0
"""Tempo's address and credentials, and the errors of its client; tempo_client.py and its callers use both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from yarl import URL

from ttft_otel.report.store.database_schema import StoreError

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class TempoError(StoreError):
    """Tempo did not answer, or not completely; the text says why and what to do."""


class RangeTooLongError(TempoError):
    """The search's window is longer than this Tempo allows; a part of it may be asked for."""


class LimitTooHighError(TempoError):
    """The search's limit is above `allowed`, the highest that this Tempo takes."""

    def __init__(self, message: str, allowed: int) -> None:
        super().__init__(message)
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class TempoAccess:
    """Tempo's address, and what is needed to be let in.

    headers: sent with every request, never printed. ca_file: of a private CA. timeout_s: for one answer.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 30.0

    @property
    def shown_url(self) -> str:
        """The URL without the credentials that it may have."""
        url = URL(self.url)
        return str(url.with_user(None)) if url.absolute else self.url

    @property
    def is_exposed(self) -> bool:
        """Whether credentials would cross a network unencrypted."""
        url = URL(self.url)
        has_secret = bool(url.user) or any(
            name.lower() not in ("x-scope-orgid", "accept") for name in self.headers
        )
        return url.scheme == "http" and url.host not in LOOPBACK_HOSTS and has_secret
