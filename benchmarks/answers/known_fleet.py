# SPDX-License-Identifier: Apache-2.0
"""A fleet of known engines behind a router: what clients ask, the way to an instance, and back.

Input: Asks and a Site with its faults. Output: a Visit for each request, which window_spans.py writes as
traces. Times are integer microseconds after the window's begin.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy

from benchmarks.answers.known_engine import (
    BLOCK,
    Chance,
    EngineSettings,
    Job,
    KnownEngine,
    Span,
    pass_stops,
)

SECOND: Final = 1_000_000
CACHED_PREFIXES: Final = 400  # that an instance keeps


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client sends."""

    at: int
    tokens: int
    answer: int = 60
    tenant: str = ""
    model: str = "chat"
    adapter: str = ""
    prefix: str = ""  #: its beginning, which others share
    prefix_tokens: int = 0
    items: int = 0
    grammar: int = 0  #: us until its grammar is compiled
    patience: int = 0  #: us after which the client gives up
    instance: int = -1  #: where it has to go; -1: by the router


@dataclass(frozen=True, slots=True)
class Site:
    """Instances, their router and encoders, and what goes wrong with them; instances by their number."""

    instances: int = 2
    settings: EngineSettings = EngineSettings()
    special: Mapping[int, EngineSettings] = field(
        default_factory=dict
    )  #: settings of some instances
    models: Mapping[int, str] = field(default_factory=dict)  #: that they serve, "chat" by default
    router: bool = True
    encoders: int = 0
    encoder_item: int = 45_000
    shares: tuple[float, ...] = ()  #: of the traffic; () in turn
    hops: Mapping[int, int] = field(default_factory=dict)  #: us more on the way
    few_hops: tuple[tuple[int, int], ...] = ()  #: (number of the request, us more)
    api_stops: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    warm: bool = False  #: at the hour's begin the prefix caches have what is asked for
    resets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  #: the prefix cache is lost
    gone: Mapping[int, int] = field(default_factory=dict)  #: serves nothing from this moment on
    failing: tuple[int, float, int] | None = (
        None  #: instance, share of attempts, us until they fail
    )
    router_delay: int = 0  #: us more in each of the router's stages
    skew: Mapping[int, int] = field(default_factory=dict)  #: of clocks, us
    device_clock: bool = True

    def get_settings(self, instance: int) -> EngineSettings:
        """The settings of an instance."""
        return self.special.get(instance, self.settings)


@dataclass(slots=True)
class ServerLeg:
    """A request at one server: stages in their order, and what its spans have besides."""

    role: str
    instance: str
    start: int
    stages: dict[str, int]
    unattributed: int
    attributes: dict[str, Any] = field(default_factory=dict)
    holders: list[tuple[int, int, int]] = field(default_factory=list)  #: us, tokens, request
    end: int = 0  #: of the answer, after `start`
    output_tokens: int = 0
    token_us: int = 0
    error: str = ""
    settings: EngineSettings | None = None

    @property
    def ttft(self) -> int:
        """From its arrival to its first token, or until it ended without one."""
        return sum(self.stages.values()) + self.unattributed


@dataclass(slots=True)
class Visit:
    """One request of the window, as it was served."""

    number: int
    ask: Ask
    legs: list[ServerLeg] = field(default_factory=list)
    router: dict[str, int] = field(default_factory=dict)  #: stages of the router's span, in order
    unattributed: int = 0
    failed: str = ""  #: the instance on which a first attempt failed
    error: str = ""

    @property
    def ttft(self) -> int:
        """The time to first token as the outermost server has it."""
        return (
            (sum(self.router.values()) + self.unattributed) if self.router else self.legs[-1].ttft
        )


def draw_asks(
    chance: Chance,
    seconds: float,
    rate: Callable[[float], float] | float,
    tokens: Callable[[Chance], float] | float = 0,
    answer: float = 60,
    **more: Any,
) -> list[Ask]:
    """Asks that come by chance, `rate` of them in a second (or a function of it).

    tokens: of a prompt, or a function that draws them; lognormal by default. more: fields of Ask, each a
    value or a function of chance.
    """
    highest = (
        rate
        if isinstance(rate, int | float)
        else max(rate(at / 4) for at in range(int(4 * seconds)))
    )
    found = []
    at = 0.0
    while (at := at + chance.exponential(1 / max(highest, 1e-9))) < seconds:
        if not isinstance(rate, int | float) and chance.random() > rate(at) / highest:
            continue
        if callable(tokens):
            size = tokens(chance)
        else:
            size = tokens or 420 * chance.lognormal(0, 0.55)
        fields = {name: value(chance) if callable(value) else value for name, value in more.items()}
        length = max(2, min(int(chance.exponential(answer)) + 2, int(6 * answer)))
        found.append(Ask(int(at * SECOND), max(8, int(size)), length, **fields))
    return found


def serve_asks(asks: Sequence[Ask], site: Site, chance: Chance) -> list[Visit]:
    """What became of all of them, in the order of their arrival."""
    ordered = sorted(asks, key=lambda each: each.at)
    return _FleetRun(site, chance).serve([Visit(at, ask) for at, ask in enumerate(ordered)])


class _FleetRun:
    """One window on a site."""

    def __init__(self, site: Site, chance: Chance) -> None:
        self.site = site
        self.chance = chance
        self.turns: defaultdict[str, int] = defaultdict(int)
        self.encoder_free = [0] * site.encoders
        self.encoder_turn = 0
        self.api_free: defaultdict[int, int] = defaultdict(int)
        self.caches: defaultdict[int, OrderedDict[str, int]] = defaultdict(OrderedDict)
        self.reset_at = {name: list(moments) for name, moments in site.resets.items()}
        self.is_cold: set[int] = set()  #: instances that were restarted
        self.role = "prefill_decode" if site.encoders else "mono"

    def serve(self, visits: list[Visit]) -> list[Visit]:
        """Serve them."""
        jobs: defaultdict[int, list[tuple[Job, Visit, dict[str, int]]]] = defaultdict(list)
        sent = [(*self._send(visit), visit) for visit in visits]
        # A process takes them as they arrive, whatever came first to the router.
        for arrived, instance, hop, visit in sorted(sent, key=lambda each: each[0]):
            job, head = self._prepare(visit, instance, arrived)
            jobs[instance].append((job, visit, {"hop": hop, "start": arrived, **head}))
        for instance, entries in sorted(jobs.items()):
            entries.sort(key=lambda entry: entry[0].at)
            engine = KnownEngine(self.site.get_settings(instance), self.chance)
            engine.serve([job for job, _, _ in entries])
            for job, visit, head in entries:
                self._answer(visit, instance, job, head)
        return visits

    def _draw(self, us: float, spread: float = 0.3) -> int:
        return int(us * self.chance.lognormal(0, spread))

    def _choose(self, ask: Ask) -> int:
        site = self.site
        if ask.instance >= 0:
            return ask.instance
        able = [
            each
            for each in range(site.instances)
            if site.models.get(each, "chat") == ask.model and ask.at < site.gone.get(each, 1 << 60)
        ]
        if site.shares:
            weights = numpy.array([site.shares[each] for each in able])
            return int(self.chance.choice(able, p=weights / weights.sum()))
        self.turns[ask.model] += 1
        return able[self.turns[ask.model] % len(able)]

    def _send(self, visit: Visit) -> tuple[int, int, int]:
        """The way to an instance: when it accepts the request, which one that is, and the hop."""
        site, ask = self.site, visit.ask
        instance = self._choose(ask)
        now = ask.at
        if site.router:
            extra = self._draw(site.router_delay, 0.5) if site.router_delay else 0
            visit.router["router.receive"] = self._draw(130) + extra
            visit.router["router.route"] = self._draw(60) + extra // 2
            now += sum(visit.router.values())
            if (
                site.failing
                and instance == site.failing[0]
                and self.chance.random() < site.failing[1]
            ):
                visit.router["router.retry"] = self._draw(site.failing[2], 0.1)
                visit.failed = f"vllm-{instance}"
                now += visit.router["router.retry"]
                instance = (instance + 1) % site.instances
        if ask.items and site.encoders:
            now = self._encode(visit, now)
        hop = self._draw(250) + self._draw(site.hops.get(instance, 0), 0.2)
        hop += sum(us for number, us in site.few_hops if number == visit.number)
        stops = site.api_stops.get(instance, ())
        # A process that does not run accepts nothing: what comes waits in front of it.
        arrived = pass_stops(now + (hop if site.router else 0), 0, stops)
        for begin, end in stops:
            if begin <= arrived < end:
                arrived = end
        return arrived, instance, arrived - now if site.router else 0

    def _prepare(self, visit: Visit, instance: int, arrived: int) -> tuple[Job, dict[str, int]]:
        """What the API process does: the engine's job, and the stages before it."""
        site, ask = self.site, visit.ask
        stops = site.api_stops.get(instance, ())
        read = pass_stops(arrived, self._draw(140), stops)
        work = (
            self._draw(700, 0.2) + int(1.1 * ask.tokens) + 6000 * ask.items * (site.encoders == 0)
        )
        begun = max(read, self.api_free[instance])
        prepared = pass_stops(begun, work, stops)
        self.api_free[instance] = prepared
        engine_stops = site.get_settings(instance).stops
        given = pass_stops(prepared, self._draw(220), (*stops, *engine_stops))
        head = {"receive": read - arrived, "preprocess": prepared - read, "ipc": given - prepared}
        if ask.items and site.encoders:
            head["ec.transfer"] = self._draw(1800 * ask.items)
            given += head["ec.transfer"]
        job = Job(
            given,
            ask.tokens,
            self._find_cached(ask, instance, given),
            ask.answer,
            ask.adapter,
            0 if site.encoders else ask.items,
            given + ask.grammar if ask.grammar else 0,
            ask.at + ask.patience if ask.patience else 0,
            visit.number,
        )
        return job, head

    def _find_cached(self, ask: Ask, instance: int, now: int) -> int:
        cache = self.caches[instance]
        moments = self.reset_at.get(instance, [])
        while moments and moments[0] <= now:
            moments.pop(0)
            cache.clear()
            self.is_cold.add(instance)
        if not ask.prefix:
            return 0
        is_warm = self.site.warm and instance not in self.is_cold
        known = cache.pop(ask.prefix, ask.prefix_tokens if is_warm else 0)
        cache[ask.prefix] = max(known, ask.prefix_tokens)
        if len(cache) > CACHED_PREFIXES:
            cache.popitem(last=False)
        return min(known, ask.prefix_tokens, ask.tokens - 1) // BLOCK * BLOCK

    def _encode(self, visit: Visit, now: int) -> int:
        """The leg to an encoder; returns when its answer is here."""
        site = self.site
        able = [each for each in range(site.encoders) if now < site.gone.get(100 + each, 1 << 60)]
        self.encoder_turn += 1
        chosen = able[self.encoder_turn % len(able)]
        hop = self._draw(250)
        start = now + hop // 2
        before = {
            "receive": self._draw(200),
            "preprocess": self._draw(7000 * visit.ask.items, 0.2),
            "ipc": self._draw(220),
        }
        given = start + sum(before.values())
        taken = max(given, self.encoder_free[chosen])
        dispatch = self._draw(450)
        compute = self._draw(site.encoder_item * visit.ask.items, 0.05)
        done = taken + dispatch + compute
        self.encoder_free[chosen] = done
        stages = {
            **before,
            "encoder.queue": taken - given,
            "dispatch": dispatch,
            "encoder.compute": compute,
            "ec.transfer": self._draw(900),
            "output": self._draw(350),
            "egress": self._draw(80),
        }
        reason = {"ttft.queue.in_step_us": taken - given} if taken > given else {}
        held = {"ttft.held.encoder_us": taken - given} if taken > given else {}
        leg = ServerLeg("encode", f"encoder-{chosen}", start, stages, self._draw(40))
        leg.attributes = {
            **reason,
            **held,
            "ttft.encoder.own_items": visit.ask.items,
            "ttft.encoder.step_items": visit.ask.items,
        }
        leg.end = leg.ttft + 50
        visit.legs.append(leg)
        visit.router["router.hop.encode"] = hop
        visit.router |= {f"encode.{name}": us for name, us in stages.items() if us}
        visit.unattributed += leg.unattributed
        return start + leg.ttft + hop - hop // 2

    def _answer(self, visit: Visit, instance: int, job: Job, head: dict[str, int]) -> None:
        """The leg of the instance that answered, or that the client left, and the way back."""
        site, ask = self.site, visit.ask
        stages = {name: us for name, us in head.items() if name not in ("hop", "start")}
        leg = ServerLeg(self.role, f"vllm-{instance}", head["start"], stages, self._draw(35, 0.6))
        leg.settings = site.get_settings(instance)
        leg.start += site.skew.get(instance, 0)
        queue = "encoder.queue" if job.items else "prefill.queue"
        if job.left_at:
            stages[queue] = max(0, job.left_at - job.at)
            leg.error = "cancelled"
            visit.error = "disconnected"
            leg.end = leg.ttft
        else:
            stages[queue] = job.taken - job.at
            measured = {
                "dispatch": job.dispatch,
                "encoder.compute": job.encoder,
                "prefill.compute": job.compute,
                "prefill.stall": job.stall,
                "sample": job.sample,
            }
            stages |= {name: us for name, us in measured.items() if us}
            stops = (*site.api_stops.get(instance, ()), *leg.settings.stops)
            sent = pass_stops(job.first, self._draw(330), stops)
            stages["output"] = sent - job.first
            stages["egress"] = self._draw(90)
            # What the marks do not tell: preempted before its first token, and computed again.
            known = head["start"] + sum(stages.values()) - stages["egress"]
            leg.unattributed += max(0, sent - known)
            leg.end = leg.ttft + max(0, job.ended - job.first) + 200
            leg.output_tokens = ask.answer
            leg.token_us = (job.ended - job.first) // max(ask.answer - 1, 1)
        leg.attributes = _describe_job(job, ask, site, queue)
        leg.holders = [(us, tokens, other.name) for us, tokens, other in job.holders]
        visit.legs.append(leg)
        if site.router:
            back = self._draw(120)
            visit.router[f"router.hop.{self.role}"] = head["hop"] + back
            visit.router |= {f"{self.role}.{name}": us for name, us in stages.items() if us}
            visit.unattributed += leg.unattributed
            visit.router["router.egress"] = self._draw(80) + self._draw(site.router_delay, 0.5)


def _describe_job(job: Job, ask: Ask, site: Site, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": ask.tokens,
        "ttft.cached_tokens": job.cached,
        "ttft.prefill.chunks": job.chunks,
        "ttft.prefill.own_tokens": job.own_tokens,
        "ttft.prefill.step_tokens": job.step_tokens,
        "ttft.preemptions": job.preemptions,
        "ttft.recomputed_tokens": job.recomputed,
        "ttft.streaming": True,
    }
    if site.device_clock:
        found |= {"ttft.clock": "device", "ttft.clock_error_us": 30}
    if ask.items:
        found["ttft.encoder.own_items"] = job.items
        found["ttft.encoder.step_items"] = job.step_items
        found["ttft.ec.items"] = ask.items
    found |= {f"ttft.queue.{reason}_us": us for reason, us in job.reasons.items() if us > 0}
    if job.stall:
        found["ttft.stall.token_budget_us"] = job.stall
    found |= {f"ttft.held.{kind}_us": us for kind, us in job.held.items()}
    return found


def change_site(site: Site, **more: Any) -> Site:
    """The site with other settings of its schedulers, or other fields of its own."""
    names = set(EngineSettings.__dataclass_fields__)
    own = {name: value for name, value in more.items() if name not in names}
    engine = {name: value for name, value in more.items() if name in names}
    special = {at: replace(each, **engine) for at, each in site.special.items()}
    changed = replace(site, settings=replace(site.settings, **engine), special=special)
    return replace(changed, **own)
