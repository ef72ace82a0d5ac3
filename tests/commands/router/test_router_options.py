# SPDX-License-Identifier: Apache-2.0
"""Flags, environment variables and the YAML file become RouterOptions, or an error with its remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import command
from ttft_otel.model.names import env_names

INSTANCE_URL = "http://127.0.0.1:1"


def read_options(*flags: str) -> router_options.RouterOptions:
    """The options that these flags give; nothing is started."""
    return router_options.RouterOptions.from_flags(
        command.make_context("router", list(flags)).params
    )


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Where a configuration may be written."""
    return tmp_path / "router.yaml"


def test_topologies() -> None:
    """The given --backend, --prefill, --decode and --encoder decide the legs; duplicates count once."""
    plain, d, p, e = (
        ["--backend", INSTANCE_URL],
        ["--decode", INSTANCE_URL],
        ["--prefill", INSTANCE_URL],
        ["--encoder", INSTANCE_URL],
    )
    assert list(read_options(*plain).build_instances()) == ["mono"]
    assert list(read_options(*plain, *e).build_instances()) == ["encode", "prefill_decode"]
    assert list(read_options(*p, *d).build_instances()) == ["prefill", "decode"]
    assert list(read_options(*e, *p, *d).build_instances()) == ["encode", "prefill", "decode"]
    assert (
        len(read_options(*plain, *plain, "--backend", INSTANCE_URL + "/").build_instances()["mono"])
        == 1
    )
    for wrong in ([], p, d, e, [*plain, *d], [*plain, *p, *d]):
        with pytest.raises(click.UsageError, match="either --backend, or --prefill and --decode"):
            read_options(*wrong).build_instances()


def test_order(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag takes precedence over its environment variable, that over the file, that over the default."""
    config_file.write_text("retries: 1\nmax_body: 1\nreports: 1\ndrain-delay: 0.5\n")
    monkeypatch.setenv("TTFT_OTEL_ROUTER_RETRIES", "2")
    monkeypatch.setenv("TTFT_OTEL_ROUTER_MAX_BODY", "2")
    made = read_options("--config", str(config_file), "--max-body", "3")
    assert (made.reports, made.retries, made.limits.max_body) == (1, 2, 3)
    assert (made.drain_delay, made.port) == (0.5, 8000)


def test_file_speaks_yaml(config_file: Path) -> None:
    """In the file lists are lists, keys may be numbers, and `off` is the text off, not false."""
    config_file.write_text(
        f"backend: [{INSTANCE_URL}]\nfirst-token: off\napi-key: [1234]\ntrust-trace-headers: yes"
    )
    made = read_options("--config", str(config_file))
    assert (made.backend, made.first_token) == ((INSTANCE_URL,), "off")
    assert (made.api_key, made.trust_trace_headers) == (("1234",), True)
    for text in ("admin-port: 70000", "port: x", "drain-timeout: -1", "first-token: maybe"):
        config_file.write_text(text)
        with pytest.raises(click.UsageError) as wrong:
            read_options("--config", str(config_file))
        assert f"'--{text.partition(':')[0]}'" in wrong.value.format_message()


def test_an_empty_key_opens_nothing(config_file: Path) -> None:
    """An empty --api-key, as from an unset variable, is refused; it would accept every client."""
    config_file.write_text("api-key: [null]")
    for flags in (["--api-key", ""], ["--api-key", " x"], ["--config", str(config_file)]):
        with pytest.raises(click.BadParameter, match="a key is empty"):
            read_options(*flags)
    assert read_options("--api-key", "x").api_key == ("x",)


def test_one_value_is_no_list(config_file: Path) -> None:
    """A list for an option with one value is reported in one sentence, at the start and at SIGHUP."""
    for text in ("retries: [1]", "retries: {a: 1}", "admin-token: [x]"):
        config_file.write_text(text)
        with pytest.raises(click.UsageError, match="is one value"):
            read_options("--config", str(config_file))


def test_numbers(config_file: Path) -> None:
    """Values that are no finite time or no whole number are refused, neither rounded nor kept."""
    for word in ("nan", "inf", "-inf"):
        with pytest.raises(click.BadParameter):
            read_options("--routing-logic", "ttft", "--slo-ttft-ms", word)
    for text in ("kv-aware-threshold: 1.5", "retries: 1.5", "slo-ttft-ms: .nan"):
        config_file.write_text(text)
        with pytest.raises(
            click.UsageError, match="not a whole number|not a finite number of milliseconds"
        ):
            read_options("--config", str(config_file))
    config_file.write_text("kv-aware-threshold: 15\nslo-ttft-ms: 1.5\nrouting-logic: kvaware")
    made = read_options("--config", str(config_file))
    assert (made.kv_aware_threshold, made.slo_ttft_ms) == (15, 1.5)


@pytest.mark.parametrize("name", ["a b", " a", "a\n", "a\r\nb", "a\0"])
def test_a_session_key_is_a_name(name: str) -> None:
    """A --session-key that cannot be a header name is refused: no request could have it."""
    with pytest.raises(click.BadParameter, match="leave out its blanks"):
        read_options("--routing-logic", "session", "--session-key", name)


def test_trust_has_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers' sampled flags are honoured only if the router's own or the general variable says so."""
    assert not read_options().trust_trace_headers
    monkeypatch.setenv(env_names.TTFT_OTEL_TRUST_SAMPLED, "1")
    assert read_options().trust_trace_headers
    monkeypatch.setenv("TTFT_OTEL_ROUTER_TRUST_TRACE_HEADERS", "0")
    assert not read_options().trust_trace_headers


def test_a_port_that_others_reach_needs_a_key() -> None:
    """Without a key the router listens on loopback only, unless --insecure is given."""
    backend = ("--backend", INSTANCE_URL)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        read_options(*backend, "--host", host).check_exposure()
    for host in ("0.0.0.0", "::", "10.0.0.1", "router.example", ""):
        flags = (*backend, "--host", host)
        with pytest.raises(click.UsageError, match=r"needs --api-key KEY, or --insecure"):
            read_options(*flags).check_exposure()
        read_options(*flags, "--api-key", "k").check_exposure()
        read_options(*flags, "--insecure").check_exposure()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "it needs --api-key KEY, or --insecure"),
        (["--admin-port", "1", "--admin-host", "0.0.0.0"], "it needs --admin-token TOKEN"),
        (["--discover", "dns://vllm"], "dns://SERVICE:PORT"),
        (["--discover", "k8s://prod/app=x"], "kubectl proxy"),
        (["--upstream-ca", "/none"], "/none: [Errno 2] No such file"),
        (["--upstream-ca", __file__], "these have to be PEM files"),
        (["--upstream-cert-key", "tls.key"], "needs --upstream-cert"),
        (["--shared-state", "http://store"], "write redis://"),
        (["--shared-state", "redis://:secret@"], "write redis://"),
        (["--shared-state", "redis://store/index"], "write redis://"),
        (["--shared-state", "rediss://store?ssl_cert_reqs=none"], "only ssl_ca_certs"),
        (["--shared-state", "rediss://store?ssl_ca_certs=/none"], "/none cannot be read"),
        (["--shared-state", "redis://store", "--shared-state-password-file", "/none"], "be read"),
        (["--shared-state-prefix", "mine"], "need --shared-state"),
    ],
)
def test_what_is_wrong_is_said(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything listens, and without a password that may be in a URL."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    refused = CliRunner().invoke(command, ["--backend", INSTANCE_URL, *flags])
    assert refused.exit_code == 2 and words in " ".join(refused.output.split())
    assert "secret" not in refused.output


def test_the_client_of_a_store_is_not_imported() -> None:
    """It costs a router that shares nothing neither time nor memory."""
    code = (
        "import sys; from ttft_otel.commands.router.command import command\n"
        f"try: command(['--backend', {INSTANCE_URL!r}, '--host', '192.0.2.1', '--insecure'])\n"
        "finally: print('redis' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
