"""Small frozen records shared by every layer. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ADAPTER_DTYPES = ("bf16", "fp8", "nvfp4")  # formats an adapter may be served in


def check_adapter_dtype(adapter_dtype: str, where: str = "") -> None:
    """Raise ValueError for a format that no adapter is served in; the message begins with `where`."""
    if adapter_dtype not in ADAPTER_DTYPES:
        raise ValueError(f"{where}adapter_dtype={adapter_dtype!r}; allowed: {', '.join(ADAPTER_DTYPES)}")


@dataclass(frozen=True)
class AdapterSpec:
    """What a LoRA adapter is, in PEFT's terms.

    target_modules: suffixes of checkpoint module names, e.g. ("q_proj", "v_proj").
    rank_pattern, alpha_pattern: (module-name pattern, value) pairs, PEFT's meaning.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()

    @property
    def scaling(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable version of an adapter.

    name: the adapter's name; version: 1, 2, ... within it; digest: sha256 of spec and tensors (hex).
    base_digest: digest of the base codes it was trained on, "" if unknown. metadata: free, JSON-able (step, reward ...).
    """

    name: str
    version: int
    digest: str
    spec: AdapterSpec
    base_digest: str = ""
    base_model: str = ""
    created_s: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    owner: str = ""  # tenant the name belongs to; "" is shared by all

    @property
    def ref(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    @property
    def kv_namespace(self) -> str:
        """Name under which an engine caches keys and values: unique to the content, so no version reads another's."""
        return f"{self.name}@{self.version}#{self.digest[:16]}"


@dataclass(frozen=True)
class Sampling:
    """How to sample a completion. temperature 0 is greedy; seed None draws from the engine's generator."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no truncation
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: plus the k likeliest
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to make.

    request_id: unique. kind: "tenant" or "rollout" (engine counters keep them apart).
    client: the tenant or job it is made for; weight: its share against others (epilora/fairness).
    ttft_budget_ms: what is left of a promised time to first token when the engine gets it, 0: no promise.
    prompt: text, or token ids. adapter: digest of a version already loaded into the engine; None: the plain base.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    kind: str = "tenant"
    client: str = ""
    weight: float = 1.0
    ttft_budget_ms: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished completion. logprobs: natural log of the probability of each sampled token, [len(token_ids)].

    top_logprobs: per token the (token id, logprob) pairs asked for. adapter: digest that was applied, None for the base.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str  # "stop", "length" or "abort"
    adapter: str | None = None
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class TokenChunk:
    """A piece of a streamed completion: the new tokens and text since the last chunk; finish_reason on the last one.

    adapter: digest that was applied, None for the base.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class LoadReceipt:
    """Proof of what an engine holds after loading a version.

    slot: index of the adapter slot. readback_digest: sha256 of the slot's buffers; expected_digest: of the version's folded
    tensors as they should lie there. modules: base modules the adapter covers; base_modules: linear modules the base has.
    """

    digest: str
    slot: int
    readback_digest: str
    expected_digest: str
    modules: int
    base_modules: int
    load_ms: float


@dataclass(frozen=True)
class AdapterDraft:
    """An adapter's content while it has no version yet: sampled from at once, durable and visible to others later.

    draft_id: unique; requests name it as their adapter until the version's digest is known. name, spec, base_digest,
    base_model: as the version will have them.
    """

    draft_id: str
    name: str
    spec: AdapterSpec
    base_digest: str = ""
    base_model: str = ""

    @property
    def kv_namespace(self) -> str:
        """Name under which an engine caches keys and values: unique to the draft."""
        return f"{self.name}@draft#{self.draft_id}"


@dataclass(frozen=True)
class DraftReceipt:
    """A draft is in a slot: it can be sampled from. It is checked when a version seals it. Fields as in LoadReceipt."""

    draft_id: str
    slot: int
    modules: int
    base_modules: int
    load_ms: float


@dataclass(frozen=True)
class Rollout:
    """One sampled answer with what training needs.

    problem_id names the question; versions: digests of the adapter versions its tokens were sampled from (one unless
    generation spanned an update); rollout_logprobs: the engine's, aligned with token_ids. top_logprobs: per token the
    sampler's likeliest (token id, logprob) pairs, which score centering needs.
    """

    problem_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    reward: float
    versions: tuple[str, ...]
    policy_step: int = 0
    finish_reason: str = "stop"
    text: str = ""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class RolloutGroup:
    """All rollouts of one problem: the unit advantages are computed over."""

    problem_id: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is: identity, limits, arithmetic."""

    name: str
    model_path: str
    model_name: str
    base_digest: str
    activations: str  # "w8a8" or "w8a16"
    dtype: str
    quantization: str
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    vllm_version: str
    plugin_active: bool
    linear_modules: tuple[str, ...]  # checkpoint-side names of the linear modules an adapter may target
    eos_token_id: int | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since start. mixed_steps: engine steps whose batch held a tenant row and a rollout row together.

    rollout_seats: rollouts that may be in the batch now; seat_cuts: times a tenant's promise took some of them away.
    """

    steps: int
    mixed_steps: int
    tenant_rows: int
    rollout_rows: int
    running: int
    waiting: int
    kv_usage: float
    loaded: tuple[str, ...]  # digests
    paths: dict[str, int] = field(default_factory=dict)  # calls per dispatch path
    rollout_seats: int = 0
    seat_cuts: int = 0
    drafts: tuple[str, ...] = ()  # ids of drafts in slots that no version has sealed
