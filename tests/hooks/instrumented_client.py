# SPDX-License-Identifier: Apache-2.0
"""A client with OpenAI's package that another product instruments, for test_coexistence.py: PRODUCT URL."""

from __future__ import annotations

import importlib
import sys

import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

product, url = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
importlib.import_module(product).OpenAIInstrumentor().instrument()
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
client.completions.create(model="model", prompt="a prompt")
