# SPDX-License-Identifier: Apache-2.0
"""TLS to instances and to the API server, by PEM files that may be replaced while the router runs.

command.py and sources.py name the files; connection_pool.py asks before it opens a connection.
"""

from __future__ import annotations

import logging
import os
import ssl
from typing import Final

import aiohttp

log: Final = logging.getLogger("ttft_otel")


class ClientTls:
    """What new connections trust and show. Raises OSError, as SSLError is one, for files that cannot be used.

    Args:
        ca: File of the authorities that are trusted, "" for the system's.
        certificate: File of our own certificate, "" for none.
        key: File of its key, "" where it stands in the same file.
        name: What certificates must be for, "" for the host of the URL.
    """

    def __init__(self, ca: str = "", certificate: str = "", key: str = "", name: str = "") -> None:
        self._ca, self._certificate, self._key, self._name = ca, certificate, key, name
        self._files = [each for each in (ca, certificate, key) if each]
        self._stamps = self._read_stamps()
        self._context = self._load()

    def prepare_request(self, request: aiohttp.ClientRequest) -> aiohttp.ClientRequest:
        """What opens a connection for `request` with the files as they are now."""
        if not request.is_ssl():
            return request
        self._follow_files()
        if request.ssl is self._context:
            return request
        name = self._name or None
        return aiohttp.ClientRequest(
            request.method, request.url, loop=request.loop, ssl=self._context, server_hostname=name
        )

    def _follow_files(self) -> None:
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        # Also where they cannot be used: once they can, they have changed again.
        self._stamps = stamps
        files = ", ".join(self._files)
        try:
            # A new one, as a context cannot forget an authority.
            self._context = self._load()
        except OSError as error:
            log.error(
                "ttft-otel: %s cannot be used (%s): connections go on with what was there before",
                files,
                error,
            )
        else:
            log.warning("ttft-otel: new connections use %s, which was replaced", files)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca or None)
        if self._certificate:
            # With a password, as OpenSSL would ask the terminal for one.
            context.load_cert_chain(self._certificate, self._key or None, password="")
        return context

    def _read_stamps(self) -> list[tuple[int, ...]]:
        return [_read_stamp(each) for each in self._files]


def _read_stamp(path: str) -> tuple[int, ...]:
    """What differs once the file at `path`, or a link on the way to it, was replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
