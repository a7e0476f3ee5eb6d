"""The simulated system: routers, stores and engines, joined by the policies that the real system runs.

Imported from the system itself and called here as it calls them: the choice of an engine and what a router believes of engines
(epilora/serving/routing.py, prefixes.py), turns among tenants (epilora/fairness/turns.py), slots (epilora/adapters/slots.py), the
store's memory (epilora/store/host_cache.py), bounds and retries (epilora/serving/settings.py, fleet.py, completions.py), where an
engine is placed (actors/placement.py), how many there are (actors/scaling.py). What is written here is the way of a request between
them, which in the real system is calls over HTTP and Ray; their times are constants.

A request: router -> its turn -> an engine that holds the adapter, or the idlest, which loads it (store -> transfer -> slot -> probe)
-> first token. An engine that put the version out meanwhile refuses, and the router chooses again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from actors.placement import ACCELERATOR_LABEL, Choice, NodeView, first_that_fits, lacking
from actors.scaling import LoadWatch, ScalingLimits, ScalingState, decide
from benchmarks.simulate_engine import Clock, Engine, Sequence, StepTimes
from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterNotFound, NoFreeSlot
from epilora.fairness.counters import service
from epilora.fairness.turns import TurnQueue
from epilora.serving import probe
from epilora.serving.completions import MAX_RELOADS
from epilora.serving.fleet import RETRY_SLOT_S
from epilora.serving.prefixes import block_keys
from epilora.serving.routing import Member, Roster
from epilora.serving.settings import CoreConfig
from epilora.store.host_cache import HostCache

STORE_THREADS = 16  # actors/adapter_store.py, max_concurrency
TICK_S = 1.0  # actors/engine_pool.py


@dataclass(frozen=True)
class Setup:
    """One system. Times in seconds, rates in bytes a second.

    engines: at the start; max_engines: scaling may add up to these, one after the other, start_s each (equal: a fixed number).
    gpus_per_node, slots, seats, prompt_tokens, load_s: of an engine. routers: replicas, each of which knows what it did itself.
    max_active, spread over them, and max_queue as in the router. stores: 1 for all engines, or one a node (0).
    host_bytes: of each store's memory; adapter_bytes: as it travels; disk_bytes_s, link_bytes_s: of each store.
    before_s, after_s: from the client to the engine and from a token to the client; load_extra_s: of a load beside
    transfer, slot and probe.
    """

    engines: int
    slots: int
    seats: int
    load_s: float
    adapter_bytes: int
    host_bytes: int
    disk_bytes_s: float
    link_bytes_s: float
    max_engines: int = 0
    start_s: float = 0.0
    gpus_per_node: int = 8
    prompt_tokens: int = 8192
    routers: int = 1
    stores: int = 1
    max_active: int = 256
    max_queue: int = 1024
    before_s: float = 0.0
    after_s: float = 0.0
    load_extra_s: float = 0.0
    fair: bool = True


@dataclass(eq=False)
class Request:
    """arrival_s, tenant, digest, prompt and reply lengths, text; what became of it: ttft_s, tier ("slot", "host", "disk",
    "engine" if it waited for a load another one had begun), or failed.
    """

    arrival_s: float
    tenant: str
    digest: str | None
    prompt: int
    tokens: int
    text: str = ""
    ttft_s: float | None = None
    done_s: float | None = None
    tier: str = "slot"
    failed: str = ""
    attempts: int = 0

    @property
    def estimate(self) -> float:
        return float(self.prompt + self.tokens)


class Store:
    """Versions on a disk, some in memory, sent over one link; at most STORE_THREADS reads at a time."""

    def __init__(self, clock: Clock, setup: Setup) -> None:
        self._clock, self._setup = clock, setup
        self.cache = HostCache(setup.host_bytes)
        self._free_s = [0.0] * STORE_THREADS
        self._disk_s = self._link_s = 0.0

    def read(self, digest: str, done: Callable[[str], None]) -> None:
        """`done` gets the tier, when the version has arrived at the engine."""
        setup, size = self._setup, self._setup.adapter_bytes
        reads = self.cache.reads
        self.cache.get(digest, lambda: {"": np.broadcast_to(np.uint8(0), (size,))})
        tier = "disk" if self.cache.reads > reads else "host"
        thread = min(range(STORE_THREADS), key=self._free_s.__getitem__)
        start = max(self._clock.now_s, self._free_s[thread])
        if tier == "disk":
            start = self._disk_s = max(start, self._disk_s) + size / setup.disk_bytes_s
        self._free_s[thread] = start
        self._link_s = max(start, self._link_s) + size / setup.link_bytes_s
        self._clock.at(self._link_s + setup.load_extra_s, done, tier)


class Router:
    """One replica."""

    def __init__(self, system: System, members: list[Member]) -> None:
        setup = system.setup
        self._system, self._clock = system, system.clock
        self.roster = Roster(members)
        self.turns: TurnQueue[Request] = TurnQueue(-(-setup.max_active // setup.routers))
        self._max_queue = -(-setup.max_queue // setup.routers)
        self._slot_s = CoreConfig().timeouts.slot_s
        self._loading: dict[tuple[str, str], list[Callable[[NoFreeSlot | None], None]]] = {}
        self.probed: set[str] = set()
        self.slot_hits = self.loads = self.stale = 0

    def arrive(self, request: Request) -> None:
        # Without turns everybody is one client: first come, first served.
        client = request.tenant if self._system.setup.fair else ""
        if self.turns.waiting_of(client) >= self._max_queue:
            request.failed = "queue_full"
        elif self.turns.enter(client, request, request.estimate):
            self._choose(request, block_keys(request.text, request.digest))

    def _leave(self, request: Request, served: float) -> None:
        client = request.tenant if self._system.setup.fair else ""
        for entered in self.turns.leave(client, served - request.estimate):
            self._choose(entered, block_keys(entered.text, entered.digest))

    def _choose(self, request: Request, keys: list[int]) -> None:
        member = self.roster.choose(request.digest, keys, self._clock.now_s)
        assert member is not None, "there is always an engine"
        if request.digest is None:
            self._generate(request, member)
        else:
            self._with_adapter(request, member, request.digest, self._clock.now_s + self._slot_s)

    def _with_adapter(self, request: Request, member: Member, digest: str, deadline_s: float) -> None:
        if digest in member.resident:
            self.slot_hits += 1
            self._generate(request, member)
            return

        def loaded(error: NoFreeSlot | None) -> None:
            member.running -= 1
            if error is None:
                self._generate(request, member)
            elif self._clock.now_s >= deadline_s:
                self._fail(request, "no_free_slot")
            else:
                again = partial(self._with_adapter, request, member, digest, deadline_s)
                self._clock.at(self._clock.now_s + RETRY_SLOT_S, again)

        member.running += 1
        key = (member.name, digest)
        if key in self._loading:
            request.tier = "engine"
            self._loading[key].append(loaded)
            return
        self._loading[key] = [loaded]
        self.loads += 1
        self._load(request, member, digest)

    def _load(self, request: Request, member: Member, digest: str) -> None:
        engine = self._system.engines[member.name]

        def finish(error: NoFreeSlot | None) -> None:
            if error is None:
                member.resident[digest] = None
            for waiter in self._loading.pop((member.name, digest)):
                waiter(error)

        def arrived(tier: str) -> None:
            request.tier = tier
            engine.load(digest, probe_base)

        def probe_base(error: NoFreeSlot | None) -> None:
            if error is not None:
                finish(error)
            elif member.name in self.probed:
                probe_version()
            else:
                self.probed.add(member.name)
                engine.submit(_probe(None, probe_version))

        def probe_version() -> None:
            try:
                engine.submit(_probe(digest, lambda: finish(None)))
            except AdapterNotFound:
                finish(NoFreeSlot("put out before it was probed"))

        self._system.store_of(engine).read(digest, arrived)

    def _generate(self, request: Request, member: Member) -> None:
        def first() -> None:
            request.ttft_s = self._clock.now_s + setup.after_s - request.arrival_s

        def done() -> None:
            member.running -= 1
            request.done_s = self._clock.now_s
            self._leave(request, service(request.prompt, request.tokens))

        setup = self._system.setup
        member.running += 1
        try:
            self._system.engines[member.name].submit(
                Sequence(request.prompt, request.tokens, request.digest, first, done)
            )
        except AdapterNotFound:
            assert request.digest is not None
            member.running -= 1
            if member.resident.pop(request.digest, self) is not self:
                self.stale += 1
            request.attempts += 1
            if request.attempts >= MAX_RELOADS:
                self._fail(request, "no_free_slot")
            else:
                self._choose(request, [])

    def _fail(self, request: Request, why: str) -> None:
        request.failed = why
        self._leave(request, 0.0)


def _probe(digest: str | None, done: Callable[[], None]) -> Sequence:
    return Sequence(len(probe.PROMPT), probe.SAMPLING.max_tokens, digest, lambda: None, done)


@dataclass
class System:
    """Engines placed on nodes, stores, routers. `offer` requests, then run the clock."""

    setup: Setup
    times: StepTimes
    scaling: ScalingLimits | None = None
    clock: Clock = field(default_factory=Clock)
    engines: dict[str, Engine] = field(default_factory=dict)
    engine_s: float = 0.0  # engine seconds, starts included

    def __post_init__(self) -> None:
        setup = self.setup
        most = max(setup.engines, setup.max_engines)
        nodes = -(-most // setup.gpus_per_node)
        self._nodes = [
            NodeView(str(i), {ACCELERATOR_LABEL: "H200"}, {"GPU": setup.gpus_per_node}, {"GPU": setup.gpus_per_node})
            for i in range(nodes)
        ]
        self.stores = [Store(self.clock, setup) for _ in range(setup.stores or nodes)]
        for _ in range(setup.engines):
            self._place()
        self.routers = [Router(self, [Member(name) for name in self.engines]) for _ in range(setup.routers)]
        self._turn = itertools.count()
        self._watch, self._state = LoadWatch(), ScalingState()
        self._starting, self._draining, self._counted_s = 0, "", 0.0
        self.engines_over_time: list[tuple[float, int]] = [(0.0, setup.engines)]

    def _place(self) -> None:
        """An engine on the first node of a kind that fits and has room."""
        choice = first_that_fits([Choice({ACCELERATOR_LABEL: "H200"})], {"GPU": 1}, self._nodes)
        assert choice is not None, "there are nodes for max_engines"
        at = next(i for i, node in enumerate(self._nodes) if not lacking({"GPU": 1}, node.free))
        node, setup = self._nodes[at], self.setup
        self._nodes[at] = NodeView(node.node_id, node.labels, node.total, {"GPU": node.free["GPU"] - 1})
        self.engines[f"base.{len(self.engines):04}"] = Engine(
            self.clock, self.times, SlotMap(setup.slots), setup.seats, setup.prompt_tokens, setup.load_s, node=at
        )

    def store_of(self, engine: Engine) -> Store:
        return self.stores[engine.node % len(self.stores)]

    def warm(self, digests: list[str]) -> None:
        """The state after a long run, near enough: the most asked-for versions lie in one slot each, known to the router that
        loaded them, and in the memory of the store that sent them. digests: most asked-for first.
        """
        names = list(self.engines)
        for index, digest in enumerate(digests[: len(names) * self.setup.slots]):
            name = names[index % len(names)]
            slots = self.engines[name].slots
            int_id, _ = slots.reserve(digest)
            assert int_id is not None
            slots.commit(digest, int_id)
            self.routers[index % len(self.routers)].roster.engines[name].resident[digest] = None
        kept = [self.setup.host_bytes // self.setup.adapter_bytes] * len(self.stores)
        for index, digest in enumerate(digests):
            at = index % len(self.stores)
            if kept[at]:
                kept[at] -= 1
                self.stores[at].cache.keep(digest, {"": np.broadcast_to(np.uint8(0), (self.setup.adapter_bytes,))})

    def offer(self, requests: list[Request]) -> None:
        for request in requests:
            router = self.routers[next(self._turn) % len(self.routers)]
            self.clock.at(request.arrival_s + self.setup.before_s, router.arrive, request)

    def run(self, until_s: float) -> None:
        """Requests that are under way at `until_s` stay unanswered."""
        if self.scaling is not None:
            self.clock.at(TICK_S, self._tick)
        self.clock.run(until_s)
        self._count_engines(until_s)

    def _count_engines(self, now_s: float) -> None:
        self.engine_s += (len(self.engines) + self._starting) * (now_s - self._counted_s)
        self._counted_s = now_s

    def _tick(self) -> None:
        """As the pool's round: while one engine starts or ends its requests, nothing else is decided."""
        now = self.clock.now_s
        self.clock.at(now + TICK_S, self._tick)
        if self._draining and self.engines[self._draining].idle:
            self._gone(self._draining)
        if self._starting or self._draining:
            return
        loads = [
            self._watch.load(
                name,
                engine.slots.loaded(),
                slots=self.setup.slots,
                running=engine.rows,
                waiting=len(engine.waiting),
                kv_share=0.0,
                now_s=now,
            )
            for name, engine in self.engines.items()
        ]
        assert self.scaling is not None
        decision = decide(loads, self.scaling, self._state, now, leased=True)
        self._state = decision.state
        if decision.engines > len(self.engines):
            self._count_engines(now)
            self._starting = 1
            self.clock.at(now + self.setup.start_s, self._started)
        elif decision.engines < len(self.engines):
            self._drain(list(self.engines)[-1])

    def _started(self) -> None:
        self._count_engines(self.clock.now_s)
        self._starting = 0
        self._place()
        name = list(self.engines)[-1]
        for router in self.routers:
            router.roster.engines[name] = Member(name)
        self.engines_over_time.append((self.clock.now_s, len(self.engines)))

    def _drain(self, name: str) -> None:
        """The engine takes nothing new; it goes when it has nothing left to do."""
        self._draining = name
        for router in self.routers:
            router.roster.draining.add(name)

    def _gone(self, name: str) -> None:
        self._count_engines(self.clock.now_s)
        self._draining = ""
        node = self._nodes[self.engines[name].node]
        self._nodes[self.engines[name].node] = NodeView(
            node.node_id, node.labels, node.total, {"GPU": node.free["GPU"] + 1}
        )
        del self.engines[name]
        for router in self.routers:
            router.roster.draining.discard(name)
            del router.roster.engines[name]
        self.engines_over_time.append((self.clock.now_s, len(self.engines)))
