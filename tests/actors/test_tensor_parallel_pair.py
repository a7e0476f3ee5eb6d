"""A tensor-parallel pair under the pool, for real: a vLLM engine of two CPU ranks and a trainer of two on its shards.

Killing a process of the trainer's takes the trainer down within a bound, one of the engine's both; what went comes back whole, on
the same base.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.adapter_store import NAMESPACE
from actors.engine_pool import BaseRequest, get_or_create_pool
from epilora.adapters.digest import adapter_digest
from epilora.types import AdapterSpec, AdapterVersion, GenerateRequest, Rollout, RolloutGroup, Sampling

sys.path.append(str(Path(__file__).resolve().parents[1] / "plugin"))
import tiny

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
NOTICED_S = 60.0  # bound on noticing that a process is gone and taking the pair down
SPEC = AdapterSpec(8, 16.0, ("all-linear",))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    q, kv = 4 * tiny.HEAD_DIM, 2 * tiny.HEAD_DIM
    monkeypatch.setattr(tiny, "HEADS", 4)
    monkeypatch.setattr(tiny, "KV_HEADS", 2)
    for leaf, shape in {"q_proj": (q, 96), "k_proj": (kv, 96), "v_proj": (kv, 96), "o_proj": (96, q)}.items():
        monkeypatch.setitem(tiny.SHAPES, leaf, ("self_attn", *shape))
    model = tiny.make_model(tmp_path / "even")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False,
        object_store_memory=100 << 20, _system_config={"prestart_worker_first_driver": False},
    )  # fmt: skip
    environment = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    request = BaseRequest(
        name="pair",
        trainer_name="pair-trainer",
        engine_factory="epilora.plugin.engine:VllmEngine",
        engine_kwargs={
            "name": "pair", "model_path": str(model), "tensor_parallel": 2, "max_model_len": 128, "max_num_seqs": 8,
            "max_loras": 3, "kv_cache_bytes": 16 << 20,
        },
        trainer_factory="epilora.trainer.sharded:ShardedTrainer",
        trainer_kwargs={"ranks": 2, "timeout_s": 120},
        bundle={"CPU": 1.0},
        engine_options={"num_cpus": 0},
        trainer_options={"num_cpus": 0},
        environment=environment,
    )  # fmt: skip
    pool = get_or_create_pool(str(tmp_path / "store"))
    yield pool, request
    ray.get(pool.shutdown.remote(), timeout=120)
    ray.shutdown()


def actor(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def ask(method: Any, *args: Any) -> Any:
    return ray.get(method.remote(*args), timeout=200)


def ranks_of(name: str, mark: str) -> list[psutil.Process]:
    """The processes below an actor whose command line has `mark`."""
    below = psutil.Process(ask(actor(name).pid)).children(recursive=True)
    return [process for process in below if any(mark in word for word in process.cmdline())]


def train_and_publish(step: int) -> tuple[str, float]:
    """One step on what the engine says, and the adapter in the engine; its digest, and the largest |d log p| after it."""
    engine, trainer = actor("pair"), actor("pair-trainer")
    sampling = Sampling(max_tokens=6, temperature=1.0, logprobs=0, ignore_eos=True, seed=step)
    prompts = ("1+2=", "12+3=")
    done = ask(engine.generate, [GenerateRequest(f"{step}-{i}", prompts[i], sampling) for i in range(2)])
    rollouts = tuple(
        Rollout("p", c.prompt_token_ids, c.token_ids, c.logprobs, float(i), ("v",)) for i, c in enumerate(done)
    )
    ask(trainer.train_rl, "s", [RolloutGroup("p", rollouts)], {})
    spec, tensors = ask(trainer.adapter, "s")
    version = AdapterVersion("policy", step, adapter_digest(spec, tensors), spec)
    ask(engine.load_adapter, version, tensors)
    pairs = [(c.prompt_token_ids, c.token_ids) for c in done]
    scores, own = ask(engine.score, pairs, version.digest), ask(trainer.logprobs, "s", pairs)
    return version.digest, max(abs(a - b) for s, o in zip(scores, own, strict=True) for a, b in zip(s, o, strict=True))


def test_a_pair_trains_and_comes_back_whole_when_a_process_is_killed(pair) -> None:
    pool, request = pair
    ask(pool.ensure, request, "job", 180.0)
    checksum = ask(actor("pair").base_checksum)
    for name, mark, going in (
        ("pair-trainer", "rank_process", ("pair-trainer",)),
        ("pair", "VLLM::Worker", ("pair", "pair-trainer")),
    ):
        ask(actor("pair-trainer").open_session, "s", SPEC, {"lr": 1e-2}, 5)
        made = [train_and_publish(step) for step in (1, 2)]
        assert made[0][0] != made[1][0]
        assert max(apart for _, apart in made) < 1e-4
        assert ask(actor("pair").base_checksum) == checksum
        pids = [ask(actor(each).pid) for each in going]
        processes = ranks_of(name, mark)
        assert len(processes) == 2, [p.cmdline() for p in processes]
        everything = [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]
        began = time.monotonic()
        processes[1].kill()
        _, alive = psutil.wait_procs([*everything, *map(psutil.Process, pids)], timeout=NOTICED_S)
        assert not alive, [p.cmdline() for p in alive]
        noticed_s = time.monotonic() - began
        ask(pool.ensure, request, "job", 180.0)
        print(f"{mark} killed: {going} down after {noticed_s:.1f} s, back after {time.monotonic() - began:.1f} s")
        assert not set(pids) & {ask(actor(each).pid) for each in going}
        assert ask(actor("pair").base_checksum) == checksum
    ask(actor("pair-trainer").open_session, "s", SPEC, {"lr": 1e-2}, 5)
    assert train_and_publish(1)[1] < 1e-4
