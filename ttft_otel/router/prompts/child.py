# SPDX-License-Identifier: Apache-2.0
"""The process that holds tokenizers: questions on standard input, answers on standard output (worker.py).

It ends when its input does, hence with the router.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any, BinaryIO, Final

from ttft_otel.router.prompts.frames import HEAD, IDS, Ask, Told, ask, frame
from ttft_otel.router.prompts.reason import Unreadable

# Nothing here needs them, and they cost seconds and hundreds of megabytes.
HEAVY: Final = ("torch", "torchvision", "torchaudio", "tensorflow", "flax", "jax")
PATIENCE: Final = 10  # seconds for a prompt, then it ends itself: the router may be gone
ROOM: Final = 8 << 30  # bytes of address space: a prompt shall not take the machine's


def main() -> None:
    """Answer until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is meant for the router
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for name in HEAVY:
        sys.modules[name] = None  # type: ignore[assignment]
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what libraries print is no answer, nor do they read our questions
    serve(*pipes)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """One after the other."""
    models: dict[str, Any] = {}
    while len(head := questions.read(HEAD)) == HEAD:
        question = ask.decode(questions.read(int.from_bytes(head, "big")))
        answers.write(frame(answer(question, models)))
        answers.flush()


def answer(question: Ask, models: dict[str, Any]) -> Told:
    """Whatever goes wrong, an answer."""
    try:
        if not question.path:
            return _load(question, models)
        signal.alarm(PATIENCE)
        if question.source not in models:
            return Told(question.number, "load")  # it was loaded in an earlier child
        told: Told = models[question.source].read(question)
        return told
    except Unreadable as error:
        return Told(question.number, error.reason)
    except Exception:  # noqa: BLE001 - what the engine refuses in its own words
        return Told(question.number, "malformed")
    finally:
        signal.alarm(0)


def _load(question: Ask, models: dict[str, Any]) -> Told:
    try:
        from ttft_otel.router.prompts.model import Ids, Model

        source = question.source
        models[source] = Ids() if source == IDS else Model(source)
    except ImportError as error:
        missing = f"{error.name or error} is not here; pip install 'ttft-otel[router]'"
        return Told(question.number, "load", missing)
    except Exception as error:  # noqa: BLE001 - any library's, of any file
        lines = str(error).strip().splitlines() or [type(error).__name__]
        detail = f"cannot load the tokenizer of {question.source!r}: {lines[0][:300]}"
        remedy = "give its folder with --tokenizer DIR or use --tokenize engine"
        return Told(question.number, "load", f"{detail}; {remedy}")
    return Told(question.number)


if __name__ == "__main__":
    main()
