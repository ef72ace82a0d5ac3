# SPDX-License-Identifier: Apache-2.0
"""The parsers of test_fuzz.py under Atheris, which keeps inputs that reach new code; flags are libFuzzer's.

    PYTHONPATH=tests python -m attack.coverage_fuzz head -runs=200000 NEW_INPUTS tests/attack/corpus/head

What it found is worth a file in the corpus once the parser is mended.
"""

from __future__ import annotations

import sys
import zlib

import atheris

# Before anything else imports them.
with atheris.instrument_imports(include=["ttft_otel", "uvicorn"]):
    from attack import test_fuzz


def cut(data: bytes) -> list[bytes]:
    """Up to three parts, at places that only the bytes decide, so that a file is all that a case needs."""
    number = zlib.crc32(data)
    first, second = sorted((number % (len(data) + 1), (number >> 16) % (len(data) + 1)))
    return [data[:first], data[first:second], data[second:]]


def main() -> None:
    """Run the parser that the first argument names."""
    check = test_fuzz.CHECKS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, lambda data: check(cut(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
