# SPDX-License-Identifier: Apache-2.0
"""Flags, variables and file become Options, or a sentence that says what would be right."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from ttft_otel import names
from ttft_otel.router import config
from ttft_otel.router.command import command

URL = "http://127.0.0.1:1"


def read(*flags: str) -> config.Options:
    """The options that these flags give; nothing is started."""
    return config.Options(**command.make_context("router", list(flags)).params)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a configuration may be written."""
    return tmp_path / "router.yaml"


def test_topologies() -> None:
    """The legs follow from which flags there are; an instance that is named twice is one."""
    plain, d, p, e = ["--backend", URL], ["--decode", URL], ["--prefill", URL], ["--encoder", URL]
    assert list(read(*plain).legs()) == ["mono"]
    assert list(read(*plain, *e).legs()) == ["encode", "prefill_decode"]
    assert list(read(*p, *d).legs()) == ["prefill", "decode"]
    assert list(read(*e, *p, *d).legs()) == ["encode", "prefill", "decode"]
    assert len(read(*plain, *plain, "--backend", URL + "/").legs()["mono"]) == 1
    for wrong in ([], p, d, e, [*plain, *d], [*plain, *p, *d]):
        with pytest.raises(click.UsageError, match="either --backend, or --prefill and --decode"):
            read(*wrong).legs()


def test_first_token() -> None:
    """The original flag's name is an alias of strip, and no other mode's."""
    assert read().mode == read("--stream-prefill-token").mode == "strip"
    assert read("--first-token", "continue").mode == "continue"
    with pytest.raises(click.UsageError, match="leave out one of"):
        _ = read("--first-token", "off", "--stream-prefill-token").mode


def test_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag beats its variable, that beats the file, that beats the default."""
    file.write_text("retries: 1\nmax_body: 1\nreports: 1\ndrain-delay: 0.5\n")
    monkeypatch.setenv("TTFT_OTEL_ROUTER_RETRIES", "2")
    monkeypatch.setenv("TTFT_OTEL_ROUTER_MAX_BODY", "2")
    made = read("--config", str(file), "--max-body", "3")
    assert (made.reports, made.retries, made.max_body) == (1, 2, 3)
    assert (made.drain_delay, made.port) == (0.5, 8000)


def test_file_speaks_yaml(file: Path) -> None:
    """Lists are lists, numbers may be keys, and a bare off is the word, not false."""
    file.write_text(
        f"backend: [{URL}]\nfirst-token: off\napi-key: [1234]\ntrust-trace-headers: yes"
    )
    made = read("--config", str(file))
    assert (made.backend, made.first_token) == ((URL,), "off")
    assert (made.api_key, made.trust_trace_headers) == (("1234",), True)
    for text in ("admin-port: 70000", "port: x", "drain-timeout: -1", "first-token: maybe"):
        file.write_text(text)
        with pytest.raises(click.UsageError) as wrong:
            read("--config", str(file))
        assert f"'--{text.partition(':')[0]}'" in wrong.value.format_message()


def test_an_empty_key_opens_nothing(file: Path) -> None:
    """A key from a variable that nobody set is refused, not taken for one that everybody knows."""
    file.write_text("api-key: [null]")
    for flags in (["--api-key", ""], ["--api-key", " x"], ["--config", str(file)]):
        with pytest.raises(click.BadParameter, match="a key is empty"):
            read(*flags)
    assert read("--api-key", "x").api_key == ("x",)


def test_one_value_is_no_list(file: Path) -> None:
    """A list where there is one value is a sentence, at the start and at SIGHUP, not a traceback."""
    for text in ("retries: [1]", "retries: {a: 1}", "admin-token: [x]"):
        file.write_text(text)
        with pytest.raises(click.UsageError, match="is one value"):
            read("--config", str(file))


def test_numbers(file: Path) -> None:
    """What is no time, or no whole number, is refused, not rounded or kept as a bound that nothing meets."""
    for word in ("nan", "inf", "-inf"):
        with pytest.raises(click.BadParameter):
            read("--routing-logic", "ttft", "--slo-ttft-ms", word)
    for text in ("kv-aware-threshold: 1.5", "retries: 1.5", "slo-ttft-ms: .nan"):
        file.write_text(text)
        with pytest.raises(click.UsageError, match="no whole number|no number of milliseconds"):
            read("--config", str(file))
    file.write_text("kv-aware-threshold: 15\nslo-ttft-ms: 1.5\nrouting-logic: kvaware")
    made = read("--config", str(file))
    assert (made.kv_aware_threshold, made.slo_ttft_ms) == (15, 1.5)


@pytest.mark.parametrize("name", ["a b", " a", "a\n", "a\r\nb", "a\0"])
def test_a_session_key_is_a_name(name: str) -> None:
    """No header can be called so: it is refused, else no request would ever have a session."""
    with pytest.raises(click.BadParameter, match="leave out its blanks"):
        read("--routing-logic", "session", "--session-key", name)


def test_trust_has_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router does not trust callers unless it is told to, by its own or the general variable."""
    assert not read().trust_trace_headers
    monkeypatch.setenv(names.ENV_TRUST, "1")
    assert read().trust_trace_headers
    monkeypatch.setenv("TTFT_OTEL_ROUTER_TRUST_TRACE_HEADERS", "0")
    assert not read().trust_trace_headers
