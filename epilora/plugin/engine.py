"""A vLLM engine that satisfies `actors.protocols.Engine`: one in-process LLMEngine, one thread that steps it.

Calls never touch the LLMEngine: they put work into the inbox of its `step_thread`, which drains it between two steps, so
requests submitted in one call enter the same step and an adapter is never swapped during one. Results come back through
the caller's event loop.

Log-probabilities are those of the distribution sampled from: after temperature, top-k and top-p (at temperature 1
without truncation, and for greedy requests without truncation, that is the plain log-softmax). `score` is always the
plain log-softmax.

Determinism: a request with a seed draws from its own generator, whatever else is in the batch. The same requests
submitted together to an idle engine after `reset_prefix_cache` see the same batches and give the same bits.

vLLM is imported by the constructor only (10 s).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from epilora.adapters.device_tensors import HandedOver
from epilora.adapters.digest import ranks_digest
from epilora.errors import EngineDead
from epilora.models import resolve_model_path
from epilora.quant.manifest import WeightManifest
from epilora.types import (
    AdapterDraft,
    AdapterVersion,
    Completion,
    DraftReceipt,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    TokenChunk,
)

from . import compat
from .build import build_engine, describe
from .environment import MARLIN, force_marlin, linear_suffixes, spare_positions
from .kv_blocks import KvRelease
from .requests import KINDS, Live, Preparer, nothing, to_loop
from .residents import Residents, check_base, check_content
from .step_thread import StepThread
from .tools import ToolCalls

_T = TypeVar("_T")

# vLLM wants this share of the GPU to be free when it starts; kv_cache_bytes says how large the cache is.
_LEAST_UTILIZATION = 0.05
_open_engines: set[int] = set()  # ids of this process's engines between start and close
_open_lock = threading.Lock()


class VllmEngine:
    """One base model, many adapters, sampled by many callers at once."""

    def __init__(
        self,
        *,
        name: str,
        model_path: str,
        dtype: str = "float32",
        quantization: str | None = "fp8_per_channel",
        activations: str = "w8a16",
        max_model_len: int = 512,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        tenant_seats: int = 0,
        max_loras: int = 4,
        max_lora_rank: int = 16,
        kv_cache_bytes: int = 64 << 20,
        seed: int = 0,
        target_modules: Sequence[str] | None = None,
        enable_prefix_caching: bool = True,
        block_size: int | None = None,
        shm_dir: str = "/dev/shm",
        tensor_parallel: int = 1,
        custom_all_reduce: bool = False,
        graph_sizes: Sequence[int] | None = None,
        load_format: str = "auto",
        compilation: Mapping[str, Any] | None = None,
        tool_parser: str = "hermes",
    ) -> None:
        """Load the model and start stepping; blocks until the engine is ready.

        name: of the engine, in manifests. model_path: folder with config.json, weights, tokenizer, or package:NAME. dtype: float32,
        bfloat16, float16. quantization: vLLM's name, None for none. activations: "w8a8" or "w8a16" (FP8 bases); or
        "marlin", vLLM's own weight-only kernel on a GPU: a control for measurements, whose repacked weights nobody can share.
        max_lora_rank: one of vLLM's (1, 8, 16, 32, 64, ...). target_modules: suffixes adapters may target; None: all
        linears.
        tenant_seats: how many of max_num_seqs rollouts leave free, so that a tenant never waits for a rollout to end.
        kv_cache_bytes: of the cache, on each GPU. block_size: tokens a cache block, None: vLLM's choice. shm_dir: for
        `export_weights` on the CPU. load_format: vLLM's; "dummy" makes random weights from config.json alone.
        tensor_parallel: ranks that share the model, each on a GPU of its own, or in a process of its own on the CPU.
        custom_all_reduce: whether ranks on GPUs may use vLLM's own all-reduce instead of NCCL's. On a
        GPU: graph_sizes: batch sizes CUDA graphs are captured for (vLLM
        chooses many if None; none at all if empty). compilation: more of vLLM's CompilationConfig. tool_parser: vLLM's name of
        how the model writes tool calls.

        Raises RuntimeError if the plugin is not active, UnsupportedKernel if the activations cannot be had, and what
        vLLM raises.
        """
        if activations not in ("w8a8", "w8a16", MARLIN):
            raise ValueError(f"VllmEngine: activations={activations!r}; allowed are w8a8, w8a16, {MARLIN}")
        if activations == MARLIN:
            force_marlin()
        if not 0 <= tenant_seats < max_num_seqs:
            raise ValueError(
                f"VllmEngine: tenant_seats={tenant_seats}; allowed are 0 to max_num_seqs - 1 = {max_num_seqs - 1}"
            )
        self.name = name
        model_path = str(resolve_model_path(model_path))
        self._shm_dir = shm_dir
        self._tensor_parallel = tensor_parallel
        self._closed = False
        self._close_lock = threading.Lock()
        arguments = {
            "model": model_path,
            "served_model_name": None,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len + spare_positions(model_path, max_model_len),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs),
            "enable_lora": True,
            "max_loras": max_loras,
            "max_cpu_loras": max_loras,
            "max_lora_rank": max_lora_rank,
            "lora_target_modules": list(target_modules or linear_suffixes(model_path)),
            "kv_cache_memory_bytes": kv_cache_bytes,
            "seed": seed,
            "enable_prefix_caching": enable_prefix_caching,
            "block_size": block_size,
            "load_format": load_format,
            "tensor_parallel_size": tensor_parallel,
            # inside one of Ray's placement groups vLLM would otherwise ask Ray for a worker a rank
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else None,
            "enforce_eager": True,
            "async_scheduling": False,  # a step sees what the step before it produced: the same batches every time
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "epilora.plugin.worker.WorkerExtension",
            "additional_config": {"epilora": {"activations": "w8a8" if activations == MARLIN else activations}},
        }
        graphs: dict[str, Any] = dict(compilation or {})
        if graph_sizes:
            graphs["cudagraph_capture_sizes"] = sorted(graph_sizes)
        gpu_arguments = {
            "enforce_eager": graph_sizes is not None and not graph_sizes,
            "compilation_config": graphs or None,
            # It exchanges handles of memory: not of the pooled kind that the KV cache lies in.
            "disable_custom_all_reduce": tensor_parallel > 1 and not custom_all_reduce,
            "gpu_memory_utilization": _LEAST_UTILIZATION,
        }
        self._residents = Residents(max_loras, self._on_every_rank)
        self._steps = StepThread(
            name,
            build=lambda: build_engine(name, arguments, gpu_arguments),
            on_end=self._ended,
            detokenize=self.detokenize,
            rollout_seats=max_num_seqs - tenant_seats,
        )
        try:
            self._tokenizer = self._engine.get_tokenizer()
            self._tool_calls = ToolCalls(tool_parser, self._tokenizer)
            self._info = self._steps.command(
                lambda: describe(self._engine, name, arguments, activations, max_model_len=max_model_len)
            ).result()
        except BaseException:
            self._steps.stop()
            raise
        self._on_gpu = not compat.is_cpu()
        self._kv = KvRelease(self._steps, self._on_every_rank)
        model_config = self._engine.model_config
        self._preparer = Preparer(
            max_model_len=max_model_len,
            engine_len=model_config.max_model_len,
            vocab_size=model_config.get_vocab_size(),
            encode=self.tokenize,
        )
        with _open_lock:
            _open_engines.add(id(self))

    @property
    def _engine(self) -> Any:
        return self._steps.engine

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._steps.rpc(method, *args)

    def _on_every_rank(self, method: str, *args: Any) -> list[Any]:
        return self._steps.workers(method, *args)

    async def _call(self, run: Callable[[], _T]) -> _T:
        """Run in the step thread, between two steps."""
        return await self._steps.call(run)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _hold(self, live: Live) -> Live:
        """Take the request's name and one reference on its adapter."""
        self._steps.take_name(live)
        if live.request.adapter:
            try:
                int_id, namespace = self._residents.acquire(live.request.adapter)
                live.lora_request = compat.lora_request(namespace, int_id)
            except BaseException:
                self._steps.give_name(live)
                raise
        return live

    def _let_go(self, batch: Sequence[Live]) -> None:
        """Undo `_hold` of requests that were never put into the inbox."""
        leaving: list[int] = []
        for live in batch:
            self._steps.give_name(live)
            if live.request.adapter:
                leaving += self._residents.release(live.request.adapter)
        if leaving:
            self._steps.command(lambda: self._residents.unload_ids(leaving))

    def _ended(self, live: Live) -> None:
        if live.request.adapter:
            self._residents.unload_ids(self._residents.release(live.request.adapter))

    async def _submit(self, batch: list[Live]) -> list[Any]:
        """Put requests in, together; their results in order. Cancelling aborts them."""
        if not batch:
            return []
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Any]] = loop.create_future()
        results: list[Any] = [None] * len(batch)
        missing = len(batch)

        def settle() -> None:
            if done.done():
                return
            error = next((r for r in results if isinstance(r, BaseException)), None)
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(results)

        def finisher(index: int) -> Callable[[Any], None]:
            def finish(result: Any) -> None:  # step thread
                nonlocal missing
                results[index] = result
                missing -= 1
                if not missing:
                    to_loop(loop, settle)

            return finish

        for index, live in enumerate(batch):
            live.on_done = finisher(index)
        try:
            self._steps.put(batch)
        except BaseException:
            self._let_go(batch)
            raise
        try:
            return await done
        except asyncio.CancelledError:
            self._post_abort([live.engine_id for live in batch])
            raise

    def _post_abort(self, engine_ids: list[str]) -> None:
        with contextlib.suppress(EngineDead):  # a dead engine has ended them already
            self._steps.command(lambda: self._steps.abort_now(engine_ids))

    def info(self) -> EngineInfo:
        """Identity, limits, arithmetic."""
        return self._info

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All of `requests`, submitted together between two engine steps; order kept. Cancelling aborts them.

        Raises AdapterNotFound, PromptTooLong, ValueError (then none of them runs), EngineDead.
        """
        batch: list[Live] = []
        try:
            for request in requests:
                batch.append(self._hold(self._preparer.completion(request, streamed=False)))
        except BaseException:
            self._let_go(batch)
            raise
        return await self._submit(batch)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """One request, chunk by chunk; the last chunk has a finish_reason. Closing the iterator aborts the request.

        Raises as `generate` does, at the first `__anext__`.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[TokenChunk | BaseException] = asyncio.Queue()
        live = self._hold(self._preparer.completion(request, streamed=True))
        ended = False

        def put(item: TokenChunk | BaseException) -> None:
            to_loop(loop, lambda: chunks.put_nowait(item))

        def done(result: Completion | Exception) -> None:
            if isinstance(result, BaseException):
                put(result)

        live.on_chunk, live.on_done = put, done
        try:
            self._steps.put([live])
        except BaseException:
            self._let_go([live])
            raise
        try:
            while not ended:
                item = await chunks.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            if not ended:
                self._post_abort([live.engine_id])

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End running requests; their completions have finish_reason "abort" and the tokens so far. Unknown ids are
        fine.
        """
        ids = [f"{kind}-{request_id}" for request_id in request_ids for kind in KINDS]
        await self._call(lambda: self._steps.abort_now(ids))

    async def score(
        self, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], adapter: str | None = None
    ) -> list[list[float]]:
        """Log-probabilities (plain log-softmax, natural) of each (prompt, completion)'s completion tokens under
        `adapter`.

        Prompt and completion together may fill the context if the model's own context is longer than max_model_len,
        else all but one token of it. Raises AdapterNotFound, PromptTooLong, ValueError.
        """
        batch: list[Live] = []
        try:
            for index, (prompt, completion) in enumerate(sequences):
                request_id = f"score-{id(sequences)}-{index}-{time.monotonic_ns()}"
                batch.append(self._hold(self._preparer.score(request_id, prompt, completion, adapter)))
        except BaseException:
            self._let_go(batch)
            raise
        return await self._submit(batch)

    # ---- adapters -------------------------------------------------------------------------------------------------

    async def load_adapter(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        """Put a version into a free slot, from memory, between two steps. Idempotent by digest.

        If no slot is free, the least recently used version that no request runs on and nobody pinned makes room.
        Raises AdapterRejected (module, shape it has and should have; no coverage; values not finite; content that is
        not the digest's), BaseMismatch, NoFreeSlot. A failed load changes nothing a request could see.
        """
        check_base(version.ref, version.base_digest, self._info.base_digest)
        check_content(version, tensors)
        return await self._call(lambda: self._residents.load(version, tensors))

    async def load_draft(self, draft: AdapterDraft, tensors: HandedOver) -> DraftReceipt:
        """Put what a trainer on this GPU handed over into a slot, between two steps; requests may name the draft at once.

        tensors: whole, one hand-over on each rank's GPU if there are several. The trainer keeps the tensors as they are until this returns. Raises as `load_adapter`, ValueError for a draft id
        that was used before.
        """
        check_base(f"draft {draft.draft_id}", draft.base_digest, self._info.base_digest)
        return await self._call(lambda: self._residents.load_draft(draft, tensors))

    async def seal_draft(self, draft_id: str, version: AdapterVersion, folded_digest: str) -> LoadReceipt:
        """A draft's content is durable as `version`: it goes by the version's digest from now on, and by its own id.

        folded_digest: of the version's tensors, computed from what was stored (`epilora.adapters.fold`). The slot is read
        back. Raises AdapterNotFound; AdapterRejected if it is not what the engine read (the draft is unloaded).
        """
        return await self._call(lambda: self._residents.seal(draft_id, version, folded_digest))

    async def unload_adapter(self, digest: str) -> None:
        """Free the slot once no live request uses it, unless it is pinned; new requests no longer find it. Raises AdapterNotFound."""
        await self._call(lambda: self._residents.unload(digest))

    async def pin_adapter(self, digest: str, holder: str) -> None:
        """Keep a loaded version from making room for another. Raises AdapterNotFound."""
        self._residents.pin(digest, holder)

    async def unpin_adapter(self, digest: str, holder: str) -> None:
        """Take a pin back."""
        self._residents.unpin(digest, holder)

    async def read_slot_digest(self, slot: int) -> str:
        """sha256 of what lies in an adapter slot now."""
        return await self._call(lambda: self._rpc("epilora_read_slot_digest", slot))

    # ---- base and KV cache ----------------------------------------------------------------------------------------

    async def export_weights(self) -> list[WeightManifest]:
        """Manifest per tensor-parallel rank. The first call moves the base into shared memory; later calls repeat it.

        Raises MemoryInfeasible if `shm_dir` is too small.
        """
        return await self._call(lambda: self._on_every_rank("epilora_export_weights", self._shm_dir, self.name))

    async def base_checksum(self) -> str:
        """sha256 of the base's parameters on all ranks, recomputed from memory now; equals `info().base_digest` unless
        damaged.
        """
        return ranks_digest(await self._call(lambda: self._on_every_rank("epilora_base_checksum")))

    async def release_kv(self, keep_fraction: float = 0.0) -> int:
        """Give the memory of the KV cache past `keep_fraction` back; returns the bytes.

        Running requests are preempted and recompute their keys and values when they go on; the prefix cache is emptied.
        On a GPU nothing runs until `restore_kv` if nothing is kept; with a share kept (enough for one request of
        max_model_len), tenants are served from it and rollouts wait. On the CPU the cache's capacity stays: pages come
        back as blocks are written. Raises ValueError, UnsupportedKernel (a share of a cache that is not block-major).
        """

        def run() -> int:
            if self._on_gpu:
                return self._kv.release(keep_fraction)
            self._engine.reset_prefix_cache(reset_running_requests=True)
            return self._rpc("epilora_drop_kv", keep_fraction)

        return await self._call(run)

    async def restore_kv(self) -> None:
        """Make the whole KV cache usable again, at the same addresses. On the CPU there is nothing to do.

        Raises MemoryInfeasible if the device has too little free memory; the cache stays released then.
        """
        await self._call(self._kv.restore if self._on_gpu else nothing)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises RuntimeError if vLLM refuses (blocks in use by running requests)."""
        if not await self._call(self._engine.reset_prefix_cache):
            raise RuntimeError(
                f"engine {self.name}: the prefix cache cannot be reset while requests run; wait for them or abort them"
            )

    def stats(self) -> EngineStats:
        """Counters as of the last step; never waits. Raises EngineDead: whoever watches engines must not count a dead one."""
        self._steps.check()
        shot = self._steps.snapshot
        return EngineStats(
            steps=shot.get("steps", 0),
            mixed_steps=shot.get("mixed_steps", 0),
            tenant_rows=shot.get("tenant_rows", 0),
            rollout_rows=shot.get("rollout_rows", 0),
            running=shot.get("running", 0),
            waiting=shot.get("waiting", 0),
            kv_usage=shot.get("kv_usage", 0.0),
            loaded=self._residents.loaded(),
            paths=dict(shot.get("paths", {})),
            rollout_seats=shot.get("rollout_seats", 0),
            seat_cuts=shot.get("seat_cuts", 0),
            drafts=self._residents.drafts(),
        )

    async def trainer_turn(self, max_wait_s: float) -> float:
        """Wait until no tenant's promised time to first token is in danger, at most `max_wait_s`; seconds waited.

        For whoever is about to take the engine's processor for a training step.
        """
        start = time.perf_counter()
        while self._steps.keeper.in_danger and time.perf_counter() - start < max_wait_s:
            await asyncio.sleep(0.01)
        return time.perf_counter() - start

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Prompt token ids of a conversation by the model's chat template. Raises ValueError if it has none."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(f"model {self._info.model_name!r} has no chat template; send a plain prompt instead")
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return tuple(self._tokenizer.encode(str(text), add_special_tokens=False))

    def tool_call_start(self) -> str:
        """What a tool call in this model's text begins with, "" if that is not known."""
        return self._tool_calls.start

    def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """(text without the calls, calls in OpenAI's form) by vLLM's parser. Raises ValueError if it has no such parser."""
        return self._tool_calls.parse(text, tools)

    def close(self) -> None:
        """Stop stepping (what runs fails with EngineDead), free the engine and the shared file's name. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._steps.stop()
        engine = self._steps.engine
        if not compat.lost_a_rank(engine):
            engine.collective_rpc("epilora_close")
        with _open_lock:
            _open_engines.discard(id(self))
            last = not _open_engines
        if last:  # vLLM's shutdown takes down process groups that all engines of a process share
            engine.engine_core.shutdown()
        elif self._tensor_parallel > 1:  # its ranks are processes of their own
            engine.model_executor.shutdown()
        del self._steps.engine
