# SPDX-License-Identifier: Apache-2.0
"""What OpenTelemetry's auto-instrumentation loads: `opentelemetry-instrument vllm serve` is TTFT_OTEL=1.

The entry points are in pyproject.toml; opentelemetry-instrument, which has the package that is imported
here, calls them in each Python process before the program. They only set variables: plugin.py reads them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.instrumentation.environment_variables import (
    OTEL_PYTHON_CONFIGURATOR,
    OTEL_PYTHON_DISTRO,
)
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.sdk.resources import Resource, ResourceDetector

from ttft_otel.model.names import env_names, keys
from ttft_otel.model.names.span_names import DISTRO

# Of all entry points of ours but the instrumentor, which has the name of its library.
NAME: Final = "ttft_otel"
CONFIGURATORS: Final = "opentelemetry_configurator"


class TtftOtelDistro(BaseDistro):  # type: ignore[misc] # the package has no types
    """The distribution of OTEL_PYTHON_DISTRO=ttft_otel: our exporter process sends, no SDK is set up."""

    def _configure(self, **kwargs: Any) -> None:
        # Else the first configurator that is installed would start the SDK's threads in all processes.
        os.environ.setdefault(OTEL_PYTHON_CONFIGURATOR, NAME)


def choose_distro() -> BaseDistro | None:
    """Our distribution if OTEL_PYTHON_DISTRO asks for it; else None, so that another one is looked for.

    Without a name in that variable the first one found is taken: to be installed must not be enough.
    """
    return TtftOtelDistro() if os.environ.get(OTEL_PYTHON_DISTRO) == NAME else None


class TtftOtelConfigurator:
    """Sets up no SDK where our distribution was asked for; else leaves it to the next configurator."""

    def configure(self, **kwargs: Any) -> None:
        """Called by opentelemetry-instrument; `kwargs` are passed on."""
        if os.environ.get(OTEL_PYTHON_CONFIGURATOR) == NAME:
            return
        # It takes the first one that it finds and no other.
        for point in importlib.metadata.entry_points(group=CONFIGURATORS):
            if point.name != NAME:
                point.load()().configure(**kwargs)
                return


class VllmInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Switches tracing on in processes of vLLM that start from now on, as TTFT_OTEL=1 does.

    Whoever has set TTFT_OTEL, also to 0, has decided.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: hooks install themselves as vLLM's modules are imported, whatever its package is called."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        self._is_ours = env_names.TTFT_OTEL not in os.environ
        os.environ.setdefault(env_names.TTFT_OTEL, "1")

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._is_ours:
            os.environ.pop(env_names.TTFT_OTEL, None)


class VllmResourceDetector(ResourceDetector):
    """What is known of a vLLM server as its process starts; OTEL_EXPERIMENTAL_RESOURCE_DETECTORS names it."""

    def detect(self) -> Resource:
        """Our distribution, and the model that the command line names."""
        model = find_served_model(sys.argv)
        return Resource({**DISTRO, keys.MODEL: model} if model else DISTRO)


def find_served_model(words: Sequence[str]) -> str:
    """The model in the words of `vllm serve`, under the name that clients ask for; "" for another program."""
    if "serve" not in words[1:2]:
        return ""
    values = dict[str, str]()
    for word, following in itertools.zip_longest(words[2:], words[3:], fillvalue=""):
        flag, equals, value = word.partition("=")
        values[flag] = value if equals else following
    positional = next((word for word in words[2:3] if not word.startswith("-")), "")
    found = values.get("--served-model-name") or positional or values.get("--model", "")
    # Bytes of a command line that are no text are surrogates here, which an exporter cannot encode.
    return found.encode("utf-8", "replace").decode()
