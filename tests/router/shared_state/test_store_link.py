# SPDX-License-Identifier: Apache-2.0
"""Replicas agree on the load of all, by snapshots and through a real store; without it each goes on alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from redis.exceptions import RedisError

from lab.certificates import make_certificate
from router import fake_instances
from router.fake_instances import wait_until
from router.workers.test_workers import LEG, URLS, JoinedWorker, build_request
from ttft_otel.model.names import metric_names
from ttft_otel.router import types
from ttft_otel.router.shared_state import store_link
from ttft_otel.router.shared_state.store_link import StoreLink, StoreSettings, build_snapshot
from ttft_otel.router.timeline import Attempt
from ttft_otel.tracing import clock

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
START_TIMEOUT_S = 30


class StoreServer:
    """The server; `flags` are its own, beside those that keep it here and off the disk."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, *flags: str) -> None:
        if SERVER is None:
            pytest.skip("needs valkey-server or redis-server (Debian has both packages)")
        self.port = fake_instances.find_unused_url().rpartition(":")[2]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._words = [SERVER, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        if "--tls-port" not in flags:
            self._words += ["--port", self.port]
        self._words += [self.port if each == "PORT" else each for each in flags]
        self._log = folder / "store.log"

    def start(self) -> None:
        """Run it, also once more."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._words, stdout=log, stderr=log)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; whoever is killed is waited for."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def connect(self) -> redis.asyncio.Redis:
        """A client with every right."""
        return redis.asyncio.Redis.from_url(self.url)


@contextlib.asynccontextmanager
async def run_store(folder: Path, *flags: str) -> AsyncIterator[StoreServer]:
    """A server with these flags, or without any and once it answers; it is killed at the end."""
    server = StoreServer(folder, *flags)
    server.start()
    try:
        if not flags:
            async with server.connect() as client:
                for _ in range(START_TIMEOUT_S * 20):
                    with contextlib.suppress(RedisError, OSError):
                        await client.ping()
                        break
                    await asyncio.sleep(0.05)
        yield server
    finally:
        server.send_signal(signal.SIGKILL)


PREFIX = "test"
REPLICAS = ("0" * 16, "1" * 16)
UP = metric_names.ROUTER_SHARED_STATE_UP
FAILED = f"{metric_names.ROUTER_SHARED_STATE_EXCHANGES}_total failed"
NO_STORE = "redis://127.0.0.1:1"


class Replica(JoinedWorker):
    """One replica without a server of HTTP; it shares once its `link` is entered."""

    def __init__(
        self,
        policy: str = "ttft",
        url: str = NO_STORE,
        name: str = REPLICAS[0],
        prefix: str = PREFIX,
        password_file: str = "",
    ) -> None:
        super().__init__(policy)
        settings = StoreSettings(url, password_file, prefix)
        self.link = StoreLink(settings, self.pool, self.own, self.remote, name)

    def read(self, other: Replica, name: str = "other") -> None:
        """Take in what another one has under way."""
        self.link.apply_value(name, build_snapshot(other.pool, other.own))

    def read_metrics(self) -> dict[str, float]:
        """Its metrics, by name and result."""
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for metric in self.link.collect_metrics()
            for sample in metric.samples
        }


def compare(one: Replica, other: Replica) -> None:
    """What `other` knows of `one` is what there is."""
    assert len(other.state.pending) == len(one.state.pending)
    for theirs, ours in zip(one.pool, other.pool, strict=True):
        assert (ours.in_flight, ours.all_in_flight) == (0, theirs.in_flight)
        load, known = (each.state.pending.get_load(theirs.url) for each in (one, other))
        assert (known.tokens_to_compute, known.pairs) == (load.tokens_to_compute, load.pairs)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 10))]
)
@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_whatever_was_missed(policy: str, seed: int) -> None:
    """Most snapshots are never read, and instances come and go: each that is read makes both agree."""
    chance = random.Random(seed)
    one, other = Replica(policy), Replica(policy)
    attempts: list[Attempt] = []
    for number in range(300):
        if attempts and chance.random() < 0.45:
            one.pool.record_ended(attempts.pop(chance.randrange(len(attempts))))
        else:
            attempts.append(one.send(build_request(number)))
        if chance.random() < 0.05:
            url = f"http://127.0.0.1:{10 + len(one.pool)}"
            for each in (one, other):
                each.pool.add_instance(types.parse_instance_url(url, LEG))
                each.remote.sync_instances()
        if chance.random() < 0.2:
            other.read(one)
            compare(one, other)
    for attempt in attempts:
        one.pool.record_ended(attempt)
    other.read(one)
    compare(one, other)


def test_instances_that_are_unknown_or_on_another_leg() -> None:
    """The first are left out until they are known; a URL alone says which instance is meant."""
    one, other = Replica("ttft"), Replica("ttft")
    late = other.pool.get(LEG)[1]
    other.pool.remove_instance(late)
    one.send(build_request(1), URLS[1])
    other.read(one)
    assert not len(other.state.pending)
    other.pool.add_instance(late)
    other.read(one)
    compare(one, other)
    other.link.forget("other")
    assert not len(other.state.pending) and not late.all_in_flight

    row = ("prefill_decode", URLS[0], 7, True)
    other.link.apply_value("third", msgspec.msgpack.encode(((row,), ())))

    first = other.pool.get(LEG)[0]
    assert first.all_in_flight == 7 and first.breaker_openers
    assert set(other.routing._policies) == {LEG}, "a leg of others is none of this router's"
    other.link.forget("third")
    assert not (first.all_in_flight or first.breaker_openers)


def test_a_snapshot_has_no_content() -> None:
    """Neither blocks of prompts nor IDs of requests, nor what a prefill took."""
    one = Replica("ttft")
    requests = [build_request(987_654_321), build_request(123_456_789)]
    attempts = [one.send(each) for each in requests]
    one.state.record_first_token(requests[0], clock.now_us(), 0.25, 0)

    value = build_snapshot(one.pool, one.own)

    assert len(msgspec.msgpack.decode(value)[1]) == 1
    for attempt, request in zip(attempts, requests, strict=True):
        assert attempt.span_id.encode() not in value
        assert not any(msgspec.msgpack.encode(block) in value for block in request.block_keys)


@pytest.mark.full
def test_the_largest_snapshot_fits() -> None:
    """More instances and requests than are shared, with the longest URLs: as large as a value may be."""
    one, other = Replica("ttft"), Replica("ttft")
    urls = [f"http://127.0.0.1:1/{number:04}".ljust(512, "x") for number in range(1100)]
    for each in (one, other):
        each.pool.replace_instances({LEG: [types.parse_instance_url(url, LEG) for url in urls]})
        each.remote.sync_instances()
    for number in range(2200):
        one.send(build_request(number), urls[number % 1000])

    value = build_snapshot(one.pool, one.own)

    assert 500_000 < len(value) < store_link.MAX_VALUE_BYTES
    other.link.apply_value("one", value)
    assert len(other.state.pending) == store_link.MAX_REQUESTS
    assert sum(each.all_in_flight for each in other.pool) == 2200


def test_instances_that_came_and_went_leave_nothing() -> None:
    """A replica that names ever new ones has under way what its latest value says."""
    it = Replica("least_requests")
    for turn in range(3):
        urls = [f"http://127.0.0.1:1/{turn}/{number}" for number in range(1000)]
        it.pool.replace_instances({LEG: [types.parse_instance_url(url, LEG) for url in urls]})
        it.remote.sync_instances()
        rows = [(LEG, url, 1, False) for url in urls]
        it.link.apply_value("it", msgspec.msgpack.encode((rows, ())))
        assert len(it.remote._in_flight["it"]) == it.count_elsewhere() == 1000


@pytest.mark.parametrize(
    "value",
    [
        ((("mono", URLS[0], -1, False),), ()),
        ((("mono", URLS[0], 10**9, False),), ()),
        ((("mono", "x" * 513, 1, False),), ()),
        ((("", URLS[0], 1, False),), ()),
        ((("mono", URLS[0], 1.5, False),), ()),
        ((("mono", URLS[0], 1, False),) * 1025, ()),
        ((), ((0, 1, -5, 0, 0),)),
        ((), ((0, 1, 0, 5, 10**18),)),
        ((), ((0, 1, 0, 5, 5),) * 2049),
        "text",
        None,
    ],
)
def test_numbers_beyond_their_bounds(value: object) -> None:
    """No snapshot has them, whoever made it, and nothing of it is taken."""
    it = Replica("ttft")
    with pytest.raises(msgspec.MsgspecError):
        it.link.apply_value("it", msgspec.msgpack.encode(value))
    assert not it.link._values and not any(each.all_in_flight for each in it.pool)


def test_requests_at_no_instance() -> None:
    """A request that names an instance which is not in the snapshot is left out."""
    it = Replica("ttft")
    it.link.apply_value("it", msgspec.msgpack.encode(((), ((5, 1, 0, 5, 5),))))
    assert not len(it.state.pending)


@asynccontextmanager
async def run_replicas(
    url: str, *names: str, prefix: str = PREFIX, password_file: str = ""
) -> AsyncIterator[list[Replica]]:
    """A replica for each name."""
    replicas = [Replica("ttft", url, name, prefix, password_file) for name in names]
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is silent for a second has expired."""
    monkeypatch.setattr(store_link, "EXPIRY_S", 1.0)
    monkeypatch.setattr(store_link, "REFRESH_INTERVAL_S", 0.2)


async def test_a_quiet_replica_is_not_forgotten(store: StoreServer, quick: None) -> None:
    """Its key is written anew although it has nothing new, and although others write all the time."""
    async with run_replicas(store.url, *REPLICAS) as (quiet, busy):
        quiet.send(build_request(1), URLS[0])
        await wait_until(lambda: busy.count_elsewhere() == 1)
        for number in range(75):
            busy.send(build_request(2 + number), URLS[1])
            await asyncio.sleep(0.02)
            assert busy.count_elsewhere() == 1
        await wait_until(lambda: quiet.count_elsewhere() == 75)


async def test_an_open_breaker_is_known(store: StoreServer) -> None:
    """One failure is then enough here; on its own a replica waits for five. A success elsewhere ends it."""
    async with run_replicas(store.url, *REPLICAS) as (one, other):
        theirs, ours = (each.pool.get(LEG)[0] for each in (one, other))
        one.pool.record_failure(theirs, "test")
        assert theirs.breaker.state == "closed"
        for _ in range(4):
            one.pool.record_failure(theirs, "test")
        await wait_until(lambda: ours.breaker_openers)
        assert ours.breaker.state == "closed"
        other.pool.record_failure(ours, "test")
        assert ours.breaker.state == "open"
        await wait_until(lambda: theirs.breaker_openers)
        for each, instance in ((one, theirs), (other, ours)):
            instance.breaker.close()
            each.link._note_change()
        await wait_until(lambda: not (ours.breaker_openers or theirs.breaker_openers))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
async def test_the_store_goes_and_comes_back(
    store: StoreServer,
    quick: None,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once; meanwhile only own load counts, nothing waits, and afterwards all is known anew."""
    monkeypatch.setattr(store_link, "TIMEOUT_S", 0.3)
    caplog.set_level(logging.WARNING)
    async with run_replicas(store.url, *REPLICAS) as (one, other):
        one.send(build_request(1), URLS[0])
        await wait_until(lambda: other.count_elsewhere() == 1)
        store.send_signal(number)
        await wait_until(lambda: not other.count_elsewhere())
        one.send(build_request(2), URLS[0])
        await wait_until(lambda: not one.read_metrics()[UP])
        assert not len(other.state.pending)
        await asyncio.sleep(1.0)
        if number == signal.SIGSTOP:
            store.send_signal(signal.SIGCONT)
        else:
            store.start()
        await wait_until(lambda: other.count_elsewhere() == 2)
        assert one.read_metrics()[UP] == 1
    gone = [each for each in caplog.messages if "by this replica's own load" in each]
    back = [each for each in caplog.messages if "answers again" in each]
    assert (len(gone), len(back)) == (2, 2), caplog.messages
    assert f"127.0.0.1:{store.port}" in gone[0]


JUNK = (b"\xc1 nonsense", b"\x92\x91\x94\xa1\xff", b"\x93\x90\x90" + b"\x91" * 20_000)


async def test_junk_is_skipped(store: StoreServer, quick: None) -> None:
    """Counted; the others are read as before, and what a process that expired had is forgotten."""
    name = "f" * 16 + ".00000000"
    key = f"{PREFIX}:{store_link.FORMAT}:{name}"
    channel = f"{PREFIX}:{store_link.FORMAT}:{store_link.CHANNEL}"
    malformed = f"{metric_names.ROUTER_SHARED_STATE_VALUES}_total malformed"
    async with run_replicas(store.url, *REPLICAS) as (one, other), store.connect() as client:
        await wait_until(lambda: one.read_metrics()[UP] == 1)

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


async def test_an_expired_replica_is_forgotten(store: StoreServer, quick: None) -> None:
    """One that was killed: its key expires in the store, and here what it had under way."""
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
    async with run_store(tmp_path, "--aclfile", str(users)) as server:
        url = server.url.replace("//", "//router@")
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


def build_tls_flags(certificate: Path, key: Path, asks: str) -> tuple[str, ...]:
    """Flags of a store that shows this certificate; asks: "yes" if it wants one of clients."""
    return (
        *("--tls-port", "PORT", "--port", "0", "--tls-cert-file", str(certificate)),
        *("--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)),
        *("--tls-auth-clients", asks),
    )


@pytest.mark.parametrize("case", ["right", "another host", "unknown authority", "no client"])
async def test_tls(tmp_path: Path, case: str) -> None:
    """The server's certificate and name are verified, and the store can ask for one of the client."""
    name = "DNS:elsewhere" if case == "another host" else "IP:127.0.0.1"
    certificate, key = make_certificate(tmp_path, name)
    own = f"ssl_certfile={certificate}&ssl_keyfile={key}"
    query = {
        "unknown authority": own,
        "no client": f"ssl_ca_certs={certificate}",
    }.get(case, f"ssl_ca_certs={certificate}&{own}")
    async with run_store(tmp_path, *build_tls_flags(certificate, key, "yes")) as server:
        url = f"rediss://127.0.0.1:{server.port}?{query}"
        async with run_replicas(url, *REPLICAS) as (one, other):
            one.send(build_request(1), URLS[0])
            if case == "right":
                await wait_until(lambda: other.count_elsewhere() == 1)
            else:
                await wait_until(lambda: other.read_metrics()[FAILED] >= 1)
                assert not other.read_metrics()[UP]


@pytest.mark.full  # many attempts
async def test_a_new_authority(tmp_path: Path) -> None:
    """The store comes back with another authority's certificate: the file of authorities is read anew."""
    trusted, folder = tmp_path / "ca.crt", tmp_path / "store"
    folder.mkdir()
    certificate, key = make_certificate(folder)
    trusted.write_bytes(certificate.read_bytes())
    async with run_store(folder, *build_tls_flags(certificate, key, "no")) as server:
        url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={trusted}"
        async with run_replicas(url, *REPLICAS) as (one, other):
            await wait_until(lambda: one.read_metrics()[UP])
            server.send_signal(signal.SIGKILL)
            make_certificate(folder)
            server.start()
            await wait_until(lambda: one.read_metrics()[FAILED] >= 3)
            assert not one.read_metrics()[UP]
            trusted.write_bytes(certificate.read_bytes())
            one.send(build_request(1), URLS[0])
            await wait_until(lambda: other.count_elsewhere() == 1)
