# SPDX-License-Identifier: Apache-2.0
"""Which request bodies vLLM's own protocol models accept, for test_json_bodies.py; no server runs.

A process of its own, as importing vLLM takes seconds and leaves much behind. On standard input: a line
with the path and the number of bytes, then the body. On standard output a line: "yes", or why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ACCEPTED = "yes"
_READY = "ready"  # vLLM writes lines of its own while it is imported


def _build_validators() -> Mapping[str, Callable[[Any], Any]]:
    from pydantic import TypeAdapter
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest

    return {
        "/v1/chat/completions": ChatCompletionRequest.model_validate,
        "/v1/completions": CompletionRequest.model_validate,
        "/v1/responses": ResponsesRequest.model_validate,
        "/v1/embeddings": TypeAdapter(EmbeddingRequest).validate_python,
    }


def judge_bodies() -> None:
    """Answer until standard input ends."""
    validators = _build_validators()
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    while line := sys.stdin.buffer.readline():
        path, size = line.split()
        data = sys.stdin.buffer.read(int(size))
        try:
            fields = json.loads(data)  # as starlette does for FastAPI
            if not isinstance(fields, dict):
                raise TypeError("no object")
            validators[path.decode()](fields)
            verdict = ACCEPTED
        except Exception as error:  # noqa: BLE001  its validators raise anything, RecursionError too
            verdict = type(error).__name__
        sys.stdout.write(f"{verdict}\n")
        sys.stdout.flush()


class VllmOracle:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        while (line := self._read_line()) != _READY:
            assert line is not None

    def accepts(self, path: str, data: bytes) -> bool:
        """Whether vLLM's model of this path takes `data` for a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%b %d\n%b" % (path.encode(), len(data), data))
        self._process.stdin.flush()
        return self._read_line() == ACCEPTED

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "vLLM's process has ended"
        return line.decode().strip()


@contextlib.contextmanager
def run_oracle() -> Iterator[VllmOracle]:
    """Run it; vLLM must be installed."""
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "TTFT_OTEL": "0"}
    with subprocess.Popen(
        (sys.executable, "-m", "attack.vllm_oracle"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **own, "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as process:
        try:
            yield VllmOracle(process)
        finally:
            process.kill()


if __name__ == "__main__":
    judge_bodies()
