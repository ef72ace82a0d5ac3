# SPDX-License-Identifier: Apache-2.0
"""The child process that holds tokenizers: reads questions on stdin, writes answers on stdout.

tokenizer_worker.py starts it. It exits at the end of its input, so it does not outlive the router.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any, BinaryIO, Final

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts.child_frames import (
    LENGTH_BYTES,
    TokenizeAnswer,
    TokenizeQuestion,
    frame_message,
    question_decoder,
)

# transformers imports these if present; nothing here needs them, and they take seconds and hundreds of MB.
BLOCKED_MODULES: Final = ("torch", "torchvision", "torchaudio", "tensorflow", "flax", "jax")
# Modules that the extra `tokenize` brings, and that code of ours imports.
TOKENIZE_EXTRA_MODULES: Final = ("jinja2", "transformers")
# Seconds per prompt, after which SIGALRM ends the process; the router kills it sooner, if it still runs.
PROMPT_TIMEOUT_S: Final = 10
# A template that builds huge strings must not exhaust the memory of the machine.
MAX_ADDRESS_SPACE_BYTES: Final = 8 << 30


def main() -> None:
    """Prepare the process, then serve questions until end of input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the router
    resource.setrlimit(
        resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    for name in BLOCKED_MODULES:
        # With None both find_spec() and import say that there is no such module.
        sys.modules[name] = None  # type: ignore[assignment]
    # Copies first: 0 and 1 are given to /dev/null below.
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # libraries must neither print into the answers nor read the questions
    serve_questions(*pipes)


def serve_questions(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each frame of `questions` in turn, writing to `answers`."""
    models: dict[str, Any] = {}
    while len(length_bytes := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        question = question_decoder.decode(questions.read(int.from_bytes(length_bytes, "big")))
        answers.write(frame_message(answer_question(question, models)))
        answers.flush()


def answer_question(question: TokenizeQuestion, models: dict[str, Any]) -> TokenizeAnswer:
    """Answer one question; errors become an answer with `error`.

    models: loaded tokenizers by source; a load adds to it.
    """
    try:
        if not question.path:
            return _load_tokenizer(question, models)
        # Its default action ends the process, also in the middle of a regular expression in C.
        signal.alarm(PROMPT_TIMEOUT_S)
        if question.source not in models:
            return TokenizeAnswer("load")  # only an earlier child had loaded it
        answer: TokenizeAnswer = models[question.source].read_body(question)
        return answer
    except UnreadablePrompt as error:
        return TokenizeAnswer(error.reason)
    except Exception:  # noqa: BLE001 - malformed requests; the engine reports what is wrong
        return TokenizeAnswer("malformed")
    finally:
        signal.alarm(0)


def _load_tokenizer(question: TokenizeQuestion, models: dict[str, Any]) -> TokenizeAnswer:
    try:
        from ttft_otel.router.routing.prompts.model_tokenizer import ModelTokenizer

        models[question.source] = ModelTokenizer(question.source)
    except Exception as error:  # noqa: BLE001 - any error of any library
        if isinstance(error, ModuleNotFoundError) and error.name in TOKENIZE_EXTRA_MODULES:
            missing = f"{error.name} is not installed"
            remedy = "pip install 'ttft-otel[router,tokenize]' or use --tokenize engine"
            return TokenizeAnswer("load", f"{missing}; {remedy}")
        # Only the first line is reported: errors of the hub have many.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        detail = f"cannot load the tokenizer of {question.source!r}: {lines[0][:300]}"
        remedy = "give its folder with --tokenizer DIR or use --tokenize engine"
        return TokenizeAnswer("load", f"{detail}; {remedy}")
    return TokenizeAnswer()


if __name__ == "__main__":
    main()
