# SPDX-License-Identifier: Apache-2.0
"""Certificates that sign themselves, made by openssl: for servers of tests and of a cluster under test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(
    folder: Path, names: str = "IP:127.0.0.1", stem: str = "tls"
) -> tuple[Path, Path]:
    """Write a certificate for these subject names, and its key: `stem`.crt and `stem`.key in `folder`."""
    certificate, key = folder / f"{stem}.crt", folder / f"{stem}.key"
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ttft-otel-test")
    extension = ("-addext", f"subjectAltName={names}")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(("openssl", "req", *words, *extension, *files), check=True, capture_output=True)
    return certificate, key
