"""An adapter version stored in FP8 or NVFP4, served only if it passes the quality gate.

The copy is published as a version of its own under `NAME.FORMAT`, with the digest it came from and the gate's figures in its
metadata, loaded beside the original, and measured on the engine that will serve it: log-probabilities of the task's right
answers, and greedy answers to the same held-out problems. A copy that fails is unloaded and the original stays the one to serve;
the report says why. The verdict is kept in the store: routers serve accepted copies to tenants with that `adapter_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epilora.adapters.convert import ConvertedModule, convert, stored_tensors
from epilora.adapters.fold import fold
from epilora.adapters.gate import Check, GateLimits, Verdict, drift_check, task_check
from epilora.errors import EpiloraError
from epilora.quant.formats import Format
from epilora.types import AdapterSpec, AdapterVersion, GenerateRequest, Sampling

ADAPTER_DTYPES = {Format.FP8_E4M3: "fp8", Format.NVFP4: "nvfp4"}  # as tenants and the store name them


@dataclass(frozen=True)
class ConversionReport:
    """original, copy: the two versions. served: digest to serve from now on. relative_error: of each module's product, by module.
    accuracy_original, accuracy_copy: 0..1.
    """

    original: AdapterVersion
    copy: AdapterVersion
    verdict: Verdict
    relative_error: Mapping[str, float]
    accuracy_original: float
    accuracy_copy: float

    @property
    def served(self) -> str:
        return self.copy.digest if self.verdict.accepted else self.original.digest


async def convert_version(
    version: AdapterVersion,
    fmt: Format,
    *,
    engine: Any,
    store: Any,
    task: Any,
    problems: int,
    max_tokens: int,
    stop: tuple[str, ...] = (),
    method: str = "aware",
    limits: GateLimits | None = None,
    change: Callable[[dict[str, ConvertedModule]], dict[str, ConvertedModule]] | None = None,
) -> ConversionReport:
    """Convert, publish, load, measure, decide, record. Needs two free slots in `engine`; both versions stay loaded if accepted, the
    original alone if not. change: applied to the converted modules before they are published (a test's planted fault).
    """
    tensors = await store.tensors(version.digest)
    stored = convert(fold(version.spec, tensors), fmt, method=method)
    if change is not None:
        stored = change(stored)
    rank, copy_tensors = stored_tensors(stored)
    copy = await store.publish(
        f"{version.name}.{fmt.value}",
        AdapterSpec(rank, float(rank), version.spec.target_modules),
        copy_tensors,
        base_model=version.base_model,
        base_digest=version.base_digest,
        metadata={"converted_from": version.digest, "stored_as": fmt.value, "method": method},
        owner=version.owner,
    )
    for one, its_tensors in ((version, tensors), (copy, copy_tensors)):
        receipt = await engine.load_adapter(one, its_tensors)
        if receipt.readback_digest != receipt.expected_digest:
            raise EpiloraError(f"{one.ref}: the slot's content differs from the version's; nothing was decided")
    asked = [task.problem("held_out", i) for i in range(problems)]
    texts = [(await engine.tokenize(p.prompt), await engine.tokenize(p.answer)) for p in asked]
    base, original, converted = [
        [value for row in await engine.score(texts, digest) for value in row]
        for digest in (None, version.digest, copy.digest)
    ]
    answers = {
        digest: await _right_answers(engine, task, asked, digest, max_tokens, stop)
        for digest in (version.digest, copy.digest)
    }
    checks: tuple[Check, ...] = (
        drift_check(base, original, converted, limits),
        task_check(answers[version.digest], answers[copy.digest], limits),
    )
    verdict = Verdict(checks)
    await store.record_conversion(
        version.digest, (await engine.info()).base_digest, ADAPTER_DTYPES[fmt], copy.digest, accepted=verdict.accepted,
        report={"checks": [asdict(check) for check in checks], "reasons": list(verdict.reasons)},
    )  # fmt: skip
    if not verdict.accepted:
        await engine.unload_adapter(copy.digest)
    return ConversionReport(
        version,
        copy,
        verdict,
        {name: module.relative_error for name, module in stored.items()},
        sum(answers[version.digest]) / problems,
        sum(answers[copy.digest]) / problems,
    )


async def _right_answers(
    engine: Any, task: Any, asked: Sequence[Any], digest: str, max_tokens: int, stop: tuple[str, ...]
) -> list[bool]:
    requests = [
        GenerateRequest(
            f"rollout-gate-{digest[:12]}-{i}", p.prompt, Sampling(max_tokens=max_tokens, temperature=0.0, stop=stop), digest,
            "rollout",
        )
        for i, p in enumerate(asked)
    ]  # fmt: skip
    completions = await engine.generate(requests)
    for completion in completions:
        if completion.adapter != digest:
            raise EpiloraError(f"{completion.request_id} was answered under {completion.adapter}, asked for {digest}")
    return [task.score(c.text, p) >= 1.0 for c, p in zip(completions, asked, strict=True)]
