# SPDX-License-Identifier: Apache-2.0
"""Names of the spans that we make; a stage's span has the name of its stage."""

from __future__ import annotations

from typing import Final

from ttft_otel import __version__

SCOPE: Final = "ttft_otel"  # instrumentation scope of every span of ours
# OpenTelemetry's conventions that names beside our own follow; ours are registered in semconv/.
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

# OpenTelemetry's attributes of a distribution; distro.py tells them to other SDKs, too.
DISTRO: Final = {"telemetry.distro.name": "ttft-otel", "telemetry.distro.version": __version__}

# Spans. A stage span is named after its stage.
TTFT: Final = "ttft"
ENCODE: Final = "encode"
SIBLING: Final = "ttft.sibling"
HANDOVER: Final = "ttft.handover"
# In a handover: the decode step after the decode instance has computed the prefill's token again.
FIRST_DECODE: Final = "first_decode"
KV_KEPT: Final = "ttft.kv.kept"
EC_KEPT: Final = "ttft.ec.kept"
ENCODER_RUN: Final = "ttft.encoder.run"  # of an encoder that had not ended when the answer left
