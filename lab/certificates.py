# SPDX-License-Identifier: Apache-2.0
"""Certificates by openssl, signed by themselves or by an authority: for servers of tests and of a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path


def run_openssl(*words: str | Path) -> None:
    """Run it; what it says is only shown if it fails."""
    subprocess.run(("openssl", *map(str, words)), check=True, capture_output=True)


def make_certificate(
    folder: Path, names: str = "IP:127.0.0.1", stem: str = "tls"
) -> tuple[Path, Path]:
    """Write a certificate for these subject names, and its key: `stem`.crt and `stem`.key in `folder`."""
    certificate, key = folder / f"{stem}.crt", folder / f"{stem}.key"
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ttft-otel-test")
    extension = ("-addext", f"subjectAltName={names}")
    run_openssl("req", *words, *extension, "-keyout", key, "-out", certificate)
    return certificate, key


def sign_certificate(
    authority: tuple[Path, Path], stem: str, names: str = "IP:127.0.0.1", days: int = 2
) -> tuple[Path, Path]:
    """As make_certificate(), beside the authority that signs it; of less than no `days` it has expired."""
    (signer, signer_key), folder = authority, authority[0].parent
    certificate, key, asked = (folder / f"{stem}.{end}" for end in ("crt", "key", "csr"))
    words = ("-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={stem}")
    extension = ("-addext", f"subjectAltName={names}")
    run_openssl("req", "-new", *words, *extension, "-keyout", key, "-out", asked)
    signed_by = ("-CA", signer, "-CAkey", signer_key, "-CAcreateserial")
    copied = ("-copy_extensions", "copy", "-days", str(days))
    run_openssl("x509", "-req", "-in", asked, *signed_by, *copied, "-out", certificate)
    return certificate, key
