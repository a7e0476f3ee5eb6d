"""The RL loop: sample groups from the current version, reward them, take one optimizer step, publish the adapter.

Synchronous with `max_staleness=0`: a step's rollouts come from the version that step trains. With k > 0, k batches are being
sampled while one trains, each under the version that was current when it was submitted; a batch is never mixed from two
versions and is at most k optimizer steps old when it trains.

A version is loaded beside its predecessor and under a name of its own, so rollouts and tenants in flight finish on the
version they began with. The predecessor's slot is given back when no batch uses it.

Written against awaitable parts (actors/handles.py): Ray actors in production, plain objects in tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epilora.config.schema import Correction, JobConfig
from epilora.errors import BaseMismatch, EpiloraError
from epilora.sizing import RECIPES
from epilora.tasks.base import RewardError, checked_score
from epilora.types import (
    AdapterDraft,
    AdapterSpec,
    AdapterVersion,
    Completion,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    Sampling,
)
from jobs.checkpoints import Checkpoints, LoopState
from jobs.screening import Screening, StepScreening

logger = logging.getLogger(__name__)

MAX_TURN_WAIT_S = 5.0  # how long a training step lets tenants' promises go first
MISMATCH = "mismatch/mean_abs_dlogp"  # the trainer's metric that operators see


@dataclass(frozen=True)
class Batch:
    """Rollouts of one step. policy_step: optimizer steps the sampling version had seen; generate_s: wall time; screened: what
    was left out.
    """

    index: int
    groups: tuple[RolloutGroup, ...]
    version: AdapterVersion
    policy_step: int
    generate_s: float
    screened: StepScreening


class Policy:
    """What new batches are sampled from. key: what requests name, a version's digest or a draft's id; step: optimizer steps
    it has seen.
    """

    def __init__(self, key: str, step: int, sealing: asyncio.Future[AdapterVersion]) -> None:
        self.key, self.step, self._sealing = key, step, sealing

    @classmethod
    def known(cls, version: AdapterVersion, step: int) -> Policy:
        """A version that is durable already."""
        sealed: asyncio.Future[AdapterVersion] = asyncio.get_running_loop().create_future()
        sealed.set_result(version)
        return cls(version.digest, step, sealed)

    @property
    def is_sealed(self) -> bool:
        return self._sealing.done()

    @property
    def version(self) -> AdapterVersion:
        """Of a sealed policy (see `sealed`)."""
        return self._sealing.result()

    async def sealed(self) -> AdapterVersion:
        """The version, once it is durable and the engine has been checked. Raises what publishing raised."""
        return await asyncio.shield(self._sealing)

    async def abandon(self) -> None:
        """Wait for no version any more."""
        self._sealing.cancel()
        await asyncio.gather(self._sealing, return_exceptions=True)


def policy_name(run: str) -> str:
    """Of a run: its adapter's name, its trainer session and the holder of its pins."""
    return f"policy-{run}"


def rollout_seed(run_seed: int, step: int, problem: int, sample: int) -> int:
    """A 31-bit seed that depends on all four numbers and on nothing else."""
    text = f"{run_seed}/{step}/{problem}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") & 0x7FFFFFFF


def config_digest(config: JobConfig) -> str:
    """Of everything that a resumed run must keep."""
    kept: dict[str, Any] = {
        key: asdict(getattr(config, key)) for key in ("lora", "optimizer", "loss", "task", "trainer")
    }
    kept["rl"] = {
        k: v for k, v in asdict(config.rl).items() if k not in ("steps", "min_step_s", "eval_every", "keep_checkpoints")
    }
    kept["engine"] = {k: v for k, v in asdict(config.engine).items() if k != "name"}
    kept["seed"] = config.seed
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


class RLLoop:
    """One run of one policy. `record(step, metrics)` is called after every step."""

    def __init__(
        self,
        config: JobConfig,
        *,
        engine: Any,
        trainer: Any,
        store: Any,
        task: Any,
        run_dir: Path,
        record: Callable[[int, Mapping[str, float]], None],
        drafts: bool = True,
    ) -> None:
        """drafts: whether the engine takes adapters where the trainer has them, before they are durable (on one GPU)."""
        self.config = config
        self._drafts = drafts
        self._engine, self._trainer, self._store, self._task = engine, trainer, store, task
        self._record = record
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.rl.keep_checkpoints)
        self._screening = Screening(run_dir, config.rl.left_out_share)
        self.name = policy_name(config.name)
        self.session = self.name
        self.step = 0
        self.cursor = 0
        self.policy: Policy | None = None
        self.versions_published = 0
        self._pending: deque[tuple[asyncio.Task[Batch], Policy]] = deque()
        self._retired: list[Policy] = []
        self._config_digest = config_digest(config)

    async def take_up_again(self, *, engine: Any, trainer: Any, store: Any) -> None:
        """After a part died: go on at the last checkpoint, on the parts that stand in its place."""
        self._engine, self._trainer, self._store = engine, trainer, store
        for policy in [*self._retired, *([self.policy] if self.policy is not None else [])]:
            await policy.abandon()
        self._retired, self.policy = [], None
        await self.start(resume=True)

    async def start(self, *, resume: bool = False) -> None:
        """Open the trainer's session, or take up the last checkpoint if the caller or the configuration says so."""
        info = await self._engine.info()
        self._base_digest, self._base_model = info.base_digest, info.model_name
        self._context_tokens = info.max_model_len
        if self.config.deterministic:
            await self._wait_until_idle()
        await self._drop_left_over_versions()
        lora = self.config.lora
        spec = AdapterSpec(lora.rank, lora.alpha, tuple(lora.target_modules))
        optimizer = {
            "lr": self.config.optimizer.lr,
            "betas": (self.config.optimizer.beta1, self.config.optimizer.beta2),
            "eps": self.config.optimizer.eps,
            "weight_decay": self.config.optimizer.weight_decay,
            "grad_clip": self.config.optimizer.grad_clip,
            "warmup_steps": self.config.optimizer.warmup_steps,
        }
        await self._trainer.close_session(self.session)
        await self._trainer.open_session(self.session, spec, optimizer, self.config.seed)
        found = self._checkpoints.latest() if resume or self.config.resume else None
        if found is None:
            await self._publish()
            await self._settle()
            return
        state, trainer_state = found
        if state.config_digest != self._config_digest:
            raise ValueError(
                f"checkpoint step {state.step} was written under other settings (digest {state.config_digest[:12]}, now "
                f"{self._config_digest[:12]}); resume with the run's own config.yaml, or start a run under another name"
            )
        await self._trainer.load_state(self.session, trainer_state)
        version = await self._store.resolve(state.policy_digest)
        if version.base_digest != self._base_digest:
            raise BaseMismatch(
                f"{version.ref} was trained on base {version.base_digest[:12]}, the engine holds {self._base_digest[:12]}"
            )
        await self._load(version, await self._store.tensors(version.digest))
        self.step, self.cursor = state.step, state.cursor
        self.policy = Policy.known(version, state.step)
        logger.info("resumed %s at step %d with %s", self.name, self.step, version.ref)

    async def _wait_until_idle(self) -> None:
        """Batches are repeatable only if nobody else's rows are in them: wait for what a killed run left under way."""
        deadline = time.monotonic() + self.config.ready_timeout_s
        while (stats := await self._engine.stats()).running + stats.waiting > 0:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"deterministic=true needs an engine of its own; {stats.running} running and {stats.waiting} waiting requests "
                    f"did not end within {self.config.ready_timeout_s:g} s. Stop the other jobs, or give engine.name another name"
                )
            await asyncio.sleep(0.05)

    async def _drop_left_over_versions(self) -> None:
        """Free slots that a killed run of this name left filled."""
        stats = await self._engine.stats()
        for draft_id in stats.drafts:
            if draft_id.startswith(f"{self.name}/"):
                await self._unload(draft_id)
        for digest in stats.loaded:
            version = await self._store.resolve(digest)
            if version.name == self.name:
                await self._unload(digest)

    async def run(self) -> None:
        """Train until `rl.steps`. Cancelling leaves the last checkpoint, from which `resume=true` goes on."""
        rl = self.config.rl
        next_batch, next_cursor = self.step, self.cursor

        def ask() -> None:
            nonlocal next_batch, next_cursor
            while len(self._pending) <= rl.max_staleness and next_batch < rl.steps:
                assert self.policy is not None
                task = asyncio.create_task(self._sample(next_batch, next_cursor, self.policy))
                self._pending.append((task, self.policy))
                next_batch += 1
                next_cursor += rl.prompts_per_step

        try:
            while self.step < rl.steps:
                start = time.monotonic()
                ask()
                batch = await self._pending[0][0]
                self._pending.popleft()
                metrics = await self._train(batch)
                metrics["time/step_s"] = time.monotonic() - start
                self._record(self.step, metrics)
                if self.policy is not None and not self.policy.is_sealed:
                    ask()  # sampling goes on while the version becomes durable
                await self._settle()
                if rl.min_step_s:
                    await asyncio.sleep(max(0.0, rl.min_step_s - (time.monotonic() - start)))
        finally:
            for task, _ in self._pending:
                task.cancel()
            await asyncio.gather(*(task for task, _ in self._pending), return_exceptions=True)
            self._pending.clear()

    async def _sample(self, index: int, cursor: int, policy: Policy) -> Batch:
        rl = self.config.rl
        asked = [self._task.problem("train", cursor + i) for i in range(rl.prompts_per_step)]
        screened = self._screening.of_step(index, len(asked))
        problems = [problem for problem in asked if await self._fits(problem, screened)]
        if self.config.deterministic:
            await self._engine.reset_prefix_cache()
        centering = self.config.loss.correction is Correction.score_centering
        requests = [
            GenerateRequest(
                request_id=f"rollout-{self.config.name}-{index}-{i}-{j}",
                prompt=problem.prompt,
                sampling=Sampling(
                    max_tokens=rl.max_tokens,
                    temperature=rl.temperature,
                    stop=tuple(rl.stop),
                    seed=rollout_seed(self.config.seed, index, i, j),
                    logprobs=self.config.loss.centering_top_k if centering else 0,
                ),
                adapter=policy.key,
                kind="rollout",
                client=f"job:{self.config.name}",
            )
            for i, problem in enumerate(problems)
            for j in range(rl.group_size)
        ]
        start = time.monotonic()
        try:
            completions = await self._engine.generate(requests)
        except asyncio.CancelledError:
            await self._engine.abort([r.request_id for r in requests])
            raise
        took = time.monotonic() - start
        version = await policy.sealed()
        groups = []
        for i, problem in enumerate(problems):
            try:
                groups.append(self._group(problem, completions[i * rl.group_size : (i + 1) * rl.group_size], policy))
            except RewardError as err:
                screened.leave_out("reward_failed", problem.problem_id, err)
        return Batch(index, tuple(groups), version, policy.step, took, screened)

    async def _fits(self, problem: Any, screened: StepScreening) -> bool:
        """Whether prompt and answer fit the engine's context; reports the problem if not."""
        room = self._context_tokens - self.config.rl.max_tokens
        if len(problem.prompt.encode()) <= room:  # a token is at least one byte
            return True
        tokens = len(await self._engine.tokenize(problem.prompt))
        if tokens <= room:
            return True
        why = f"{tokens} tokens and rl.max_tokens={self.config.rl.max_tokens} exceed {self._context_tokens} (engine.max_model_len)"
        screened.leave_out("prompt_too_long", problem.problem_id, why)
        return False

    def _group(self, problem: Any, completions: list[Completion], policy: Policy) -> RolloutGroup:
        rollouts = []
        for completion in completions:
            if completion.adapter != policy.key:
                raise EpiloraError(
                    f"rollout {completion.request_id} was answered under {completion.adapter}, asked for {policy.version.ref}"
                )
            rollouts.append(
                Rollout(
                    problem_id=problem.problem_id,
                    prompt_token_ids=completion.prompt_token_ids,
                    token_ids=completion.token_ids,
                    rollout_logprobs=completion.logprobs,
                    reward=checked_score(self._task.score, completion.text, problem),
                    versions=(policy.version.digest,),
                    policy_step=policy.step,
                    finish_reason=completion.finish_reason,
                    text=completion.text,
                    top_logprobs=completion.top_logprobs,
                )
            )
        return RolloutGroup(problem.problem_id, tuple(rollouts))

    async def _train(self, batch: Batch) -> dict[str, float]:
        staleness = self.step - batch.policy_step
        assert staleness <= self.config.rl.max_staleness, f"batch {batch.index} is {staleness} steps old"
        released = not RECIPES[self.config.trainer.placement].kv_kept
        waited_s = await self._engine.trainer_turn(MAX_TURN_WAIT_S)
        start = time.monotonic()
        if released:
            await self._engine.release_kv(self.config.engine.tenant_kv_share)
        loss = asdict(self.config.loss) | {"correction": self.config.loss.correction.value}
        del loss["centering_top_k"]  # the engine's part of it, see `_sample`
        trained = await self._trainer.train_rl(self.session, batch.groups, loss)
        if released:
            await self._engine.restore_kv()
        train_s = time.monotonic() - start
        self.step += 1
        self.cursor += self.config.rl.prompts_per_step
        rollouts = [r for group in batch.groups for r in group.rollouts]
        curves = {"reward": sum(r.reward for r in rollouts) / len(rollouts), "mismatch": trained.get(MISMATCH)}
        start = time.monotonic()
        await self._publish(curves)
        publish_s = time.monotonic() - start
        tokens = sum(len(r.token_ids) for r in rollouts)
        return {
            "rollout/reward_mean": curves["reward"],
            "rollout/accuracy": sum(r.reward >= 1.0 for r in rollouts) / len(rollouts),
            "rollout/well_formed": sum(self._task.well_formed(r.text) for r in rollouts) / len(rollouts),
            "rollout/tokens": tokens,
            "rollout/tok_s": tokens / batch.generate_s,
            "rollout/staleness_steps": staleness,
            **batch.screened.metrics(),
            **{key if "/" in key else f"train/{key}": value for key, value in trained.items()},
            "time/generate_s": batch.generate_s,
            "time/turn_wait_s": waited_s,
            "time/train_s": train_s,
            "time/publish_s": publish_s,
        }

    async def _publish(self, curves: Mapping[str, Any] | None = None) -> None:
        """Publish the session's adapter as a new version, load it, make it the policy.

        curves: figures of the step that made it, kept with the version for operators to see.
        """
        shared = None
        if self._drafts:
            spec, shared = await self._trainer.shared_adapter(self.session)
        if shared is None:
            spec, tensors = await self._trainer.adapter(self.session)
            version = await self._store_version(spec, tensors, curves)
            await self._load(version, tensors)
            policy = Policy.known(version, self.step)
        else:
            draft_id = f"{self.name}/{self.step}/{uuid.uuid4().hex[:8]}"
            draft = AdapterDraft(draft_id, self.name, spec, self._base_digest, self._base_model)
            await self._engine.load_draft(draft, shared)
            await self._engine.pin_adapter(draft_id, self.name)
            policy = Policy(draft_id, self.step, asyncio.create_task(self._seal(draft_id, curves)))
        self.versions_published += 1
        if self.policy is not None:
            self._retired.append(self.policy)
        self.policy = policy

    async def _store_version(
        self, spec: AdapterSpec, tensors: Mapping[str, Any], curves: Mapping[str, Any] | None
    ) -> AdapterVersion:
        return await self._store.publish(
            self.name,
            spec,
            tensors,
            base_model=self._base_model,
            base_digest=self._base_digest,
            metadata={"step": self.step, "run": self.config.name, **(curves or {})},
            owner=f"job:{self.config.name}",
        )

    async def _seal(self, draft_id: str, curves: Mapping[str, Any] | None) -> AdapterVersion:
        """Make a draft's content durable and have the engine check what it samples from; before the next optimizer step."""
        spec, tensors, folded_digest = await self._trainer.adapter_and_digest(self.session)
        version = await self._store_version(spec, tensors, curves)
        await self._engine.seal_draft(draft_id, version, folded_digest)
        return version

    async def _settle(self) -> None:
        """Save the step that was just recorded, then free what nothing uses any more.

        In this order: a crash in between repeats a recorded step, it never loses one.
        """
        assert self.policy is not None
        version = await self.policy.sealed()
        if self.step % self.config.rl.checkpoint_every == 0 or self.step == self.config.rl.steps:
            state = LoopState(self.step, self.cursor, version.digest, self._config_digest)
            self._checkpoints.save(state, await self._trainer.state(self.session))
        used = {version.digest} | {(await policy.sealed()).digest for _, policy in self._pending}
        await self._unload_retired(used)

    async def _load(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> None:
        """Load a version and pin it: tenants' adapters make room for one another, never out of a policy's slot."""
        receipt = await self._engine.load_adapter(version, tensors)
        if receipt.readback_digest != receipt.expected_digest:
            raise EpiloraError(
                f"{version.ref}: slot {receipt.slot} holds {receipt.readback_digest[:12]}, the version folds to "
                f"{receipt.expected_digest[:12]}; the engine did not load what was published"
            )
        await self._engine.pin_adapter(version.digest, self.name)

    async def _unload_retired(self, used: set[str]) -> None:
        digests = [(await policy.sealed()).digest for policy in self._retired]
        for digest in dict.fromkeys(digests):
            if digest not in used:
                await self._unload(digest)
        self._retired = [policy for policy in self._retired if policy.version.digest in used]

    async def _unload(self, digest: str) -> None:
        await self._engine.unpin_adapter(digest, self.name)
        await self._engine.unload_adapter(digest)

    async def close(self, *, keep_policy: bool = True) -> None:
        """Free slots of retired versions and the trainer's session; the policy stays loaded if `keep_policy`."""
        policy = None if self.policy is None else (await self.policy.sealed()).digest
        await self._unload_retired(set() if policy is None else {policy})
        if not keep_policy and policy is not None:
            await self._unload(policy)
        await self._trainer.close_session(self.session)
