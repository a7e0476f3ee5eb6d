"""A vLLM engine that satisfies `actors.protocols.Engine`: one in-process LLMEngine, one thread that steps it.

Calls never touch the LLMEngine: they put work into an inbox which the step thread drains between two steps, so requests
submitted in one call enter the same step and an adapter is never swapped during one. Results come back through the
caller's event loop.

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
import gc
import logging
import pathlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from epilora.adapters.digest import adapter_digest
from epilora.adapters.peft_io import config_of
from epilora.adapters.slots import SlotMap
from epilora.errors import AdapterRejected, BaseMismatch, EngineDead, PromptTooLong
from epilora.quant.manifest import WeightManifest
from epilora.types import (
    AdapterVersion,
    Completion,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    Sampling,
    TokenChunk,
)

from . import compat
from .environment import linear_suffixes, prepare_environment, spare_positions
from .requests import Command, Live, nothing, read_logprobs, to_loop

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_KINDS = ("tenant", "rollout")
_CLOSE_TIMEOUT_S = 30.0
_open_engines: set[int] = set()  # ids of this process's engines between start and close
_open_lock = threading.Lock()
_SCORING = Sampling(max_tokens=1, temperature=0.0)


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
    ) -> None:
        """Load the model and start stepping; blocks until the engine is ready.

        name: of the engine, in manifests. model_path: folder with config.json, weights, tokenizer. dtype: float32,
        bfloat16, float16. quantization: vLLM's name, None for none. activations: "w8a8" or "w8a16" (FP8 bases).
        max_lora_rank: one of vLLM's (1, 8, 16, 32, 64, ...). target_modules: suffixes adapters may target; None: all
        linears.
        tenant_seats: how many of max_num_seqs rollouts leave free, so that a tenant never waits for a rollout to end.
        kv_cache_bytes: of the cache. block_size: tokens a cache block, None: vLLM's choice. shm_dir: for
        `export_weights`.

        Raises RuntimeError if the plugin is not active, UnsupportedKernel if the activations cannot be had, and what
        vLLM raises.
        """
        if activations not in ("w8a8", "w8a16"):
            raise ValueError(f"VllmEngine: activations={activations!r}; allowed are w8a8, w8a16")
        if not 0 <= tenant_seats < max_num_seqs:
            raise ValueError(
                f"VllmEngine: tenant_seats={tenant_seats}; allowed are 0 to max_num_seqs - 1 = {max_num_seqs - 1}"
            )
        self.name = name
        self._model_path = str(model_path)
        self._shm_dir = shm_dir
        self._max_model_len = max_model_len
        self._slots = SlotMap(max_loras)
        self._versions: dict[str, AdapterVersion] = {}
        self._receipts: dict[str, LoadReceipt] = {}
        self._lock = threading.RLock()  # guards _slots, _versions, _receipts, _names
        self._names: set[str] = set()  # engine ids of requests between submission and end
        self._live: dict[str, Live] = {}  # step thread only; engine id -> request
        self._internal: dict[str, Live] = {}  # step thread only; those vLLM has
        self._queued: deque[Live] = deque()  # step thread only; rollouts that wait for a seat, also in _live
        self._rollout_seats = max_num_seqs - tenant_seats
        self._inbox: queue.SimpleQueue[list[Live] | Command | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._snapshot: dict[str, Any] = {}
        arguments = {
            "model": self._model_path,
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
            "enforce_eager": True,
            "async_scheduling": False,  # a step sees what the step before it produced: the same batches every time
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "epilora.plugin.worker.WorkerExtension",
            "additional_config": {"epilora": {"activations": activations}},
        }
        ready: Future = Future()
        self._thread = threading.Thread(target=self._main, args=(arguments, ready), name=f"engine-{name}", daemon=True)
        self._thread.start()
        self._info: EngineInfo = ready.result()

    # ---- step thread ----------------------------------------------------------------------------------------------

    def _main(self, arguments: dict[str, Any], ready: Future) -> None:
        try:
            self._build(arguments)
            info = self._describe(arguments)
        except BaseException as err:  # handed to the constructor, which raises it
            self._error = err
            ready.set_exception(err)
            return
        with _open_lock:
            _open_engines.add(id(self))
        ready.set_result(info)
        try:
            while self._drain():
                self._seat_rollouts()
                if self._live:
                    self._step()
                self._take_snapshot()
        except BaseException as err:
            logger.exception("engine %s: the step loop failed", self.name)
            self._die(err)
            return
        self._die(EngineDead(f"engine {self.name} is closed"))

    def _build(self, arguments: dict[str, Any]) -> None:
        prepare_environment()
        from vllm import EngineArgs, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        from . import register

        self._SamplingParams, self._LoRARequest, self._OutputKind = SamplingParams, LoRARequest, RequestOutputKind
        given = {name: value for name, value in arguments.items() if value is not None}
        self._engine = LLMEngine.from_engine_args(EngineArgs(**compat.supported_arguments(EngineArgs, given)))
        status = register.installed()
        if status is None or not status.active:
            why = (
                "vLLM did not load it (is epilora installed, VLLM_PLUGINS unset?)" if status is None else status.reasons
            )
            raise RuntimeError(f"engine {self.name}: the EpiLoRA plugin is not active: {why}")
        self._tokenizer = self._engine.get_tokenizer()
        self._rpc("epilora_count_steps")
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process: collections need not walk it
        core, stock = self._engine.engine_core, self._engine.engine_core.get_output

        def get_output() -> Any:
            outputs = stock()
            now = time.perf_counter()
            for output in outputs.outputs:
                live = self._internal.get(output.request_id)
                if live is not None and not live.first_s and output.new_token_ids:
                    live.first_s = now
            return outputs

        core.get_output = get_output  # type: ignore[method-assign]

    def _describe(self, arguments: dict[str, Any]) -> EngineInfo:
        import vllm

        requested = arguments["additional_config"]["epilora"]["activations"]
        running = self._rpc("epilora_activations")
        if arguments["quantization"] and set(running) != {requested}:
            raise RuntimeError(
                f"engine {self.name}: asked for activations {requested}, FP8 layers run {running or 'nothing'}"
            )
        modules = self._rpc("epilora_linear_modules")
        return EngineInfo(
            name=self.name,
            model_path=self._model_path,
            model_name=pathlib.Path(self._model_path).name,
            base_digest=self._rpc("epilora_base_checksum"),
            activations=requested,
            dtype=arguments["dtype"],
            quantization=arguments["quantization"] or "none",
            max_model_len=self._max_model_len,
            max_loras=arguments["max_loras"],
            max_lora_rank=arguments["max_lora_rank"],
            vllm_version=vllm.__version__,
            plugin_active=True,
            linear_modules=tuple(row["name"] for row in modules if row["adaptable"]),
            eos_token_id=getattr(self._tokenizer, "eos_token_id", None),
        )

    def _rpc(self, method: str, *args: Any) -> Any:
        """A worker method's result (of rank 0)."""
        return self._engine.collective_rpc(method, args=args)[0]

    def _drain(self) -> bool:
        """Take everything from the inbox, waiting only while nothing runs; False to stop."""
        block = not self._live
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, Command):
                self._run_command(item)
            else:
                self._admit(item)
            block = not self._live and self._inbox.empty()
            if block:
                self._take_snapshot()

    def _run_command(self, command: Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.run())
        except Exception as err:
            command.future.set_exception(err)

    def _admit(self, batch: list[Live]) -> None:
        """Add all tenants' requests of one call (if vLLM refuses one, none runs); rollouts queue for their seats."""
        rollouts = [live for live in batch if live.request.kind == "rollout"]
        self._queued += rollouts
        self._live |= {live.engine_id: live for live in rollouts}
        self._add([live for live in batch if live.request.kind != "rollout"])

    def _seat_rollouts(self) -> None:
        """Give free rollout seats to the requests that queue for them, in order."""
        if not self._queued:
            return
        seated = sum(live.request.kind == "rollout" for live in self._internal.values())
        while self._queued and seated < self._rollout_seats:
            self._add([self._queued.popleft()])
            seated += 1

    def _add(self, batch: list[Live]) -> None:
        added: list[Live] = []
        try:
            for live in batch:
                live.internal_id = self._engine.add_request(
                    live.engine_id,
                    {"prompt_token_ids": list(live.prompt)},
                    live.params,
                    lora_request=live.lora_request,
                )
                added.append(live)
                self._live[live.engine_id] = self._internal[live.internal_id] = live
        except Exception as err:
            self._engine.abort_request([live.engine_id for live in added])
            for live in batch:
                self._finish(live, err)

    def _step(self) -> None:
        for output in self._engine.step():
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if live.on_chunk is not None:
                self._emit(live, output)
            if output.finished:
                self._finish(live, self._completion(live, output) if live.extract is None else live.extract(output))

    def _emit(self, live: Live, output: Any) -> None:
        piece = output.outputs[0]
        tokens = tuple(piece.token_ids)
        live.produced += len(tokens)
        logprobs, top = read_logprobs(tokens, piece.logprobs, live.request.sampling.logprobs)
        assert live.on_chunk is not None
        live.on_chunk(
            TokenChunk(
                request_id=live.request.request_id,
                token_ids=tokens,
                text=piece.text,
                logprobs=logprobs,
                finish_reason=piece.finish_reason,
                prompt_tokens=len(live.prompt),
                completion_tokens=live.produced,
                top_logprobs=top,
            )
        )

    def _completion(self, live: Live, output: Any) -> Completion:
        piece = output.outputs[0]
        text = piece.text if live.params.detokenize else None
        return self._make_completion(live, tuple(piece.token_ids), piece.logprobs, piece.finish_reason, text)

    def _make_completion(
        self, live: Live, tokens: tuple[int, ...], logprobs: Any, reason: str, text: str | None
    ) -> Completion:
        now = time.perf_counter()
        request = live.request
        sampled, top = read_logprobs(tokens, logprobs, request.sampling.logprobs)
        after_first = now - live.first_s if live.first_s else 0.0
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=live.prompt,
            token_ids=tokens,
            text=self.detokenize(tokens) if text is None else text,
            logprobs=sampled,
            finish_reason=reason,
            adapter=request.adapter,
            ttft_ms=(live.first_s - live.submitted_s) * 1e3 if live.first_s else 0.0,
            tpot_ms=after_first / (len(tokens) - 1) * 1e3 if len(tokens) > 1 else 0.0,
            top_logprobs=top,
        )

    def _finish(self, live: Live, result: Any) -> None:
        self._live.pop(live.engine_id, None)
        self._internal.pop(live.internal_id, None)
        with self._lock:
            self._names.discard(live.engine_id)
            leaving = self._slots.release(live.request.adapter) if live.request.adapter else list[int]()
        self._unload_ids(leaving)
        live.on_done(result)

    def _unload_ids(self, int_ids: Sequence[int]) -> None:
        for int_id in int_ids:
            self._rpc("epilora_unload_adapter", int_id)
        with self._lock:
            here = set(self._slots.loaded()) | {d for d in self._versions if self._slots.live(d)}
            for digest in [d for d in self._versions if d not in here]:
                del self._versions[digest]
                self._receipts.pop(digest, None)

    def _abort_now(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            live = self._live.get(engine_id)
            if live is None:
                continue
            tokens: Sequence[int] = ()
            logprobs = None
            if live.internal_id:
                tokens, logprobs = compat.partial_output(self._engine, live.internal_id)
                self._engine.abort_request([engine_id])
            else:
                self._queued.remove(live)
            if live.extract is not None:
                self._finish(live, asyncio.CancelledError())
                continue
            completion = self._make_completion(live, tuple(tokens), logprobs, "abort", None)
            if live.on_chunk is not None:
                live.on_chunk(TokenChunk(live.request.request_id, (), "", (), "abort", len(live.prompt), live.produced))
            self._finish(live, completion)

    def _take_snapshot(self) -> None:
        running, waiting, usage = compat.engine_counts(self._engine)
        waiting += len(self._queued)
        self._snapshot = {**self._rpc("epilora_stats"), "running": running, "waiting": waiting, "kv_usage": usage}

    def _die(self, err: BaseException) -> None:
        """Fail everything that waits, now and later."""
        dead = err if isinstance(err, EngineDead) else EngineDead(f"engine {self.name}: its step loop failed: {err!r}")
        dead.__cause__ = None if dead is err else err
        with self._lock:
            self._error = dead
        for live in list(self._live.values()):
            live.on_done(dead)
        self._live.clear()
        self._queued.clear()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Command):
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(dead)
            elif item is not None:
                for live in item:
                    live.on_done(dead)

    # ---- callers' side --------------------------------------------------------------------------------------------

    def _put(self, item: list[Live] | Command) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._inbox.put(item)

    def _command(self, run: Callable[[], _T]) -> Future:
        command = Command(run)
        self._put(command)
        return command.future

    async def _call(self, run: Callable[[], _T]) -> _T:
        """Run in the step thread, between two steps."""
        return await asyncio.wrap_future(self._command(run))

    def _prepare(self, request: GenerateRequest, *, streamed: bool) -> Live:
        """Check a request and hold its adapter. Raises AdapterNotFound, PromptTooLong, ValueError."""
        if request.kind not in _KINDS:
            raise ValueError(f"request {request.request_id!r}: kind={request.kind!r}; allowed are {', '.join(_KINDS)}")
        sampling = request.sampling
        prompt = self.tokenize(request.prompt) if isinstance(request.prompt, str) else tuple(request.prompt)
        self._check_prompt(request.request_id, prompt)
        if sampling.max_tokens < 1:
            raise ValueError(f"request {request.request_id!r}: max_tokens={sampling.max_tokens}; at least 1")
        if len(prompt) + sampling.max_tokens > self._max_model_len:
            raise PromptTooLong(
                f"request {request.request_id!r}: {len(prompt)} prompt tokens + max_tokens={sampling.max_tokens}"
                f" exceed the context of {self._max_model_len} tokens (max_model_len)"
            )
        try:
            params = self._SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop=list(sampling.stop) or None,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                ignore_eos=sampling.ignore_eos,
                detokenize=streamed or bool(sampling.stop),
                flat_logprobs=not streamed and sampling.logprobs is not None,
                output_kind=self._OutputKind.DELTA if streamed else self._OutputKind.FINAL_ONLY,
            )
        except compat.validation_errors() as err:
            raise ValueError(f"request {request.request_id!r}: {err}") from err
        return self._hold(Live(request, prompt, params, on_done=nothing, submitted_s=time.perf_counter()))

    def _check_prompt(self, request_id: str, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError(f"request {request_id!r}: the prompt has no tokens")
        size = self._engine.model_config.get_vocab_size()
        wrong = next((token for token in prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise ValueError(f"request {request_id!r}: token id {wrong} is not in the vocabulary of {size}")

    def _hold(self, live: Live) -> Live:
        """Take the request's name and one reference on its adapter."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if live.engine_id in self._names:
                raise ValueError(f"request id {live.request.request_id!r} is in use by a running request")
            digest = live.request.adapter
            if digest:
                int_id = self._slots.acquire(digest)
                namespace = self._versions[digest].kv_namespace
                live.lora_request = self._LoRARequest(lora_name=namespace, lora_int_id=int_id, lora_path="in-memory")
            self._names.add(live.engine_id)
        return live

    def _let_go(self, batch: Sequence[Live]) -> None:
        """Undo `_hold` of requests that were never put into the inbox."""
        leaving: list[int] = []
        with self._lock:
            for live in batch:
                self._names.discard(live.engine_id)
                if live.request.adapter:
                    leaving += self._slots.release(live.request.adapter)
        if leaving:
            self._command(lambda: self._unload_ids(leaving))

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
            self._put(batch)
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
            self._command(lambda: self._abort_now(engine_ids))

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
                batch.append(self._prepare(request, streamed=False))
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
        live = self._prepare(request, streamed=True)
        ended = False

        def put(item: TokenChunk | BaseException) -> None:
            to_loop(loop, lambda: chunks.put_nowait(item))

        def done(result: Completion | Exception) -> None:
            if isinstance(result, BaseException):
                put(result)

        live.on_chunk, live.on_done = put, done
        try:
            self._put([live])
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
        ids = [f"{kind}-{request_id}" for request_id in request_ids for kind in _KINDS]
        await self._call(lambda: self._abort_now(ids))

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
                batch.append(
                    self._prepare_score(
                        f"score-{id(sequences)}-{index}-{time.monotonic_ns()}", prompt, completion, adapter
                    )
                )
        except BaseException:
            self._let_go(batch)
            raise
        return await self._submit(batch)

    def _prepare_score(
        self, request_id: str, prompt: Sequence[int], completion: Sequence[int], adapter: str | None
    ) -> Live:
        whole = (*prompt, *completion)
        self._check_prompt(request_id, whole)
        if not prompt or not completion:
            raise ValueError(
                f"score: prompt of {len(prompt)} and completion of {len(completion)} tokens; both need at least 1"
            )
        if len(whole) >= self._engine.model_config.max_model_len:
            limit = self._engine.model_config.max_model_len - 1
            raise PromptTooLong(f"score: {len(whole)} tokens exceed the {limit} that can be scored (max_model_len)")
        params = self._SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=self._OutputKind.FINAL_ONLY,
        )
        request = GenerateRequest(request_id, whole, _SCORING, adapter, "rollout")

        def extract(output: Any) -> list[float]:
            found = output.prompt_logprobs
            return [float(found[at][whole[at]].logprob) for at in range(len(prompt), len(whole))]

        live = Live(request, whole, params, on_done=nothing, extract=extract, submitted_s=time.perf_counter())
        return self._hold(live)

    async def load_adapter(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        """Put a version into a free slot, from memory, between two steps. Idempotent by digest.

        If no slot is free, the least recently used version that no request runs on and nobody pinned makes room.
        Raises AdapterRejected (module, shape it has and should have; no coverage; values not finite; content that is
        not the digest's), BaseMismatch, NoFreeSlot. A failed load changes nothing a request could see.
        """
        base = self._info.base_digest
        if version.base_digest and version.base_digest != base:
            raise BaseMismatch(
                f"adapter {version.ref} was trained on base {version.base_digest[:12]}; this engine holds {base[:12]}"
            )
        try:
            content = adapter_digest(version.spec, tensors)
        except TypeError as err:
            raise AdapterRejected(f"adapter {version.ref}: {err}") from err
        if content != version.digest:
            raise AdapterRejected(
                f"adapter {version.ref}: its spec and tensors have digest {content[:12]}, not {version.digest[:12]}"
            )
        return await self._call(lambda: self._load_now(version, tensors))

    def _load_now(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        digest, config = version.digest, config_of(version.spec, version.base_model)
        self._rpc("epilora_check_adapter", config, dict(tensors))  # before anything makes room for it
        with self._lock:
            int_id, leaving = self._slots.reserve(digest)
            if int_id is None:
                return self._receipts[digest]
        self._unload_ids(leaving)
        loaded = self._rpc("epilora_load_adapter", int_id, version.kv_namespace, config, dict(tensors))
        if loaded["readback_digest"] != loaded["expected_digest"]:
            self._rpc("epilora_unload_adapter", int_id)
            raise AdapterRejected(
                f"adapter {version.ref}: slot {loaded['slot']} reads back other bytes than were loaded"
            )
        receipt = LoadReceipt(digest=digest, **loaded)
        with self._lock:
            self._slots.commit(digest, int_id)
            self._versions[digest], self._receipts[digest] = version, receipt
        return receipt

    async def unload_adapter(self, digest: str) -> None:
        """Free the slot once no live request uses it; new requests no longer find it. Raises AdapterNotFound."""

        def run() -> None:
            with self._lock:
                leaving = self._slots.unload(digest)
            self._unload_ids(leaving)

        await self._call(run)

    async def pin_adapter(self, digest: str, holder: str) -> None:
        """Keep a loaded version from making room for another. Raises AdapterNotFound."""
        with self._lock:
            self._slots.pin(digest, holder)

    async def unpin_adapter(self, digest: str, holder: str) -> None:
        """Take a pin back."""
        with self._lock:
            self._slots.unpin(digest, holder)

    async def read_slot_digest(self, slot: int) -> str:
        """sha256 of what lies in an adapter slot now."""
        return await self._call(lambda: self._rpc("epilora_read_slot_digest", slot))

    async def export_weights(self) -> list[WeightManifest]:
        """Manifest per tensor-parallel rank. The first call moves the base into shared memory; later calls repeat it.

        Raises MemoryInfeasible if `shm_dir` is too small.
        """
        return await self._call(
            lambda: self._engine.collective_rpc("epilora_export_weights", args=(self._shm_dir, self.name))
        )

    async def base_checksum(self) -> str:
        """sha256 of the base's parameters, recomputed from memory now; equals `info().base_digest` unless damaged."""
        return await self._call(lambda: self._rpc("epilora_base_checksum"))

    async def release_kv(self, keep_fraction: float = 0.0) -> int:
        """Drop the KV cache's pages past `keep_fraction`; returns the bytes given back to the system.

        Running requests are preempted and recompute their keys and values when they go on; the prefix cache is emptied.
        On the CPU the cache's capacity stays: pages come back as blocks are written, there is no need to wait for
        `restore_kv`.
        """

        def run() -> int:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            return self._rpc("epilora_drop_kv", keep_fraction)

        return await self._call(run)

    async def restore_kv(self) -> None:
        """Make the KV cache usable again. On the CPU there is nothing to do (see `release_kv`)."""
        await self._call(nothing)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises RuntimeError if vLLM refuses (blocks in use by running requests)."""
        if not await self._call(self._engine.reset_prefix_cache):
            raise RuntimeError(
                f"engine {self.name}: the prefix cache cannot be reset while requests run; wait for them or abort them"
            )

    def stats(self) -> EngineStats:
        """Counters as of the last step; never waits."""
        shot = self._snapshot
        with self._lock:
            loaded = self._slots.loaded()
        return EngineStats(
            steps=shot.get("steps", 0),
            mixed_steps=shot.get("mixed_steps", 0),
            tenant_rows=shot.get("tenant_rows", 0),
            rollout_rows=shot.get("rollout_rows", 0),
            running=shot.get("running", 0),
            waiting=shot.get("waiting", 0),
            kv_usage=shot.get("kv_usage", 0.0),
            loaded=loaded,
            paths=dict(shot.get("paths", {})),
        )

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

    def close(self) -> None:
        """Stop stepping (what runs fails with EngineDead), free the engine and the shared file's name. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        engine = getattr(self, "_engine", None)
        if engine is None:
            return
        engine.collective_rpc("epilora_release_export")
        with _open_lock:
            _open_engines.discard(id(self))
            last = not _open_engines
        if last:  # vLLM's shutdown takes down process groups that all engines of a process share
            engine.engine_core.shutdown()
        del self._engine
