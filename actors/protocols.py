"""What the parts promise one another. No Ray, no torch at import.

Each Protocol is satisfied by a plain class in `epilora` (tested without Ray) and, method for method, by the Ray actor that
wraps it; calls through an actor handle return object refs of the same values. Adapter tensors travel as
`dict[str, array]` under PEFT's keys (`base_model.model.<module>.lora_A.weight`), fp32, scaling *not* folded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from epilora.quant.manifest import WeightManifest
from epilora.types import (
    AdapterDraft,
    AdapterSpec,
    AdapterVersion,
    Completion,
    DraftReceipt,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    RolloutGroup,
    TokenChunk,
)

Tensors = Mapping[str, Any]


class Engine(Protocol):
    """One low-precision copy of a base model that samples from it under any loaded adapter."""

    def info(self) -> EngineInfo: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All of `requests`, submitted together between two engine steps; order kept.

        Raises AdapterNotFound (digest not loaded), PromptTooLong.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """One request, chunk by chunk. Closing the iterator aborts the request and frees its rows."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def load_adapter(self, version: AdapterVersion, tensors: Tensors) -> LoadReceipt:
        """Put a version into a free slot, from memory. Idempotent by digest.

        Raises AdapterRejected (module, shape it has, shape it should have; zero coverage), NoFreeSlot, BaseMismatch.
        """
        ...

    async def load_draft(self, draft: AdapterDraft, tensors: Any) -> DraftReceipt:
        """Put a trainer's tensors (`Trainer.shared_adapter`) into a slot; requests may name the draft at once.

        Raises as `load_adapter`, ValueError for a draft id that was used before.
        """
        ...

    async def seal_draft(self, draft_id: str, version: AdapterVersion, folded_digest: str) -> LoadReceipt:
        """The draft is durable as `version` and goes by its digest too. Checked against the slot and against
        `folded_digest` of what was stored; raises AdapterRejected, and the draft leaves, if they differ.
        """
        ...

    async def pin_adapter(self, digest: str, holder: str) -> None:
        """Keep a loaded version in its slot until `holder` unpins it: loading others never puts it out."""
        ...

    async def unpin_adapter(self, digest: str, holder: str) -> None: ...

    async def unload_adapter(self, digest: str) -> None:
        """Free the slot once no live request uses it, unless it is pinned. Raises AdapterNotFound."""
        ...

    async def score(
        self, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], adapter: str | None
    ) -> list[list[float]]:
        """Log-probabilities of each (prompt, completion)'s completion tokens under `adapter`."""
        ...

    async def export_weights(self) -> list[WeightManifest]:
        """Manifest per tensor-parallel rank. The first call moves the base into shareable memory; later calls repeat it."""
        ...

    async def base_checksum(self) -> str:
        """sha256 of the base's codes and scales, recomputed from memory now; equals EngineInfo.base_digest unless damaged."""
        ...

    async def release_kv(self, keep_fraction: float = 0.0) -> int:
        """Drop KV blocks while a trainer needs the memory; bytes released. Prefix caches of dropped blocks are reset."""
        ...

    async def restore_kv(self) -> None: ...

    async def trainer_turn(self, max_wait_s: float) -> float:
        """Wait until no tenant's promised time to first token is in danger, at most `max_wait_s`; seconds waited."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def tokenize(self, text: str) -> tuple[int, ...]: ...

    def detokenize(self, token_ids: Sequence[int]) -> str: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Prompt token ids of a conversation by the model's chat template. Raises ValueError if it has none."""
        ...

    def tool_call_start(self) -> str:
        """What a tool call in this model's text begins with, "" if that is not known."""
        ...

    def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """(text without the calls, calls in OpenAI's form); what cannot be read as a call stays text."""
        ...

    def close(self) -> None: ...


class Trainer(Protocol):
    """LoRA parameters and optimizer state of several sessions, computing on the engine's exported codes."""

    def attach(self, manifests: Sequence[WeightManifest]) -> None:
        """Map the base read-only. Raises BaseMismatch if the bytes do not have the manifest's digest."""
        ...

    def open_session(self, session: str, spec: AdapterSpec, optimizer: Mapping[str, Any], seed: int) -> None: ...

    def close_session(self, session: str) -> None: ...

    def train_rl(self, session: str, groups: Sequence[RolloutGroup], loss: Mapping[str, Any]) -> dict[str, float]:
        """One optimizer step of policy gradient. Metrics: loss, mismatch (mean/max |delta log p|, k3), clip and mask fractions."""
        ...

    def train_rl_together(
        self, requests: Sequence[tuple[str, Sequence[RolloutGroup], Mapping[str, Any]]]
    ) -> list[dict[str, float] | Exception]:
        """`train_rl` of several sessions over mixed batches; what one would raise stands in its place."""
        ...

    def train_sft(self, session: str, examples: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, float]:
        """One optimizer step of cross entropy on (prompt, completion) pairs, completion tokens only."""
        ...

    def logprobs(
        self, session: str | None, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> list[list[float]]: ...

    def predict(
        self, spec: AdapterSpec, tensors: Tensors, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """`logprobs` under the base and under an adapter that is no session's."""
        ...

    def adapter(self, session: str) -> tuple[AdapterSpec, dict[str, Any]]: ...

    def adapter_and_digest(self, session: str) -> tuple[AdapterSpec, dict[str, Any], str]:
        """`adapter`, and `epilora.adapters.fold.folded_digest` of what it returns."""
        ...

    def shared_adapter(self, session: str) -> tuple[AdapterSpec, Any]:
        """Spec and handles of the tensors where they lie, for `Engine.load_draft` on the same GPU; None off a GPU."""
        ...

    def state(self, session: str) -> bytes:
        """Everything needed to go on bit for bit: parameters, moments, step, RNG."""
        ...

    def load_state(self, session: str, state: bytes) -> None: ...

    def close(self) -> None:
        """Let go of the base; nothing else may be called afterwards."""
        ...

    def check(self) -> None:
        """Raise TrainerDead if a rank of the trainer is gone. May be called beside another call; never waits for it."""
        ...

    def memory(self) -> dict[str, int]:
        """private_bytes, peak_private_bytes, shared_bytes (the mapped base), largest_dequantised_bytes."""
        ...


class AdapterStore(Protocol):
    """The durable truth about adapters."""

    def publish(
        self,
        name: str,
        spec: AdapterSpec,
        tensors: Tensors,
        *,
        base_model: str,
        base_digest: str,
        metadata: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> AdapterVersion:
        """A new immutable version (or the existing one, if the content is the latest's). Durable when it returns."""
        ...

    def resolve(self, ref: str) -> AdapterVersion:
        """`name` (what the name points at), `name@version`, or a digest (prefix of >= 12). Raises AdapterNotFound."""
        ...

    def tensors(self, digest: str) -> dict[str, Any]: ...

    def promote(self, name: str, version: int) -> AdapterVersion: ...

    def rollback(self, name: str) -> AdapterVersion: ...

    def pin(self, digest: str, holder: str) -> None: ...

    def unpin(self, digest: str, holder: str) -> None: ...

    def list(self, *, offset: int = 0, limit: int = 100, owner: str | None = None) -> list[AdapterVersion]: ...

    def gc(self, keep_latest: int = 3) -> Sequence[str]: ...
