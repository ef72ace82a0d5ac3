# SPDX-License-Identifier: Apache-2.0
"""Replicas agree on the load of all through a real store, and go on alone without it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from lab.certificates import make_certificate
from router.fake_instances import wait_until
from router.shared_state.store_server import StoreServer, needs_store, run_store
from router.workers.joined_workers import LEG, URLS, JoinedWorker, build_request
from ttft_otel.model.names import metric_names
from ttft_otel.router.shared_state import store_link
from ttft_otel.router.shared_state.store_link import StoreLink, StoreSettings

pytestmark = needs_store
PREFIX = "test"
REPLICAS = ("0" * 16, "1" * 16)
FAILED = f"{metric_names.ROUTER_SHARED_STATE_EXCHANGES}_total failed"


class LinkedReplica(JoinedWorker):
    """One replica without a server of HTTP."""

    def __init__(
        self, url: str, replica: str, prefix: str = PREFIX, password_file: str = ""
    ) -> None:
        super().__init__("ttft")
        settings = StoreSettings(url, password_file, prefix)
        self.link = StoreLink(settings, self.pool, self.own, self.remote, replica)

    def read_metrics(self) -> dict[str, float]:
        """Its metrics, by name and result."""
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for metric in self.link.collect_metrics()
            for sample in metric.samples
        }


@asynccontextmanager
async def run_replicas(
    url: str, *names: str, prefix: str = PREFIX, password_file: str = ""
) -> AsyncIterator[list[LinkedReplica]]:
    """A replica for each name."""
    replicas = [LinkedReplica(url, name, prefix, password_file) for name in names]
    async with AsyncExitStack() as stack:
        for each in replicas:
            await stack.enter_async_context(each.link)
        yield replicas


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreServer]:
    """A store without a password."""
    async with run_store(tmp_path) as server:
        yield server


async def test_replicas_know_the_load_of_all(store: StoreServer) -> None:
    """What one sends, the other counts until it is over; who leaves is forgotten at once."""
    async with run_replicas(store.url, REPLICAS[0]) as (one,):
        async with run_replicas(store.url, REPLICAS[1]) as (other,):
            attempts = [one.send(build_request(number), URLS[0]) for number in range(5)]
            await wait_until(lambda: other.count_elsewhere() == 5)
            assert len(other.state.pending) == 5
            for number in range(20):
                assert other.choose(build_request(10 + number)).instance.url == URLS[1]
            one.pool.record_ended(attempts.pop())
            await wait_until(lambda: other.count_elsewhere() == 4)
            other.send(build_request(100), URLS[1])
            await wait_until(lambda: one.count_elsewhere() == 1)
        await asyncio.wait_for(
            wait_until(lambda: not one.count_elsewhere()), store_link.EXPIRY_S / 2
        )
        assert one.read_metrics()[metric_names.ROUTER_REPLICAS] == 0


async def test_a_quiet_replica_is_not_forgotten(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is written anew although it has nothing new, and although others write all the time."""
    monkeypatch.setattr(store_link, "EXPIRY_S", 0.8)
    monkeypatch.setattr(store_link, "REFRESH_INTERVAL_S", 0.2)
    async with run_replicas(store.url, *REPLICAS) as (quiet, busy):
        quiet.send(build_request(1), URLS[0])
        await wait_until(lambda: busy.count_elsewhere() == 1)
        for number in range(60):
            busy.send(build_request(2 + number), URLS[1])
            await asyncio.sleep(0.02)
            assert busy.count_elsewhere() == 1
        await wait_until(lambda: quiet.count_elsewhere() == 60)


async def test_an_open_breaker_is_known(store: StoreServer) -> None:
    """One failure is then enough here; on its own a replica waits for five. A success elsewhere ends it."""
    async with run_replicas(store.url, *REPLICAS) as (one, other):
        theirs, ours = (each.pool.get(LEG)[0] for each in (one, other))
        one.pool.record_failure(theirs, "test")
        assert theirs.breaker.state == "closed"
        for _ in range(4):
            one.pool.record_failure(theirs, "test")
        await wait_until(lambda: ours.is_suspect)
        assert ours.breaker.state == "closed"
        other.pool.record_failure(ours, "test")
        assert ours.breaker.state == "open"
        await wait_until(lambda: theirs.is_suspect)
        for each, instance in ((one, theirs), (other, ours)):
            instance.breaker.close()
            each.link._note_change()
        await wait_until(lambda: not (ours.is_suspect or theirs.is_suspect))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
async def test_the_store_goes_and_comes_back(
    store: StoreServer,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once; meanwhile only own load counts, nothing waits, and afterwards all is known anew."""
    monkeypatch.setattr(store_link, "EXPIRY_S", 1.0)
    monkeypatch.setattr(store_link, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(store_link, "REFRESH_INTERVAL_S", 0.2)
    caplog.set_level(logging.WARNING)
    async with run_replicas(store.url, *REPLICAS) as (one, other):
        one.send(build_request(1), URLS[0])
        await wait_until(lambda: other.count_elsewhere() == 1)
        store.send_signal(number)
        await wait_until(lambda: not other.count_elsewhere())
        one.send(build_request(2), URLS[0])
        await wait_until(lambda: not one.read_metrics()[metric_names.ROUTER_SHARED_STATE_UP])
        assert not len(other.state.pending)
        await asyncio.sleep(1.0)
        if number == signal.SIGSTOP:
            store.send_signal(signal.SIGCONT)
        else:
            store.start()
        await wait_until(lambda: other.count_elsewhere() == 2)
        assert one.read_metrics()[metric_names.ROUTER_SHARED_STATE_UP] == 1
    gone = [each for each in caplog.messages if "by this replica's own load" in each]
    back = [each for each in caplog.messages if "answers again" in each]
    assert (len(gone), len(back)) == (2, 2), caplog.messages
    assert f"127.0.0.1:{store.port}" in gone[0]


JUNK = (b"\xc1 nonsense", b"\x92\x91\x94\xa1\xff", b"\x93\x90\x90" + b"\x91" * 20_000)


async def test_junk_is_skipped(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted; the others are read as before, and what a process that expired had is forgotten."""
    monkeypatch.setattr(store_link, "EXPIRY_S", 1.0)
    name = "f" * 16 + ".00000000"
    key = f"{PREFIX}:{store_link.FORMAT}:{name}"
    channel = f"{PREFIX}:{store_link.FORMAT}:{store_link.CHANNEL}"
    malformed = f"{metric_names.ROUTER_SHARED_STATE_VALUES}_total malformed"
    async with run_replicas(store.url, *REPLICAS) as (one, other), store.connect() as client:
        await wait_until(lambda: one.read_metrics()[metric_names.ROUTER_SHARED_STATE_UP] == 1)

        async def publish(message: str | bytes) -> None:
            before = one.read_metrics()[malformed]
            await client.publish(channel, message)
            await wait_until(lambda: one.read_metrics()[malformed] > before)

        for value in (*JUNK, b"\x92" * (2 * 1024 * 1024)):
            await client.set(key, value)
            await publish(name)
        await client.delete(key)
        await client.lpush(key, b"no string")
        await publish(name)
        await publish(b"\xff" * 1000)
        assert one.read_metrics()[malformed] == len(JUNK) + 3
        other.send(build_request(1), URLS[0])
        await wait_until(lambda: one.count_elsewhere() == 1)
        assert one.read_metrics()[metric_names.ROUTER_REPLICAS] == 1


async def test_an_expired_replica_is_forgotten(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed: its key expires in the store, and here what it had under way."""
    monkeypatch.setattr(store_link, "EXPIRY_S", 1.0)
    monkeypatch.setattr(store_link, "REFRESH_INTERVAL_S", 0.2)
    async with run_replicas(store.url, *REPLICAS) as (one, other), store.connect() as client:
        one.send(build_request(1), URLS[0])
        await wait_until(lambda: other.count_elsewhere() == 1)
        for each in one.link._tasks:  # as if it had been killed: it says no farewell
            one.link._leave = lambda _: asyncio.sleep(0)  # type: ignore[method-assign]
            each.cancel()
        await wait_until(lambda: not other.count_elsewhere())
        assert len(await client.keys(f"{PREFIX}:*")) == 1
        assert all([await client.pttl(each) > 0 for each in await client.keys("*")])


async def test_processes_are_bounded(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more is counted and not read."""
    monkeypatch.setattr(store_link, "MAX_PROCESSES", 2)
    names = [f"{number:016x}" for number in range(5)]
    too_many = f"{metric_names.ROUTER_SHARED_STATE_VALUES}_total too_many"
    async with run_replicas(store.url, *names) as replicas:
        for each in replicas:
            each.send(build_request(1), URLS[0])
        await wait_until(lambda: all(each.count_elsewhere() == 2 for each in replicas))
        await wait_until(lambda: all(each.read_metrics()[too_many] > 0 for each in replicas))


async def test_deployments_and_workers_are_apart(store: StoreServer) -> None:
    """Another prefix is another deployment; workers of one router share by their own memory."""
    async with (
        run_replicas(store.url, REPLICAS[0], prefix="staging") as (foreign,),
        run_replicas(store.url, REPLICAS[0], *REPLICAS) as (one, worker, other),
    ):
        foreign.send(build_request(1), URLS[0])
        one.send(build_request(2), URLS[0])
        await wait_until(lambda: other.count_elsewhere() == 1)
        assert not worker.count_elsewhere() and not foreign.count_elsewhere()


ACL = f"""\
user default off
user router on >secret ~{PREFIX}:* &{PREFIX}:* -@all +set +getrange +del +publish +subscribe
"""


async def test_access_by_user_and_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The documented rights are enough; another password, or keys of others, is said and not shown."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    users = tmp_path / "users"
    users.write_text(ACL)
    server = StoreServer(tmp_path, "--aclfile", str(users))
    server.start()
    url = server.url.replace("//", "//router@")
    try:
        async with run_replicas(url, *REPLICAS, password_file=str(password)) as (one, other):
            one.send(build_request(1), URLS[0])
            await wait_until(lambda: other.count_elsewhere() == 1)
        caplog.clear()
        for given, prefix in (("wrong", PREFIX), ("secret", "foreign")):
            named = server.url.replace("//", f"//router:{given}@")
            async with run_replicas(named, REPLICAS[0], prefix=prefix) as (it,):
                await wait_until(lambda it=it: it.read_metrics()[FAILED] > 0)
        assert len(caplog.messages) == 2
        assert not any("wrong" in each or "secret" in each for each in caplog.messages)
    finally:
        server.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("case", ["right", "another host", "unknown authority", "no client"])
async def test_tls(tmp_path: Path, case: str) -> None:
    """The server's certificate and name are verified, and the store can ask for one of the client."""
    name = "DNS:elsewhere" if case == "another host" else "IP:127.0.0.1"
    certificate, key = make_certificate(tmp_path, name)
    server = StoreServer(
        tmp_path, "--tls-port", "PORT", "--port", "0", "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate),
        "--tls-auth-clients", "yes",
    )  # fmt: skip
    server.start()
    own = f"ssl_certfile={certificate}&ssl_keyfile={key}"
    query = {
        "unknown authority": own,
        "no client": f"ssl_ca_certs={certificate}",
    }.get(case, f"ssl_ca_certs={certificate}&{own}")
    try:
        url = f"rediss://127.0.0.1:{server.port}?{query}"
        async with run_replicas(url, *REPLICAS) as (one, other):
            one.send(build_request(1), URLS[0])
            if case == "right":
                await wait_until(lambda: other.count_elsewhere() == 1)
            else:
                await wait_until(lambda: other.read_metrics()[FAILED] >= 1)
                assert not other.read_metrics()[metric_names.ROUTER_SHARED_STATE_UP]
    finally:
        server.send_signal(signal.SIGKILL)


@pytest.mark.full  # many attempts
async def test_a_new_authority(tmp_path: Path) -> None:
    """The store comes back with another authority's certificate: the file of authorities is read anew."""
    trusted, folder = tmp_path / "ca.crt", tmp_path / "store"
    folder.mkdir()
    certificate, key = make_certificate(folder)
    trusted.write_bytes(certificate.read_bytes())
    server = StoreServer(
        folder, "--tls-port", "PORT", "--port", "0", "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate),
        "--tls-auth-clients", "no",
    )  # fmt: skip
    server.start()
    up = metric_names.ROUTER_SHARED_STATE_UP
    try:
        url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={trusted}"
        async with run_replicas(url, *REPLICAS) as (one, other):
            await wait_until(lambda: one.read_metrics()[up])
            server.send_signal(signal.SIGKILL)
            make_certificate(folder)
            server.start()
            await wait_until(lambda: one.read_metrics()[FAILED] >= 3)
            assert not one.read_metrics()[up]
            trusted.write_bytes(certificate.read_bytes())
            one.send(build_request(1), URLS[0])
            await wait_until(lambda: other.count_elsewhere() == 1)
    finally:
        server.send_signal(signal.SIGKILL)
