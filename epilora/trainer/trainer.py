"""LoraTrainer: what the Trainer protocol (actors/protocols.py) promises, as a plain class.

It holds LoRA parameters and optimizer state of any number of named sessions. The base is the engine's, mapped (attach.py), or,
in the placements that need one, a copy of its own (own_base.py). Several sessions may train in one batch: the forward pass asks an AdapterContext which adapter
a projection applies to which rows.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from epilora.adapters.device_tensors import DeviceTensors
from epilora.adapters.fold import fold, folded_digest
from epilora.errors import BaseMismatch
from epilora.quant.manifest import WeightManifest
from epilora.types import AdapterSpec, RolloutGroup

from . import loss as losses
from .attach import MappedBase, attach_single
from .base import BaseWeights
from .batch import Layout, MicroBatch, TokenPair, layout_of, micro_batches
from .checkpoint import load_session_state, session_state
from .linear import LoraPair, Segment
from .logprob import selected_logprobs
from .memory import PeakMeter, anonymous_bytes, give_back_large_blocks, mapping_bytes, private_bytes
from .model import BaseModel, build_model
from .own_base import OwnBase, copy_codes, sixteen_bit
from .ranks import RankGroup, Ranks
from .rl_batch import RlBatch, prepare
from .session import Session
from .sharded_session import ShardedSession

OWN = ("", "fp8", "16bit")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoraTrainer:
    """See `actors.protocols.Trainer`. Not thread-safe: one call at a time."""

    def __init__(
        self,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        logprob_chunk: int = 2048,
        checkpoint_activations: bool = False,
        device: str = "cpu",
        gemm_mode: str = "panel",
        own: str = "",
        offloaded: bool = False,
        gives_memory_back: bool = False,
        round_activations: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        """dtype: of activations, "float32", "bfloat16" or "float16"; parameters and optimizer are fp32 always.

        micro_batch_tokens: tokens of one forward and backward pass, padding counted. logprob_chunk: most tokens whose
        logits exist at once. checkpoint_activations: recompute each layer in the backward pass, and have malloc give
        large blocks back at once (for the whole process): for models whose activations do not fit; slower by about a
        third. device: "cpu" or "cuda"; on a GPU batches are packed, and in 16 bits the linears run the training GEMMs in
        `gemm_mode` ("panel" or "registers", see `epilora.kernels.training`). own: "" computes on the engine's copy, "fp8" on
        a copy of its codes, "16bit" on the checkpoint's weights; offloaded: that copy waits in host memory between calls.
        gives_memory_back: the GPU memory of a call is free for others when it returns (the engine's KV cache comes back).
        round_activations: see `linear.AdapterContext`, a control for measurements. group: this trainer is one of several ranks
        (`ranks.py`): every method is called on all of them together, and returns the same on each but `base_checksum`,
        `shared_adapter` and `memory`, which are of this rank.
        """
        if dtype not in DTYPES:
            raise ValueError(f"trainer dtype={dtype!r}; allowed: {sorted(DTYPES)}")
        if own not in OWN or (offloaded and not own):
            raise ValueError(
                f"trainer own={own!r}, offloaded={offloaded}; allowed: own in {OWN}, offloaded with own only"
            )
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"trainer device={device!r}; allowed: cpu, cuda, cuda:N")
        if micro_batch_tokens < 1 or logprob_chunk < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}, logprob_chunk={logprob_chunk}; allowed: >= 1")
        self._dtype = DTYPES[dtype]
        self._micro_batch_tokens = micro_batch_tokens
        self._logprob_chunk = logprob_chunk
        self._checkpoint_activations = checkpoint_activations
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        self._packed = on_gpu
        self._own, self._offloaded = own, offloaded
        self._round_activations = round_activations
        self._gives_memory_back = gives_memory_back and on_gpu
        self._gemm_mode = gemm_mode if on_gpu and self._dtype != torch.float32 else None
        self._group = group
        self._ranks: Ranks | None = None
        self._manifests: tuple[WeightManifest, ...] = ()
        self._base_digest = ""  # of the whole base, all ranks
        self._base: BaseWeights | None = None
        self._model: BaseModel | None = None
        self._sessions: dict[str, Session] = {}
        self._meter = PeakMeter()
        if checkpoint_activations:
            give_back_large_blocks()

    # ---- base and sessions ----------------------------------------------------------------------------------------

    def attach(self, manifests: Sequence[WeightManifest]) -> None:
        """Map the base read-only and build the model on it. Attaching again to the same base does nothing.

        manifests: of all ranks of one engine. Raises BaseMismatch if the bytes do not have the manifest's digest, or if
        sessions are open on another base; UnsupportedKernel if the engine has another number of ranks.
        """
        if self._base is not None and tuple(manifests) == self._manifests:
            return
        ranks = None if self._group is None else Ranks(manifests, self._group)
        with self._meter:
            mapped = attach_single(manifests) if ranks is None else MappedBase(ranks.manifest)
            if self._own == "fp8":
                base: BaseWeights = copy_codes(mapped, self._device, offloaded=self._offloaded)
            elif self._own == "16bit":
                base = sixteen_bit(mapped, self._dtype, self._device, offloaded=self._offloaded, ranks=ranks)
            else:
                base = mapped
            self.use_base(base, ranks)
        self._manifests = tuple(manifests)

    def use_base(self, base: BaseWeights, ranks: Ranks | None = None) -> None:
        """Build the model on a base of this process. ranks: the others, if it is one rank's part.

        Raises BaseMismatch if sessions are open on another one.
        """
        found = base.manifest.base_digest if ranks is None else ranks.base_digest
        if self._sessions and self._base is not None and found != self._base_digest:
            raise BaseMismatch(
                f"sessions {sorted(self._sessions)} train on base {self._base_digest[:16]}, this "
                f"one is {found[:16]}; close them first"
            )
        with base.loaded():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the model's builder reads every layer
            self._model = build_model(
                base,
                self._dtype,
                checkpoint_activations=self._checkpoint_activations,
                gemm_mode=self._gemm_mode,
                ranks=ranks,
            )
        self._model.context.round_activations = self._round_activations
        self._base, self._base_digest, self._ranks = base, found, ranks

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """The base is at hand inside, and memory is watched."""
        with self._meter, self._attached[0].loaded():
            yield
        if self._gives_memory_back:
            torch.cuda.empty_cache()

    @property
    def vocab_size(self) -> int:
        return self._attached[1].vocab_size

    def base_checksum(self) -> str:
        """sha256 of the mapped codes and scales, computed now (on one of several ranks: of its part)."""
        return self._attached[0].digest()

    @property
    def _attached(self) -> tuple[BaseWeights, BaseModel]:
        if self._base is None or self._model is None:
            raise RuntimeError("the trainer has no base yet; call attach(manifests) first")
        return self._base, self._model

    def open_session(self, session: str, spec: AdapterSpec, optimizer: Mapping[str, Any], seed: int) -> None:
        """A new adapter, initialised from `seed`. optimizer: see `session.AdamWConfig`. Raises ValueError if it is
        open.
        """
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open; close it or choose another name")
        model = self._attached[1]
        if self._group is None:
            made = Session(session, spec, optimizer, seed, model.linear_shapes, self._device)
        else:
            made = ShardedSession(session, spec, optimizer, seed, model.cuts, self._group, self._device)
        self._sessions[session] = made

    def open_adapter(self, session: str, spec: AdapterSpec, tensors: Mapping[str, Any]) -> None:
        """A session that begins with an adapter: `tensors` as `adapter` gives them (PEFT keys, scaling not folded).

        Raises ValueError, opening nothing, if a tensor is missing, is one too many, or has another shape.
        """
        self.open_session(session, spec, {}, 0)
        try:
            self._session(session).load(tensors)
        except ValueError:
            self.close_session(session)
            raise

    def close_session(self, session: str) -> None:
        """Forget a session. One that is not open is ignored."""
        self._sessions.pop(session, None)

    def _session(self, session: str) -> Session:
        if session not in self._sessions:
            raise ValueError(f"no session {session!r}; open: {sorted(self._sessions)}")
        return self._sessions[session]

    def _micro(self, sequences: Sequence[TokenPair], layout: Layout) -> list[MicroBatch]:
        return micro_batches(sequences, layout, self._micro_batch_tokens, packed=self._packed)

    # ---- training -------------------------------------------------------------------------------------------------

    def train_rl(self, session: str, groups: Sequence[RolloutGroup], loss: Mapping[str, Any]) -> dict[str, float]:
        """`inner_steps` optimizer steps of policy gradient on one batch of rollouts. loss: see `loss.LossConfig`.

        Groups whose rewards are all equal are skipped; if all are, no step is taken (`skipped_step` is 1) and the
        mismatch is still measured. Raises ValueError naming the problem for rewards or log-probabilities that are not
        finite, FloatingPointError for a gradient that is not.
        """
        [result] = self.train_rl_together([(session, groups, loss)])
        if isinstance(result, Exception):
            raise result
        return result

    def train_rl_together(
        self, requests: Sequence[tuple[str, Sequence[RolloutGroup], Mapping[str, Any]]]
    ) -> list[dict[str, float] | Exception]:
        """`train_rl` of several sessions at once: their rows share the batches, so the base is multiplied once for all.

        requests: (session, groups, loss), each session once. What a request computes does not depend on the others but
        for the order of sums. Returns metrics in order; what `train_rl` would raise for one request stands in its place
        and leaves the others untouched. Raises ValueError if a session is named twice.
        """
        names = [name for name, _, _ in requests]
        if len(set(names)) != len(names):
            raise ValueError(f"train_rl_together: sessions {names}; each may be named once")
        results: list[dict[str, float] | Exception] = []
        batches: dict[int, RlBatch] = {}
        for index, (name, groups, loss) in enumerate(requests):
            try:
                batches[index] = prepare(self._session(name), groups, losses.LossConfig.from_mapping(loss))
                results.append(batches[index].counts())
            except ValueError as err:
                results.append(err)
        with self._computing():
            for index, metrics in self._rl_steps(batches).items():
                found = results[index]
                results[index] = (
                    metrics if isinstance(metrics, Exception) or isinstance(found, Exception) else found | metrics
                )
        return results

    def _rl_steps(self, batches: Mapping[int, RlBatch]) -> dict[int, dict[str, float] | Exception]:
        """The optimizer steps of all batches; metrics or what went wrong, by the batches' keys."""
        done: dict[int, dict[str, float] | Exception] = {}
        for key, batch in batches.items():
            pairs = batch.state.pairs
            if batch.skipped:
                done[key] = batch.skipped_metrics(*self._logprobs_of(batch.sequences, batch.layout, pairs))
                continue
            if batch.config.kl_coef:
                batch.reference = self._logprobs_of(batch.sequences, batch.layout, None)[0]
            if batch.config.inner_steps > 1:
                batch.old = self._logprobs_of(batch.sequences, batch.layout, pairs)[0]
        live = {key: batch for key, batch in batches.items() if not batch.skipped}
        inner = 0
        while live:
            self._rl_pass(list(live.values()))
            for key, batch in live.items():
                step = batch.metrics()
                try:
                    applied = batch.state.apply()
                except FloatingPointError as err:
                    done[key] = err
                    continue
                if inner == 0:
                    done[key] = step | applied | {"skipped_step": 0.0}
                else:  # the last inner step's: the first's is 0 by construction
                    done[key] = {**_metrics(done[key]), "clip_fraction": step["clip_fraction"]}
            inner += 1
            live = {
                key: batch
                for key, batch in live.items()
                if batch.config.inner_steps > inner and not isinstance(done[key], Exception)
            }
        return done

    def _rl_pass(self, batches: Sequence[RlBatch]) -> None:
        """Gradients of one pass over all batches, into their sessions."""
        sequences = [pair for batch in batches for pair in batch.sequences]
        owners = [number for number, batch in enumerate(batches) for _ in batch.sequences]
        first_token = [0]
        for batch in batches:
            batch.state.grad.zero_()
            first_token.append(first_token[-1] + batch.layout.num_tokens)
        width = max(0 if batch.heads is None else batch.heads[0].shape[1] for batch in batches)
        layout = layout_of(sequences)
        for micro in micro_batches(sequences, layout, self._micro_batch_tokens, packed=self._packed, owners=owners):
            parts = []  # (batch, its places in the micro-batch, its places on its own flat axis)
            extra = torch.zeros(len(micro.flat), width, dtype=torch.long) if width else None
            for number, batch in enumerate(batches):
                here = torch.nonzero((micro.flat >= first_token[number]) & (micro.flat < first_token[number + 1]))[:, 0]
                if len(here):
                    flat = micro.flat[here] - first_token[number]
                    parts.append((batch, here, flat))
                    if extra is not None and batch.heads is not None:
                        extra[here, : batch.heads[0].shape[1]] = batch.heads[0][flat]
            segments = [Segment(start, stop, batches[owner].state.pairs) for owner, start, stop in micro.spans]
            with self._attached[1].adapters(*segments):
                logp, entropy, head_logp = self._forward(micro, extra)
                total = torch.zeros(())
                for batch, here, flat in parts:
                    heads = None
                    if batch.heads is not None and head_logp is not None:
                        heads = head_logp[here][:, : batch.heads[0].shape[1]]
                    total = total + batch.loss(flat, logp[here], entropy[here], heads)
                total.backward()

    def train_sft(self, session: str, examples: Sequence[TokenPair]) -> dict[str, float]:
        """One optimizer step of cross entropy, mean over all completion tokens (nats). Raises ValueError for no
        examples.
        """
        if not examples:
            raise ValueError("train_sft: no examples")
        state = self._session(session)
        layout = layout_of(examples)
        with self._computing():
            state.grad.zero_()
            total, right = 0.0, 0.0
            for micro in self._micro(examples, layout):
                with self._attached[1].adapter(state.pairs):
                    logp, _, _ = self._forward(micro, None)
                    value = -logp.sum() / layout.num_tokens
                    value.backward()
                total += float(value.detach())
                right += float(logp.detach().exp().sum())
            applied = state.apply()
        return {
            "loss": total,
            "token_probability": right / layout.num_tokens,
            "tokens": float(layout.num_tokens),
            **applied,
        }

    # ---- reading --------------------------------------------------------------------------------------------------

    def logprobs(self, session: str | None, sequences: Sequence[TokenPair]) -> list[list[float]]:
        """Log-probabilities (nats) of each completion's tokens under a session's adapter, or under the base for
        None.
        """
        if not sequences:
            return []
        pairs = None if session is None else self._session(session).pairs
        layout = layout_of(sequences)
        with self._computing():
            logp, _ = self._logprobs_of(sequences, layout, pairs)
        return [part.tolist() for part in torch.split(logp, layout.lengths.tolist())]

    def predict(
        self, spec: AdapterSpec, tensors: Mapping[str, Any], sequences: Sequence[TokenPair]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """`logprobs` under the base and under an adapter that is no session's: what an engine that applies it must show.

        tensors: PEFT keys, scaling not folded. Raises ValueError if they are not `spec`'s on this base.
        """
        session = f"predict-{uuid.uuid4().hex}"
        self.open_adapter(session, spec, tensors)
        try:
            return self.logprobs(None, sequences), self.logprobs(session, sequences)
        finally:
            self.close_session(session)

    @torch.no_grad()
    def _logprobs_of(
        self, sequences: Sequence[TokenPair], layout: Layout, pairs: Mapping[str, LoraPair] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log p, entropy) of every completion token under one adapter, or the base for None, [T] each."""
        logp, entropy = torch.empty(layout.num_tokens), torch.empty(layout.num_tokens)
        with self._attached[1].adapter(pairs):
            for part in self._micro(sequences, layout):
                logp[part.flat], entropy[part.flat], _ = self._forward(part, None)
        return logp, entropy

    def _forward(
        self, micro: MicroBatch, extra_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log p of the targets [n], entropy [n], log p of extra_ids [n, H] or None) under the active adapter."""
        _, model = self._attached
        hidden = model.hidden(micro.ids, micro.lengths)
        hidden = hidden[micro.rows.to(hidden.device), micro.positions.to(hidden.device)]
        ids = micro.targets[:, None] if extra_ids is None else torch.cat([micro.targets[:, None], extra_ids], dim=1)
        chosen, entropy = selected_logprobs(
            hidden, model.head, ids.to(hidden.device), chunk=self._logprob_chunk, cut=model.head_cut
        )
        chosen, entropy = chosen.cpu(), entropy.cpu()  # a few floats a token: the loss is the same code everywhere
        return chosen[:, 0], entropy, None if extra_ids is None else chosen[:, 1:]

    def adapter(self, session: str) -> tuple[AdapterSpec, dict[str, Any]]:
        """Spec and tensors (numpy fp32, PEFT keys, scaling not folded); copies."""
        state = self._session(session)
        return state.spec, dict(state.export())

    def adapter_and_digest(self, session: str) -> tuple[AdapterSpec, dict[str, Any], str]:
        """`adapter`, and the folded digest of those very arrays, for `Engine.seal_draft`."""
        spec, tensors = self.adapter(session)
        return spec, tensors, folded_digest(fold(spec, tensors))

    def shared_adapter(self, session: str) -> tuple[AdapterSpec, DeviceTensors | None]:
        """Spec and handles of the tensors where they are, for an engine on the same GPU; None off a GPU.

        They may be read until the session's next step.
        """
        state = self._session(session)
        return state.spec, state.share() if self._device.type == "cuda" else None

    def state(self, session: str) -> bytes:
        """The session as bytes (see checkpoint.py); equal sessions give equal bytes."""
        return session_state(self._session(session), self._base_digest)

    def load_state(self, session: str, state: bytes) -> None:
        """Make an open session what was saved. Raises ValueError for another spec, optimizer or base."""
        load_session_state(self._session(session), state, self._base_digest)

    def close(self) -> None:
        """Let go of the base and forget every session."""
        self._sessions.clear()
        self._base = self._model = None
        self._manifests = ()

    def check(self) -> None:
        """Nothing to check: this trainer is one process. See `sharded.ShardedTrainer`."""

    def memory(self) -> dict[str, int]:
        """private_bytes, peak_private_bytes (since construction), shared_bytes (resident pages of the mapped base),
        base_bytes (all of it), largest_dequantised_bytes, own_base_bytes and pinned_bytes (of a copy of its own), and on a
        GPU device_bytes and peak_device_bytes that this process's tensors take (a mapped base is not among them)."""
        paths = () if self._base is None else self._base.paths
        own = self._base if isinstance(self._base, OwnBase) else None
        on_gpu = self._device.type == "cuda"
        private = private_bytes(paths)
        self._meter.sample()
        return {
            "private_bytes": private,
            "peak_private_bytes": private + max(0, self._meter.peak_bytes - anonymous_bytes()),
            "shared_bytes": mapping_bytes(paths)[0],
            "base_bytes": 0 if self._base is None else self._base.manifest.num_bytes,
            "largest_dequantised_bytes": 0 if self._model is None else self._model.context.largest_dequantised_bytes,
            "own_base_bytes": 0 if own is None else own.num_bytes,
            "pinned_bytes": 0 if own is None else own.pinned_bytes,
            "device_bytes": torch.cuda.memory_allocated(self._device) if on_gpu else 0,
            "peak_device_bytes": torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
        }


def _metrics(found: dict[str, float] | Exception) -> dict[str, float]:
    assert not isinstance(found, Exception), "a session that failed is out of the steps that follow"
    return found
