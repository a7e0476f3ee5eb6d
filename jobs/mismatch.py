"""Where engine and trainer differ: log pi_engine - log pi_trainer of sampled tokens, taken apart into weights, activations, kernels.

    python -m jobs.mismatch --config configs/rl_small.yaml [evaluation.adapter=NAME] [engine.activations=w8a8] [--dry-run]

The engine samples `rl.prompts_per_step` x `rl.group_size` answers; three trainers compute the same tokens:

    16-bit weights (the checkpoint's)  --dW-->  the engine's codes  --dA-->  ... activations rounded too  --dK-->  the engine

so that dW + dA + dK is the whole difference to a trainer of 16-bit weights, token by token. A matched engine rounds no activations:
its dA is zero by construction and dK is its difference to the trainer on its codes. Writes mismatch.json into the run's folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from epilora.config.schema import Activations, JobConfig
from epilora.loading import load_object
from epilora.tasks import load_task
from epilora.types import AdapterVersion, GenerateRequest, Sampling
from jobs.command import job_main, prepare_run_dir
from jobs.loop import rollout_seed
from jobs.system import System, trainer_factory, trainer_kwargs

# The trainers, by what they are told beside the configuration's own.
TRAINERS: dict[str, dict[str, Any]] = {
    "16_bit": {"own": "16bit"},
    "codes": {"own": ""},
    "codes_rounded": {"own": "", "round_activations": True},
}


def decompose(
    engine: Sequence[float], trainers: Mapping[str, Sequence[float]], *, rounds: bool
) -> dict[str, list[float]]:
    """dW, dA, dK of every token (nats), and `total`, their sum. engine: its log p; trainers: by the names of TRAINERS; rounds:
    whether the engine rounds activations.
    """
    last = "codes_rounded" if rounds else "codes"
    parts = {
        "dW": [a - b for a, b in zip(trainers["codes"], trainers["16_bit"], strict=True)],
        "dA": [a - b for a, b in zip(trainers[last], trainers["codes"], strict=True)],
        "dK": [a - b for a, b in zip(engine, trainers[last], strict=True)],
    }
    return parts | {"total": [a - b for a, b in zip(engine, trainers["16_bit"], strict=True)]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean size, root mean square and largest size of differences of log-probabilities."""
    return {
        "mean_abs": sum(map(abs, values)) / len(values),
        "rms": math.sqrt(sum(v * v for v in values) / len(values)),
        "max_abs": max(map(abs, values)),
    }


def k3_kl(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Estimate of KL(engine || trainer) per token on the engine's samples: mean of exp(d) - 1 - d, d = trainer - engine."""
    return sum(math.expm1(t - e) - (t - e) for e, t in zip(engine, trainer, strict=True)) / len(engine)


async def measure(
    config: JobConfig, engine: Any, make: Any, version: AdapterVersion | None, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Sample, compute with each trainer in turn, take apart. engine: awaitable part; make: the trainer's class; the version is loaded already."""
    task = load_task(config.task.path, **config.task.args)
    requests = [
        GenerateRequest(
            request_id=f"rollout-mismatch-{i}-{j}",
            prompt=task.problem("train", i).prompt,
            sampling=Sampling(
                max_tokens=config.rl.max_tokens,
                stop=tuple(config.rl.stop),
                seed=rollout_seed(config.seed, 0, i, j),
                logprobs=0,
            ),
            adapter=None if version is None else version.digest,
            kind="rollout",
        )
        for i in range(config.rl.prompts_per_step)
        for j in range(config.rl.group_size)
    ]
    answers = [c for c in await engine.generate(requests) if c.token_ids]
    sampled = [value for c in answers for value in c.logprobs]
    sequences = [(c.prompt_token_ids, c.token_ids) for c in answers]
    manifests = await engine.export_weights()
    computed: dict[str, list[float]] = {}
    for name, told in TRAINERS.items():
        trainer = make(**trainer_kwargs(config) | {"offloaded": False} | told)
        trainer.attach(manifests)
        if version is not None:
            trainer.open_adapter("m", version.spec, tensors)
        found = trainer.logprobs(None if version is None else "m", sequences)
        computed[name] = [value for one in found for value in one]
        trainer.close()
    rounds = config.engine.activations is Activations.w8a8 and config.engine.quantization != "none"
    parts = decompose(sampled, computed, rounds=rounds)
    return {
        "activations": config.engine.activations.value,
        "dtype": config.engine.dtype,
        "adapter": "base" if version is None else version.ref,
        "tokens": len(sampled),
        "parts": {name: spread(values) for name, values in parts.items()},
        "kl_engine_to": {name: k3_kl(sampled, values) for name, values in computed.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    head = (
        f"{result['adapter']}, {result['activations']} engine, {result['dtype']}, {result['tokens']} sampled tokens\n"
        f"{'log p differs by':<34}{'mean |d|':>12}{'rms':>12}{'max |d|':>12}"
    )
    says = {"dW": "dW, rounding weights", "dA": "dA, rounding activations", "dK": "dK, kernels", "total": "total"}
    lines = [
        f"{says[name]:<34}{found['mean_abs']:>12.2e}{found['rms']:>12.2e}{found['max_abs']:>12.2e}"
        for name, found in result["parts"].items()
    ]
    lines += [
        f"KL(engine || trainer: {name}){'':<{10 - len(name) % 10}}{kl:.3e}"
        for name, kl in result["kl_engine_to"].items()
    ]
    return "\n".join([head, *lines])


async def run(config: JobConfig) -> dict[str, Any]:
    """Measure on a running or a new base."""
    run_dir = prepare_run_dir(config)
    async with System(config, router=False) as system:
        version, tensors = None, {}
        if config.evaluation.adapter:
            version = await system.store.resolve(config.evaluation.adapter)
            tensors = await system.store.tensors(version.digest)
            await system.engine.load_adapter(version, tensors)
        result = await measure(config, system.engine, load_object(trainer_factory(config)), version, tensors)
    (run_dir / "mismatch.json").write_text(json.dumps(result, indent=1))
    print(table(result))
    return result


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
