"""The RL loop on plain parts: which version a batch is sampled from, what is loaded when, staleness, resume, refusals."""

import asyncio
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.handles import LocalPart
from actors.spread import EngineSet
from epilora.config import load_config
from epilora.errors import AdapterRejected, BaseMismatch, EngineDead, EpiloraError
from epilora.tasks.base import Problem, RewardError
from epilora.trainer.loss import LossConfig
from epilora.types import AdapterSpec, AdapterVersion, Completion, EngineStats, LoadReceipt
from jobs.loop import MAX_TURN_WAIT_S, RLLoop, rollout_seed


class Engine:
    """Answers every prompt with its adapter's digest; remembers what was loaded and when it was used."""

    def __init__(self) -> None:
        self.loaded: dict[str, AdapterVersion] = {}
        self.peak = 0
        self.batches: list[str] = []
        self.prefix_resets = 0
        self.pins: set[tuple[str, str]] = set()
        self.kv: list[str] = []
        self.hang_at_batch: int | None = None
        self.readback = ""
        self.answer_with: str | None = None
        self.aborted: list[str] = []
        self.turns: list[tuple[int, float]] = []
        self.drafts: dict[str, str] = {}  # id -> what it was loaded from
        self.sealed: list[tuple[str, str]] = []
        self.refuse_to_seal = False
        self.asked: list[int] = []
        self.dies_in_batch: int | None = None

    def info(self):
        return SimpleNamespace(base_digest="base", model_name="m", max_model_len=64)

    def tokenize(self, text):
        return tuple(text.split())

    def stats(self):
        return EngineStats(0, 0, 0, 0, 0, 0, 0.0, tuple(self.loaded), drafts=tuple(self.drafts))

    async def trainer_turn(self, max_wait_s):
        self.turns.append((len(self.batches), max_wait_s))
        return 0.25

    async def generate(self, requests):
        digest = requests[0].adapter
        assert self.holds(digest), "asked for a version that is not loaded"
        self.batches.append(digest)
        self.asked.append(len(requests))
        if len(self.batches) == self.dies_in_batch:
            await asyncio.sleep(0.01)
            raise EngineDead("killed")
        if len(self.batches) == self.hang_at_batch:
            await asyncio.Event().wait()
        assert self.holds(digest), "version was unloaded while its batch was running"
        return [
            Completion(
                r.request_id,
                (1,),
                (2, 3),
                str(r.sampling.seed % 2),
                (-0.5, -0.5),
                "stop",
                self.answer_with or digest,
                top_logprobs=(((2, -0.5),) * r.sampling.logprobs,) * 2,
            )
            for r in requests
        ]

    async def abort(self, ids):
        self.aborted += ids

    async def load_adapter(self, version, tensors):
        self.loaded[version.digest] = version
        self.peak = max(self.peak, len(self.loaded))
        return LoadReceipt(version.digest, 0, self.readback or "same", "same", 1, 1, 0.1)

    def holds(self, key):
        """A draft's id means its version once that is sealed."""
        return key in self.drafts or dict(self.sealed).get(key, key) in self.loaded

    async def load_draft(self, draft, tensors):
        self.drafts[draft.draft_id] = tensors
        self.peak = max(self.peak, len(self.loaded) + len(self.drafts))

    async def seal_draft(self, draft_id, version, folded_digest):
        await asyncio.sleep(0)
        if self.refuse_to_seal:
            raise AdapterRejected("its slot reads back other bytes than were loaded")
        assert folded_digest == f"folded {self.drafts.pop(draft_id)}"
        self.loaded[version.digest] = version
        self.sealed.append((draft_id, version.digest))
        self.pins = {(version.digest if key == draft_id else key, holder) for key, holder in self.pins}

    async def pin_adapter(self, digest, holder):
        self.pins.add((digest, holder))

    async def unpin_adapter(self, digest, holder):
        self.pins.discard((digest, holder))

    async def unload_adapter(self, digest):
        del (self.drafts if digest in self.drafts else self.loaded)[digest]

    async def reset_prefix_cache(self):
        self.prefix_resets += 1

    async def release_kv(self, keep):
        self.kv.append("release" if not keep else f"release all but {keep}")

    async def restore_kv(self):
        self.kv.append("restore")


class Trainer:
    """Counts steps; its adapter's content is the history of the rewards it saw."""

    def __init__(self) -> None:
        self.sessions: dict[str, list] = {}
        self.on_gpu = False

    def open_session(self, session, spec, optimizer, seed):
        self.spec = spec
        self.sessions[session] = [seed]

    def close_session(self, session):
        self.sessions.pop(session, None)

    def train_rl(self, session, groups, loss):
        self.loss = loss
        self.groups = groups
        self.sessions[session].append(sum(r.reward for g in groups for r in g.rollouts))
        return {"loss": 0.5, "mismatch/mean_abs_dlogp": 1e-7}

    def adapter(self, session):
        return AdapterSpec(4, 8.0, ("all-linear",)), {"a": list(self.sessions[session])}

    def shared_adapter(self, session):
        return AdapterSpec(4, 8.0, ("all-linear",)), str(self.sessions[session]) if self.on_gpu else None

    def adapter_and_digest(self, session):
        return *self.adapter(session), f"folded {self.sessions[session]}"

    def state(self, session):
        return json.dumps(self.sessions[session]).encode()

    def load_state(self, session, state):
        self.sessions[session] = json.loads(state)


class Store:
    def __init__(self) -> None:
        self.by_digest: dict[str, tuple[AdapterVersion, dict]] = {}
        self.metadata: list[dict] = []

    def publish(self, name, spec, tensors, *, base_model, base_digest, metadata=None, owner=""):
        self.metadata.append(metadata)
        digest = hashlib.sha256(json.dumps([name, tensors["a"]]).encode()).hexdigest()
        if digest not in self.by_digest:
            number = sum(v.name == name for v, _ in self.by_digest.values()) + 1
            self.by_digest[digest] = (AdapterVersion(name, number, digest, spec, base_digest), tensors)
        return self.by_digest[digest][0]

    def resolve(self, ref):
        return self.by_digest[ref][0]

    def tensors(self, digest):
        return self.by_digest[digest][1]


class Task:
    name = "test"

    def size(self, split):
        return 1000

    def problem(self, split, index):
        return Problem(f"{split}-{index}", "1+1=", "2")

    def score(self, text, problem):
        return float(text)

    def well_formed(self, text):
        return True


def make(tmp_path: Path, *overrides: str, parts=None, task=None, engines=None):
    """engines: several at once, by key; the loop has an EngineSet of them then."""
    config = load_config(
        None,
        ["engine.model_path=m", "task.path=a:b", "rl.prompts_per_step=3", "rl.group_size=2", "rl.steps=6",
         "trainer.placement=shared_kv_kept", *overrides],
    )  # fmt: skip
    engine, trainer, store = parts or (Engine(), Trainer(), Store())
    records: list[tuple[int, dict]] = []
    loop = RLLoop(
        config, engine=LocalPart(engine) if engines is None else spread(engines), drafts=engines is None, trainer=LocalPart(trainer), store=LocalPart(store), task=task or Task(),
        run_dir=tmp_path, record=lambda step, metrics: records.append((step, metrics)),
    )  # fmt: skip
    return loop, engine, trainer, store, records


def spread(engines: dict[str, Engine]) -> EngineSet:
    async def find():
        return {key: LocalPart(engine) for key, engine in engines.items()}

    return EngineSet(find)


async def start_and_run(loop: RLLoop) -> None:
    await loop.start()
    await loop.run()


def test_synchronous_steps_sample_from_the_version_they_train(tmp_path: Path) -> None:
    loop, engine, trainer, store, records = make(tmp_path)
    asyncio.run(start_and_run(loop))
    assert [step for step, _ in records] == [1, 2, 3, 4, 5, 6]
    assert all(m["rollout/staleness_steps"] == 0 for _, m in records)
    versions = [store.by_digest[d][0].version for d in engine.batches]
    assert versions == [1, 2, 3, 4, 5, 6]
    assert loop.policy.version.version == 7  # the initial one and one per step
    assert engine.peak == 2  # the current version and its successor
    assert engine.pins == {(loop.policy.version.digest, "policy-run")}  # a tenant's load can never put the policy out
    assert set(engine.loaded) == {loop.policy.version.digest}
    expected = [sum(rollout_seed(0, step, i, j) % 2 for i in range(3) for j in range(2)) for step in range(6)]
    assert trainer.sessions[loop.session] == [0, *expected]
    assert engine.kv == []


@pytest.mark.parametrize("k", [1, 2])
def test_staleness_is_bounded_and_reached(tmp_path: Path, k: int) -> None:
    loop, engine, _, store, records = make(tmp_path, f"rl.max_staleness={k}", "rl.steps=8")
    asyncio.run(start_and_run(loop))
    assert [m["rollout/staleness_steps"] for _, m in records] == [min(i, k) for i in range(8)]
    versions = [store.by_digest[d][0].version for d in engine.batches]
    assert versions == [max(1, i + 1 - k) for i in range(8)]
    assert set(engine.loaded) == {loop.policy.version.digest}
    assert engine.peak <= 2 + k


def test_kv_is_released_only_around_training_when_configured(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path, "trainer.placement=shared_kv_released", "rl.steps=2")
    asyncio.run(start_and_run(loop))
    assert engine.kv == ["release", "restore"] * 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_on_a_gpu_sampling_begins_before_the_version_is_durable(tmp_path: Path, staleness: int) -> None:
    loop, engine, trainer, store, records = make(tmp_path, "rl.steps=4", f"rl.max_staleness={staleness}")
    trainer.on_gpu = True
    plain_publish, waited = store.publish, []

    def publish(*args, **kwargs):
        """Durable only once the step's successor is being sampled; steps 1 to 3 have one."""
        number = len(store.metadata)
        until = time.monotonic() + 5
        while 1 <= number <= 3 and len(engine.batches) < number + 1 and time.monotonic() < until:
            time.sleep(0.005)
        waited.append(time.monotonic() < until)
        return plain_publish(*args, **kwargs)

    store.publish = publish
    asyncio.run(start_and_run(loop))
    assert [step for step, _ in records] == [1, 2, 3, 4]
    sampled_from = [int(key.split("/")[1]) for key in engine.batches]
    assert sampled_from == [max(0, i - staleness) for i in range(4)]
    assert set(engine.loaded) == {loop.policy.version.digest}
    assert engine.drafts == {}
    assert engine.pins == {(loop.policy.version.digest, "policy-run")}
    assert [digest for _, digest in engine.sealed] == list(store.by_digest)
    assert waited == [True] * 5
    rollout = trainer.groups[0].rollouts[0]
    assert rollout.versions[0] in store.by_digest  # never a draft's id


def test_a_draft_that_cannot_be_sealed_ends_the_run(tmp_path: Path) -> None:
    loop, engine, trainer, *_ = make(tmp_path, "rl.steps=4")
    trainer.on_gpu = engine.refuse_to_seal = True
    with pytest.raises(AdapterRejected, match="other bytes"):
        asyncio.run(start_and_run(loop))


def test_drafts_that_a_killed_run_left_are_dropped(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path, "rl.steps=1")
    engine.drafts = {"policy-run/3/ab": "x", "policy-other/1/cd": "y"}
    asyncio.run(start_and_run(loop))
    assert list(engine.drafts) == ["policy-other/1/cd"]


def test_tenants_keep_their_share_of_the_cache(tmp_path: Path) -> None:
    overrides = ("trainer.placement=shared_kv_released", "engine.tenant_kv_share=0.25", "rl.steps=1")
    loop, engine, *_ = make(tmp_path, *overrides)
    asyncio.run(start_and_run(loop))
    assert engine.kv == ["release all but 0.25", "restore"]


def test_a_version_carries_the_figures_of_the_step_that_made_it(tmp_path: Path) -> None:
    loop, _, _, store, records = make(tmp_path, "rl.steps=2")
    asyncio.run(start_and_run(loop))
    assert store.metadata[0] == {"step": 0, "run": "run"}
    for (_, metrics), metadata in zip(records, store.metadata[1:], strict=True):
        assert metadata["reward"] == metrics["rollout/reward_mean"]
        assert metadata["mismatch"] == 1e-7


def test_every_training_step_waits_for_its_turn(tmp_path: Path) -> None:
    loop, engine, _, _, records = make(tmp_path, "rl.steps=3")
    asyncio.run(start_and_run(loop))
    assert engine.turns == [(1, MAX_TURN_WAIT_S), (2, MAX_TURN_WAIT_S), (3, MAX_TURN_WAIT_S)]
    assert [metrics["time/turn_wait_s"] for _, metrics in records] == [0.25] * 3


def test_the_trainer_gets_the_loss_as_configured(tmp_path: Path) -> None:
    loop, _, trainer, *_ = make(
        tmp_path, "rl.steps=1", "loss.name=dapo", "loss.correction=tis_token", "loss.clip_high=0.28"
    )
    asyncio.run(start_and_run(loop))
    config = LossConfig.from_mapping(trainer.loss)  # every key is one the trainer knows
    assert (config.name, config.correction, config.clip_high) == ("dapo", "tis_token", 0.28)
    assert trainer.groups[0].rollouts[0].top_logprobs == ((), ())


def test_score_centering_asks_the_engine_for_the_likeliest_tokens(tmp_path: Path) -> None:
    loop, _, trainer, *_ = make(tmp_path, "rl.steps=1", "loss.correction=score_centering", "loss.centering_top_k=7")
    asyncio.run(start_and_run(loop))
    assert [len(pairs) for pairs in trainer.groups[0].rollouts[0].top_logprobs] == [7, 7]
    assert LossConfig.from_mapping(trainer.loss).correction == "score_centering"


def test_deterministic_mode_resets_the_prefix_cache_every_step(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path, "deterministic=true")
    asyncio.run(start_and_run(loop))
    assert engine.prefix_resets == 6


def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, *_ = make(tmp_path / "whole")
    asyncio.run(start_and_run(whole))

    first, engine, _, store, _ = make(tmp_path / "cut", "rl.steps=3")
    asyncio.run(start_and_run(first))
    left_over = set(engine.loaded)
    second, _, _, _, records = make(tmp_path / "cut", "resume=true", parts=(engine, Trainer(), store))
    asyncio.run(start_and_run(second))
    assert [step for step, _ in records] == [4, 5, 6]
    assert second.policy.version.digest == whole.policy.version.digest
    assert second.cursor == whole.cursor == 18
    assert not left_over & set(engine.loaded)


def test_a_crash_between_record_and_checkpoint_repeats_the_step_and_loses_none(tmp_path: Path) -> None:
    first, engine, trainer, store, records = make(tmp_path)

    def power_cut(session):
        if len(records) == 3:
            raise OSError("power cut")
        return json.dumps(trainer.sessions[session]).encode()

    trainer.state = power_cut
    with pytest.raises(OSError, match="power cut"):
        asyncio.run(start_and_run(first))
    assert [step for step, _ in records] == [1, 2, 3]
    second, _, _, _, later = make(tmp_path, "resume=true", parts=(engine, Trainer(), store))
    asyncio.run(start_and_run(second))
    assert [step for step, _ in later] == [3, 4, 5, 6]
    whole, *_ = make(tmp_path / "whole")
    asyncio.run(start_and_run(whole))
    assert second.policy.version.digest == whole.policy.version.digest


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    first, engine, _, store, _ = make(tmp_path, "rl.steps=2")
    asyncio.run(start_and_run(first))
    second, *_ = make(tmp_path, "resume=true", "optimizer.lr=0.1", parts=(engine, Trainer(), store))
    with pytest.raises(ValueError, match="other settings"):
        asyncio.run(second.start())


def test_a_slot_that_holds_something_else_stops_the_run(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path)
    engine.readback = "damaged"
    with pytest.raises(EpiloraError, match="did not load what was published"):
        asyncio.run(loop.start())


def test_an_answer_under_another_adapter_stops_the_run(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path)
    engine.answer_with = "someone-else"
    with pytest.raises(EpiloraError, match="answered under someone-else"):
        asyncio.run(start_and_run(loop))


def test_a_nan_reward_names_the_problem(tmp_path: Path) -> None:
    class Bad(Task):
        def score(self, text, problem):
            return float("nan") if problem.problem_id == "train-4" else 0.0

    loop, *_ = make(tmp_path, task=Bad())
    with pytest.raises(EpiloraError, match=r"step 1: 1 of 3 groups cannot be trained on.*train-4") as caught:
        asyncio.run(start_and_run(loop))
    assert isinstance(caught.value.__cause__, RewardError)


def test_bad_rewards_and_prompts_are_reported_counted_and_never_trained_on(tmp_path: Path) -> None:
    class Bad(Task):
        def problem(self, split, index):
            prompt = {7: "word " * 57, 8: "long" * 14, 9: "w " * 29}.get(index, "1+1=")  # 57, 1 and 29 tokens
            return Problem(f"{split}-{index}", prompt, "2")

        def score(self, text, problem):
            return {"train-1": float("inf"), "train-4": float("nan")}.get(problem.problem_id, float(text))

    loop, _, trainer, _, records = make(tmp_path, "rl.left_out_share=0.5", "rl.steps=4", task=Bad())
    trained: list[list[str]] = []
    train = trainer.train_rl
    trainer.train_rl = lambda session, groups, loss: (
        trained.append([g.problem_id for g in groups]),
        train(session, groups, loss),
    )[1]
    asyncio.run(start_and_run(loop))
    assert trained == [
        ["train-0", "train-2"],
        ["train-3", "train-5"],
        ["train-6", "train-8"],
        ["train-9", "train-10", "train-11"],
    ]
    counts = [(m["rollout/reward_failed_groups"], m["rollout/prompt_too_long_groups"]) for _, m in records]
    assert counts == [(1, 0), (1, 0), (0, 1), (0, 0)]
    lines = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    assert [(line["step"], line["problem"], line["kind"]) for line in lines] == [
        (0, "train-1", "reward_failed"),
        (1, "train-4", "reward_failed"),
        (2, "train-7", "prompt_too_long"),
    ]
    assert "57 tokens and rl.max_tokens=8 exceed 64 (engine.max_model_len)" in lines[2]["why"]


def test_a_step_that_loses_more_than_its_share_or_everything_stops_the_run(tmp_path: Path) -> None:
    class Bad(Task):
        def score(self, text, problem):
            raise KeyError("no such answer")

    loop, *_ = make(tmp_path, "rl.left_out_share=0.5", task=Bad())
    with pytest.raises(
        EpiloraError, match=r"step 0: 2 of 3 groups .*rl.left_out_share=0.5.*KeyError: 'no such answer'"
    ):
        asyncio.run(start_and_run(loop))
    loop, *_ = make(tmp_path, "rl.left_out_share=0.9", "rl.prompts_per_step=1", task=Bad())
    with pytest.raises(EpiloraError, match="step 0: 1 of 1 groups"):
        asyncio.run(start_and_run(loop))


def test_cancelling_aborts_what_is_under_way_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    loop, engine, *_ = make(tmp_path, "rl.steps=50")
    engine.hang_at_batch = 4

    async def cut() -> None:
        await loop.start()
        running = asyncio.create_task(loop.run())
        while len(engine.batches) < 4:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cut())
    assert len(engine.aborted) == 6
    state = json.loads(sorted(tmp_path.glob("checkpoints/step-*"))[-1].joinpath("loop.json").read_text())
    assert state["step"] == loop.step == 3


def test_seeds_depend_on_every_part() -> None:
    cases = [(0, 1, 2, 3), (9, 1, 2, 3), (0, 9, 2, 3), (0, 1, 9, 3), (0, 1, 2, 9), (0, 12, 3, 3)]
    seeds = {rollout_seed(*case) for case in cases}
    assert len(seeds) == len(cases)
    assert all(0 <= s < 2**31 for s in seeds)


class Sums(Task):
    """As Task; every problem has a prompt of its own."""

    def problem(self, split, index):
        return Problem(f"{split}-{index}", f"{index}+1=", "2")


def run_spread(tmp_path: Path, engines: dict[str, Engine], *overrides: str):
    """A run over `engines`; what it records, and the policy that one engine would have made."""
    one, *_ = make(tmp_path / "one", *overrides, task=Sums())
    asyncio.run(start_and_run(one))
    loop, _, _, store, records = make(tmp_path / "spread", *overrides, engines=engines, task=Sums())
    asyncio.run(start_and_run(loop))
    assert [step for step, _ in records] == [1, 2, 3, 4, 5, 6]
    assert loop.policy.version.digest == one.policy.version.digest  # every rollout of every step was there
    return loop, store


def test_two_engines_share_a_steps_rollouts_and_both_hold_its_adapter(tmp_path: Path) -> None:
    engines = {"a": Engine(), "b": Engine()}
    loop, store = run_spread(tmp_path, engines)
    policy = loop.policy.version.digest
    for engine, share in zip(engines.values(), (4, 2), strict=True):  # 3 prompts of 2 answers: whole prompts
        assert [store.by_digest[digest][0].version for digest in engine.batches] == [1, 2, 3, 4, 5, 6]
        assert engine.asked == [share] * 6
        assert engine.peak == 2
        assert set(engine.loaded) == {policy}
        assert engine.pins == {(policy, "policy-run")}
    assert engines["a"].turns
    assert not engines["b"].turns  # only the first one shares its GPU with the trainer


def test_a_draft_is_not_made_for_engines_on_other_gpus(tmp_path: Path) -> None:
    engines = {"a": Engine(), "b": Engine()}
    loop, _, trainer, *_ = make(tmp_path, "rl.steps=2", engines=engines)
    trainer.on_gpu = True
    asyncio.run(start_and_run(loop))
    assert [engine.sealed for engine in engines.values()] == [[], []]
    assert set(engines["a"].loaded) == set(engines["b"].loaded) == {loop.policy.version.digest}


@pytest.mark.parametrize("dying", ["a", "b"])
def test_an_engine_lost_in_the_middle_of_a_step_loses_no_rollout(tmp_path: Path, dying: str) -> None:
    engines = {"a": Engine(), "b": Engine()}
    engines[dying].dies_in_batch = 3
    find = dict(engines)
    plain = engines[dying].generate

    async def generate(requests):
        try:
            return await plain(requests)
        except EngineDead:
            find.pop(dying)  # the pool sees it too
            raise

    engines[dying].generate = generate
    run_spread(tmp_path, find)
    other = engines["b" if dying == "a" else "a"]
    assert sum(other.asked) == 36 - sum(engines[dying].asked[:2])
    assert len(engines[dying].batches) == 3


def test_an_engine_that_comes_holds_the_policy_before_it_samples(tmp_path: Path) -> None:
    engines = {"a": Engine()}
    plain = engines["a"].generate

    async def generate(requests):
        if len(engines["a"].batches) == 2:
            engines["b"] = Engine()
        return await plain(requests)

    engines["a"].generate = generate
    run_spread(tmp_path, engines, "rl.max_staleness=1")
    assert engines["b"].asked == [2, 2, 2]  # asserts by itself that it holds what it is asked for
    assert len(engines["b"].pins) == 1


def test_no_engine_left_and_engines_of_two_models_end_the_run(tmp_path: Path) -> None:
    engine = Engine()
    engine.dies_in_batch = 2
    loop, *_ = make(tmp_path / "lost", engines={"a": engine})
    with pytest.raises(EngineDead, match="none of the base's engines is left"):
        asyncio.run(start_and_run(loop))
    other = Engine()
    other.info = lambda: SimpleNamespace(name="b", base_digest="other base", model_name="m", max_model_len=64)
    whole = Engine()
    whole.info = lambda: SimpleNamespace(name="a", base_digest="base", model_name="m", max_model_len=64)
    with pytest.raises(BaseMismatch, match="would come from two models"):
        asyncio.run(spread({"a": whole, "b": other}).join())
