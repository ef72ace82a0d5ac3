# SPDX-License-Identifier: Apache-2.0
"""Good hours and bad hours with a known cause: what is asked, of which site, and what is true of it.

Each window is two Hours, and a third one that is the bad hour without its cause: the true effect is the
difference. answer_scores.py compares with Truth what the commands say. Kinds are those of
ttft_otel/explain/explain/cause_kinds.py, written out: nothing here may come from what is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.answers.known_engine import Chance, Device, EngineSettings
from benchmarks.answers.known_fleet import SECOND, Ask, Site, change_site, draw_asks
from benchmarks.answers.window_spans import Sampling

LENGTH: Final = 120.0  # seconds of an hour, which is as long as it needs to be
NOTHING: Final = ("nothing", "not_known")
Asker = Callable[[Chance, float], list[Ask]]


@dataclass(frozen=True, slots=True)
class Truth:
    """What holds of a bad hour."""

    kinds: tuple[str, ...]  #: any of these is the cause; NOTHING where no cause can be known
    subjects: tuple[str, ...] = ()  #: one of them has to be named; () where there is none
    stages: tuple[str, ...] = ()  #: without legs, of which one has most of the lateness
    #: Of which one helps; () where none must be advised; None where it does not matter.
    settings: tuple[str, ...] | None = None
    refusal: bool = False  #: that it cannot be told is a right answer, too
    unsure: bool = False  #: so few requests that no cause is sure
    change: tuple[str, ...] = ()  #: kinds that `diff` may name; () for those above


@dataclass(frozen=True, slots=True)
class Hour:
    """What clients ask, and of what."""

    asks: Asker
    site: Site


@dataclass(frozen=True, slots=True)
class KnownWindow:
    """A good hour, a bad hour, and why it is bad."""

    name: str
    group: str
    good: Hour
    bad: Hour
    truth: Truth
    without: Hour | None = None  #: the bad hour without its cause; None: its asks on the good site
    seconds: float = LENGTH
    sampling: Sampling = Sampling()
    has_before: bool = True  #: the good hour is stored
    group_by: str = ""

    @property
    def harmless(self) -> Hour:
        """The bad hour without its cause."""
        return self.without or Hour(self.bad.asks, self.good.site)


def ask_chat(rate: Callable[[float], float] | float = 8.0, **more: Any) -> Asker:
    """Asks of one kind; `more` as for draw_asks()."""
    return lambda chance, seconds: draw_asks(chance, seconds, rate, **more)


def join_asks(*askers: Asker) -> Asker:
    """All of them."""
    return lambda chance, seconds: [ask for each in askers for ask in each(chance, seconds)]


def ask_long(rate: float, tokens: int, spread: float = 0.1, **more: Any) -> Asker:
    """Few long prompts."""
    return ask_chat(
        rate, tokens=lambda chance: tokens * chance.lognormal(0, spread), answer=30, **more
    )


def ask_prefixed(
    rate: float, tenants: Mapping[str, int], fresh: str = "", number: int = 150
) -> Asker:
    """Prompts of tenants that begin with one of `number` contexts; those of `fresh` share nothing."""
    names = sorted(tenants)

    def draw(chance: Chance, seconds: float) -> list[Ask]:
        found = []
        for ask in draw_asks(chance, seconds, rate):
            tenant = names[int(chance.integers(len(names)))]
            length = tenants[tenant]
            prefix = f"{tenant}-{int(chance.integers(number))}" if tenant != fresh else ""
            found.append(
                replace(
                    ask,
                    tokens=length + ask.tokens // 3,
                    tenant=tenant,
                    prefix=prefix,
                    prefix_tokens=length,
                )
            )
        return found

    return draw


def repeat_stops(first: float, every: float, length: float, seconds: float = LENGTH) -> Any:
    """Pauses of `length` seconds, as spans."""
    count = int((seconds - first) / every)
    return tuple(
        (int((first + at * every) * SECOND), int((first + at * every + length) * SECOND))
        for at in range(count)
    )


def slow_down(factor: float, since: float = 0.0, until: float = 1e6) -> Any:
    """Of EngineSettings.slow."""
    return ((int(since * SECOND), int(until * SECOND), factor),)


CHAT: Final = ask_chat()
PLAIN: Final = Site(2, router=False)
ROUTED: Final = Site(3)
WORK: Final = ("prefill.compute", "prefill.queue", "prefill.stall")
WAIT: Final = ("prefill.queue", "prefill.stall")


def with_special(site: Site, instance: int, **more: Any) -> Site:
    """The site with other settings of one instance."""
    return replace(site, special={**site.special, instance: replace(site.settings, **more)})


def list_slow_instances() -> list[KnownWindow]:
    """One of several instances takes longer for the same work."""
    found = []
    for name, factor, site, sampling in (
        ("twice", 2.2, ROUTED, Sampling()),
        ("half as slow again", 1.5, ROUTED, Sampling()),
        ("no router", 1.8, PLAIN, Sampling()),
        ("clock skew", 2.0, replace(ROUTED, skew={0: 40_000, 1: -25_000}), Sampling()),
        ("lost spans", 2.0, ROUTED, Sampling(lost=0.03)),
        ("head sampling", 2.0, ROUTED, Sampling(head=0.5)),
        ("tail sampling", 2.0, ROUTED, Sampling(tail_us=60_000)),
    ):
        bad = with_special(site, 1, slow=slow_down(factor))
        truth = Truth(("slow_instance",), ("vllm-1",), WORK, ())
        found.append(
            KnownWindow(
                name, "slow instance", Hour(CHAT, site), Hour(CHAT, bad), truth, sampling=sampling
            )
        )
    return found


def list_pauses() -> list[KnownWindow]:
    """A process stops now and then."""
    found = []
    for process, length, every in (("api", 0.7, 9), ("engine", 0.6, 9), ("engine", 1.5, 20)):
        stops = repeat_stops(5, every, length)
        for site in (ROUTED, PLAIN):
            if process == "api":
                bad = replace(site, api_stops={1: stops})
            else:
                bad = with_special(site, 1, stops=stops)
            words = (
                "preprocess",
                "output",
                "receive",
                "router.hop",
                "ipc",
                "prefill.compute",
                *WAIT,
            )
            truth = Truth(("process_pause",), ("vllm-1",), (*words, "dispatch", "sample"), ())
            name = f"{process} {length} s{' routed' if site is ROUTED else ''}"
            found.append(KnownWindow(name, "pause", Hour(CHAT, site), Hour(CHAT, bad), truth))
    return found


def list_healthy() -> list[KnownWindow]:
    """Nothing is wrong."""
    found = []
    for name, asks, site in (
        ("light", ask_chat(4.0), PLAIN),
        ("busy", ask_chat(24.0), PLAIN),
        ("routed", CHAT, ROUTED),
        ("pictures", ask_chat(4.0, items=lambda chance: int(chance.random() < 0.3)), PLAIN),
        ("mixed sizes", ask_chat(5.0, tokens=lambda c: 500 * c.lognormal(0, 1.1)), PLAIN),
    ):
        hour = Hour(asks, site)
        truth = Truth(NOTHING, settings=(), refusal=True, change=NOTHING)
        found += [
            KnownWindow(name, "healthy", hour, hour, truth),
            KnownWindow(f"{name}, no past", "healthy", hour, hour, truth, has_before=False),
        ]
    return found


def list_limits() -> list[KnownWindow]:
    """A setting, or the memory, bounds what runs at once."""
    cases = (
        ("max_num_seqs", ask_chat(12.0), {"max_num_seqs": 5}, "max_num_seqs", "--max-num-seqs"),
        ("max_num_seqs, routed", ask_chat(20.0), {"max_num_seqs": 6}, "max_num_seqs", "--max-num-seqs"),
        ("few places for adapters", ask_chat(8.0, adapter=draw_adapter), {"max_loras": 1}, "max_loras",
         "--max-loras"),
        ("two places for adapters", ask_chat(18.0, adapter=draw_adapter), {"max_loras": 2}, "max_loras",
         "--max-loras"),
        ("KV blocks", ask_chat(8.0, answer=300), {"kv_tokens": 9_000}, "kv_blocks",
         "--gpu-memory-utilization"),
        ("KV blocks, long prompts", ask_chat(4.0, tokens=3000, answer=150), {"kv_tokens": 16_000},
         "kv_blocks", "--gpu-memory-utilization"),
        ("budget of a step", ask_chat(11.0, tokens=1800, answer=20), {"max_num_batched_tokens": 128},
         "max_num_batched_tokens", "--max-num-batched-tokens"),
    )  # fmt: skip
    found = []
    for name, asks, setting, subject, flag in cases:
        site = change_site(ROUTED if "routed" in name else PLAIN, max_loras=6, max_items=8)
        truth = Truth(("setting_limit",), (subject,), (*WAIT, "encoder.queue"), (flag,))
        bad = Hour(asks, change_site(site, **setting))
        found.append(KnownWindow(name, "limit", Hour(asks, site), bad, truth))
    return found


def draw_adapter(chance: Chance) -> str:
    """One of four."""
    return f"adapter-{int(chance.integers(4))}"


def draw_tenant(chance: Chance) -> str:
    """One of five that are as usual."""
    return f"tenant-{int(chance.integers(5))}"


def list_long_prompts() -> list[KnownWindow]:
    """Few long prompts hold the others up."""
    others = ask_chat(10.0, tenant=draw_tenant)
    change = ("held_by_long_prompts", "mix_change")
    found = []
    for name, long, site, subjects, group_by in (
        ("a tenant's", ask_long(0.15, 14_000, tenant="acme"), PLAIN, ("acme",), "tenant"),
        ("a tenant's, routed", ask_long(0.25, 20_000, tenant="acme"), ROUTED, ("acme",), "tenant"),
        ("of everybody", ask_long(0.2, 12_000, tenant=draw_tenant), PLAIN, (), ""),
        ("whole in a step", ask_long(0.15, 9_000, tenant="acme"),
         change_site(PLAIN, max_num_batched_tokens=16_384), ("acme",), "tenant"),
    ):  # fmt: skip
        # The slowest hundredth may be the long ones themselves.
        kinds = ("held_by_long_prompts", "own_size")
        truth = Truth(kinds, subjects, WORK, None, change=change)
        good = Hour(others, site)
        bad = Hour(join_asks(others, long), site)
        found.append(
            KnownWindow(name, "long prompts", good, bad, truth, without=good, group_by=group_by)
        )
    return found


def list_caches() -> list[KnownWindow]:
    """Less of the prompts is found in the prefix cache."""
    tenants = {"acme": 6000, "initech": 3000, "umbrella": 4500}
    site = Site(2, router=False, warm=True)
    usual = ask_prefixed(3.0, tenants)
    truth = Truth(("cold_prefix_cache",), (), WORK, ())
    lost = {0: (20 * SECOND,), 1: (20 * SECOND,)}
    routed = replace(site, instances=3, router=True)
    return [
        KnownWindow(
            "restart", "cold cache", Hour(usual, site), Hour(usual, replace(site, resets=lost)), truth
        ),
        KnownWindow(
            "restart of one instance", "cold cache", Hour(usual, routed),
            Hour(usual, replace(routed, resets={1: (10 * SECOND, 60 * SECOND)})), truth,
        ),
        KnownWindow(
            "a tenant's prompts changed", "cold cache", Hour(usual, site),
            Hour(ask_prefixed(3.0, tenants, "acme"), site), truth, without=Hour(usual, site),
            group_by="tenant",
        ),
    ]  # fmt: skip


def list_ways() -> list[KnownWindow]:
    """Hops, the router, attempts that fail, encoders."""
    hop = replace(ROUTED, hops={1: 140_000})
    all_hops = replace(ROUTED, hops=dict.fromkeys(range(3), 120_000))
    pictures = ask_chat(6.0, items=lambda chance: int(chance.random() < 0.6))
    encoders = Site(2, encoders=3, encoder_item=210_000)
    gone = replace(encoders, gone={100: 30 * SECOND, 101: 30 * SECOND})
    cases: list[tuple[str, str, Asker, Site, Site, Truth]] = [
        ("to one instance", "slow hop", CHAT, ROUTED, hop,
         Truth(("slow_hop",), ("vllm-1",), ("router.hop",), ())),
        ("to all instances", "slow hop", CHAT, ROUTED, all_hops,
         Truth(("slow_hop",), (), ("router.hop",), ())),
        ("router busy", "router", CHAT, ROUTED, replace(ROUTED, router_delay=40_000),
         Truth(("router_busy",), (), ("router.receive", "router.route", "router.egress"), ())),
        ("router very busy", "router", ask_chat(4.0), ROUTED, replace(ROUTED, router_delay=300_000),
         Truth(("router_busy",), (), ("router.receive", "router.route", "router.egress"), ())),
        ("one in ten fails", "failed attempts", CHAT, ROUTED, replace(ROUTED, failing=(1, 0.1, 400_000)),
         Truth(("failed_attempts",), ("vllm-1",), ("router.retry",), ())),
        ("all fail at once", "failed attempts", CHAT, ROUTED, replace(ROUTED, failing=(2, 1.0, 250_000)),
         Truth(("failed_attempts",), ("vllm-2",), ("router.retry",), ())),
        ("two of three encoders gone", "encoders", pictures, encoders, gone,
         Truth(("lost_instance",), ("encoder-",), ("encoder.queue",), ())),
        ("an instance gone", "instance gone", ask_chat(26.0, answer=120), ROUTED,
         replace(ROUTED, gone={1: 0}),
         Truth(("lost_instance", "load_increase"), (), WORK, ())),
    ]  # fmt: skip
    return [
        KnownWindow(name, group, Hour(asks, good), Hour(asks, bad), truth)
        for name, group, asks, good, bad, truth in cases
    ]


def list_loads() -> list[KnownWindow]:
    """More comes, or other things do."""
    load = Truth(("load_increase",), (), WORK, ())
    small = change_site(PLAIN, max_num_seqs=48)
    usual = Hour(ask_chat(5.0, answer=100), small)
    found = [
        KnownWindow(
            name, "load", usual, Hour(ask_chat(rate, answer=100), small), load, without=usual
        )
        for name, rate in (
            ("five times", 25.0),
            ("since a moment", lambda at: 5.0 if at < 60 else 30.0),
            ("a second's burst, now and then", lambda at: 80.0 if at % 20 < 1 else 4.0),
        )
    ]
    larger = Truth(
        ("own_size", "mix_change", "held_by_long_prompts"), (), WORK, None, change=("mix_change",)
    )
    sizes = lambda chance: 2600 * chance.lognormal(0, 0.5)  # noqa: E731
    pictures = ask_chat(5.0, items=lambda chance: int(chance.random() < 0.1))
    more_pictures = ask_chat(5.0, items=lambda chance: 4 * int(chance.random() < 0.5))
    plain = Hour(ask_chat(2.5), PLAIN)
    return [
        *found,
        KnownWindow(
            "larger prompts", "mix", plain, Hour(ask_chat(2.5, tokens=sizes), PLAIN), larger, without=plain
        ),
        KnownWindow(
            "some large prompts", "mix", plain,
            Hour(join_asks(ask_chat(2.2), ask_chat(0.3, tokens=5000)), PLAIN), larger, without=plain,
        ),
        KnownWindow(
            "more pictures", "mix", Hour(pictures, PLAIN), Hour(more_pictures, PLAIN),
            Truth((*larger.kinds, "load_increase", *NOTHING), (), (), None, change=("mix_change",)),
            without=Hour(pictures, PLAIN),
        ),
    ]  # fmt: skip


def list_fleets() -> list[KnownWindow]:
    """All instances alike, or the shares of the instances; two models; two causes."""
    slow = Truth(("slow_fleet",), (), WORK, ())
    half = replace(ROUTED, settings=replace(ROUTED.settings, slow=slow_down(3.0, 60)))
    whole = replace(ROUTED, settings=replace(ROUTED.settings, slow=slow_down(2.0)))
    unequal = with_special(Site(2, shares=(0.8, 0.2)), 1, slow=slow_down(2.0))
    shifted = replace(
        unequal, shares=(0.25, 0.75), settings=replace(EngineSettings(), slow=slow_down(0.95))
    )
    shifted = with_special(shifted, 1, slow=slow_down(1.9))
    shift = Truth(
        ("slow_instance", "instance_shift"), ("vllm-1",), WORK, (), change=("instance_shift",)
    )
    big = EngineSettings(device=Device(floor=24_000, token=200))
    models = Site(3, models={2: "big"}, special={2: big}, router=False)
    asks = join_asks(CHAT, ask_chat(0.6, model="big"))
    two = with_special(replace(ROUTED, hops={2: 70_000}), 1, slow=slow_down(2.5))
    either = Truth(("slow_instance", "slow_hop"), ("vllm-1", "vllm-2"), (*WORK, "router.hop"), ())
    quiet = Truth(NOTHING, settings=(), refusal=True, change=NOTHING)
    few = replace(ROUTED, few_hops=((300, 30_000_000), (700, 30_000_000)))
    return [
        KnownWindow("since a moment", "slow fleet", Hour(CHAT, ROUTED), Hour(CHAT, half), slow),
        KnownWindow("the whole hour", "slow fleet", Hour(CHAT, ROUTED), Hour(CHAT, whole), slow),
        KnownWindow(
            "since a moment, no past", "slow fleet", Hour(CHAT, ROUTED), Hour(CHAT, half), slow,
            has_before=False,
        ),
        KnownWindow(
            "the whole hour, no past", "slow fleet", Hour(CHAT, ROUTED), Hour(CHAT, whole), quiet,
            has_before=False,
        ),
        KnownWindow(
            "more traffic on the slower", "shift", Hour(CHAT, unequal), Hour(CHAT, shifted), shift,
        ),
        KnownWindow("two models", "two models", Hour(asks, models), Hour(asks, models), quiet),
        KnownWindow(
            "two models, no past", "two models", Hour(asks, models), Hour(asks, models), quiet,
            has_before=False,
        ),
        KnownWindow("an instance and a way", "two causes", Hour(CHAT, ROUTED), Hour(CHAT, two), either),
        KnownWindow("two long hops", "chance", Hour(CHAT, ROUTED), Hour(CHAT, few), quiet),
    ]  # fmt: skip


def list_others() -> list[KnownWindow]:
    """Clients that give up, parts of a long time, what the scheduler sets aside."""
    patient = ask_chat(9.0, answer=200, patience=4 * SECOND)
    tight = change_site(PLAIN, max_num_seqs=4)
    lost = Truth(("lost_requests",), (), (), ())
    quiet = Truth(NOTHING, settings=(), refusal=True, change=NOTHING)
    tail = Sampling(tail_us=60_000)
    incident = with_special(ROUTED, 1, slow=slow_down(3.0, 200, 250))
    pauses = replace(PLAIN, settings=EngineSettings(paused=repeat_stops(10, 12, 0.8)))
    grammars = ask_chat(
        8.0,
        grammar=lambda chance: (
            int(chance.random() < 0.15) * int(400_000 * chance.lognormal(0, 0.3))
        ),
    )
    return [
        KnownWindow(
            "most give up", "lost requests", Hour(patient, PLAIN), Hour(patient, tight), lost
        ),
        KnownWindow(
            "healthy, tail sampling", "sampling", Hour(CHAT, ROUTED), Hour(CHAT, ROUTED), quiet, sampling=tail
        ),
        KnownWindow(
            "healthy, head sampling", "sampling", Hour(CHAT, ROUTED), Hour(CHAT, ROUTED), quiet,
            sampling=Sampling(head=0.3),
        ),
        KnownWindow(
            "a slow instance for a sixth of the time", "incident", Hour(CHAT, ROUTED),
            Hour(CHAT, incident), Truth(("slow_instance",), ("vllm-1",), WORK, ()), seconds=300.0,
        ),
        KnownWindow(
            "the scheduler is paused", "set aside", Hour(CHAT, PLAIN), Hour(CHAT, pauses),
            Truth(("set_aside", "process_pause"), ("paused", "vllm-"), WAIT, ()),
        ),
        KnownWindow(
            "grammars", "set aside", Hour(CHAT, PLAIN), Hour(grammars, PLAIN),
            Truth(("set_aside",), ("grammar",), WAIT, (), change=("set_aside", "mix_change")),
            without=Hour(CHAT, PLAIN),
        ),
    ]  # fmt: skip


def list_few_requests() -> list[KnownWindow]:
    """So few that nothing, or nothing for sure, can be known."""
    slow = with_special(PLAIN, 1, slow=slow_down(4.0))
    sparse, none = Hour(ask_chat(2.0), PLAIN), Truth(NOTHING, settings=(), refusal=True)
    found = [
        KnownWindow(
            f"{seconds:g} seconds", "few requests", sparse, Hour(ask_chat(1.5), slow), none,
            seconds=seconds, has_before=False,
        )
        for seconds in (1.0, 4.0, 8.0)
    ]  # fmt: skip
    found.append(
        KnownWindow(
            "thirty requests",
            "few requests",
            Hour(ask_chat(2.0), PLAIN),
            Hour(ask_chat(2.0), slow),
            Truth(
                ("slow_instance", *NOTHING),
                ("vllm-1", ""),
                (),
                (),
                refusal=True,
                unsure=True,
                change=("slow_instance", *NOTHING),
            ),
            seconds=15.0,
        )  # fmt: skip
    )
    return found


def list_windows() -> list[KnownWindow]:
    """All of them."""
    parts: Sequence[list[KnownWindow]] = (
        list_slow_instances(),
        list_pauses(),
        list_healthy(),
        list_limits(),
        list_long_prompts(),
        list_caches(),
        list_ways(),
        list_loads(),
        list_fleets(),
        list_others(),
        list_few_requests(),
    )
    return [window for part in parts for window in part]
