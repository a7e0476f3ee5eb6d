"""The one thread that touches a vLLM LLMEngine: it steps it, and between two steps does what callers put into its inbox.

Requests put in by one call enter the same step. Rollouts take at most their seats of the batch and queue for them
(epilora/fairness: jobs take turns, and a tenant's promise in danger makes rollouts wait); tenants' go in at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from epilora.errors import EngineDead
from epilora.fairness.counters import service
from epilora.fairness.promise import PromiseKeeper
from epilora.fairness.seats import SeatQueue
from epilora.types import Completion, TokenChunk

from . import compat
from .requests import Command, Live, read_logprobs

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 30.0


class StepThread:
    """Owner of one LLMEngine.

    engine: the LLMEngine; only commands touch it. names: engine ids of requests between `take_name` and their end.
    snapshot: the worker's counters and the scheduler's, as of the last step.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[], Any],
        on_end: Callable[[Live], None],
        detokenize: Callable[[Sequence[int]], str],
        rollout_seats: int,
    ) -> None:
        """Build the engine in the thread and start stepping; blocks until it is built.

        build: makes the LLMEngine. on_end: called in the thread when a request ended, before its caller is told.
        detokenize: for completions whose text vLLM did not make. rollout_seats: rollouts in a batch at once.
        Raises what `build` raises.
        """
        self._name = name
        self._build, self._on_end, self._detokenize = build, on_end, detokenize
        self._lock = threading.RLock()  # guards names and error
        self.names: set[str] = set()
        self._live: dict[str, Live] = {}  # step thread only; engine id -> request
        self._internal: dict[str, Live] = {}  # step thread only; those vLLM has
        self.keeper = PromiseKeeper(rollout_seats)
        self._queued: SeatQueue[Live] = SeatQueue(self.keeper)  # step thread only; rollouts waiting, also in _live
        self._held: frozenset[str] = frozenset()  # step thread only; kinds of requests that do not run now
        self._inbox: queue.SimpleQueue[list[Live] | Command | EngineDead | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.snapshot: dict[str, Any] = {}
        ready: Future = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name=f"engine-{name}", daemon=True)
        self._thread.start()
        self.engine: Any = ready.result()

    # ---- callers' side --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the EngineDead that ended the thread, if one did."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def take_name(self, live: Live) -> None:
        """Reserve a request's id until it ended. Raises ValueError if a running request has it, EngineDead."""
        with self._lock:
            self.check()
            if live.engine_id in self.names:
                raise ValueError(f"request id {live.request.request_id!r} is in use by a running request")
            self.names.add(live.engine_id)

    def give_name(self, live: Live) -> None:
        """Take back `take_name` of a request that was never put in."""
        with self._lock:
            self.names.discard(live.engine_id)

    def put(self, item: list[Live] | Command) -> None:
        """Requests that enter one step together, or a command. Raises EngineDead."""
        with self._lock:
            self.check()
            self._inbox.put(item)

    def command(self, run: Callable[[], _T]) -> Future:
        """Run between two steps; its result as a future. Raises EngineDead."""
        command = Command(run)
        self.put(command)
        return command.future

    async def call(self, run: Callable[[], _T]) -> _T:
        """Run between two steps and wait for the result."""
        return await asyncio.wrap_future(self.command(run))

    def rpc(self, method: str, *args: Any) -> Any:
        """A worker method's result (of rank 0). In the thread, or while it waits."""
        return self.workers(method, *args)[0]

    def workers(self, method: str, *args: Any) -> list[Any]:
        """A worker method's results, of every rank. Raises what the first rank that failed raised."""
        answers = self.engine.collective_rpc("epilora_call", args=(method, args))
        for succeeded, value in answers:
            if not succeeded:
                raise value
        return [value for _, value in answers]

    def stop(self) -> None:
        """End the thread; what runs fails with EngineDead."""
        self._inbox.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    # ---- step thread ----------------------------------------------------------------------------------------------

    def _main(self, ready: Future) -> None:
        try:
            self.engine = self._build()
            self._time_first_tokens()
            compat.when_a_rank_dies(self.engine, self._rank_died)
        except BaseException as err:  # handed to the constructor, which raises it
            self._error = err
            ready.set_exception(err)
            return
        ready.set_result(self.engine)
        try:
            while self._drain():
                self._seat_rollouts()
                if self._runnable():
                    self._step()
                self._take_snapshot()
        except BaseException as err:
            logger.exception("engine %s: the step loop failed", self._name)
            self._die(err)
            return
        self._die(EngineDead(f"engine {self._name} is closed"))

    def _rank_died(self) -> None:
        """vLLM's watching thread: an engine that waits for requests must end too, not only at the next step."""
        self._inbox.put(EngineDead(f"engine {self._name}: one of its tensor-parallel ranks ended; start it again"))

    def _time_first_tokens(self) -> None:
        core, stock = self.engine.engine_core, self.engine.engine_core.get_output

        def get_output() -> Any:
            outputs = stock()
            now = time.perf_counter()
            for output in outputs.outputs:
                live = self._internal.get(output.request_id)
                if live is not None and not live.first_s and output.new_token_ids:
                    live.first_s = now
                    self.keeper.first_token(live.engine_id, now)
            return outputs

        core.get_output = get_output

    def _drain(self) -> bool:
        """Take everything from the inbox, waiting only while nothing runs; False to stop."""
        block = not self._runnable()
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, EngineDead):
                raise item
            if isinstance(item, Command):
                self._run_command(item)
            else:
                self._admit(item)
            block = not self._runnable() and self._inbox.empty()
            if block:
                self._take_snapshot()

    def _runnable(self) -> bool:
        """Whether any request may run now."""
        if not self._held:
            return bool(self._live)
        return any(live.request.kind not in self._held for live in self._live.values())

    def hold(self, kinds: frozenset[str]) -> None:
        """Requests of these kinds do not run until `hold` is called without them. In the thread only."""
        self._held = kinds

    def held_ids(self) -> set[str]:
        """vLLM's ids of the requests that are held and that it has."""
        return {internal for internal, live in self._internal.items() if live.request.kind in self._held}

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
        for live in rollouts:
            self._live[live.engine_id] = live
            request, cost = live.request, service(len(live.prompt), live.request.sampling.max_tokens)
            self._queued.push(live.engine_id, live, client=request.client, weight=request.weight, cost=cost)
        tenants = [live for live in batch if live.request.kind != "rollout"]
        for live in tenants:
            self.keeper.arrived(live.engine_id, live.request.ttft_budget_ms, live.submitted_s)
        self._add(tenants)

    def _seat_rollouts(self) -> None:
        """Give free rollout seats to the requests that queue for them."""
        if not self._queued or "rollout" in self._held:
            return
        seated = sum(live.request.kind == "rollout" for live in self._internal.values())
        for live in self._queued.take(seated):
            self._add([live])

    def _add(self, batch: list[Live]) -> None:
        added: list[Live] = []
        try:
            for live in batch:
                live.internal_id = self.engine.add_request(
                    live.engine_id,
                    {"prompt_token_ids": list(live.prompt)},
                    live.params,
                    lora_request=live.lora_request,
                )
                added.append(live)
                self._live[live.engine_id] = self._internal[live.internal_id] = live
        except Exception as err:
            self.engine.abort_request([live.engine_id for live in added])
            for live in batch:
                self._finish(live, err)

    def _step(self) -> None:
        for output in self.engine.step():
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
                adapter=live.request.adapter,
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
        live.tokens = len(tokens)
        request = live.request
        sampled, top = read_logprobs(tokens, logprobs, request.sampling.logprobs)
        after_first = now - live.first_s if live.first_s else 0.0
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=live.prompt,
            token_ids=tokens,
            text=self._detokenize(tokens) if text is None else text,
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
        self.keeper.ended(live.engine_id)
        self._queued.finished(live.engine_id, service(len(live.prompt), live.tokens))
        self.give_name(live)
        self._on_end(live)
        live.on_done(result)

    def abort_now(self, engine_ids: Sequence[str]) -> None:
        """End requests with what they have; unknown ids are fine. In the thread only."""
        for engine_id in engine_ids:
            live = self._live.get(engine_id)
            if live is None:
                continue
            tokens: Sequence[int] = ()
            logprobs = None
            if live.internal_id:
                tokens, logprobs = compat.partial_output(self.engine, live.internal_id)
                self.engine.abort_request([engine_id])
            else:
                self._queued.remove(live.engine_id)
            if live.extract is not None:
                self._finish(live, asyncio.CancelledError())
                continue
            completion = self._make_completion(live, tuple(tokens), logprobs, "abort", None)
            if live.on_chunk is not None:
                ended = (live.request.request_id, (), "", (), "abort", len(live.prompt), live.produced)
                live.on_chunk(TokenChunk(*ended, adapter=live.request.adapter))
            self._finish(live, completion)

    def _take_snapshot(self) -> None:
        running, waiting, usage = compat.engine_counts(self.engine)
        waiting += len(self._queued)
        self.snapshot = {
            **self.rpc("epilora_stats"),
            "running": running,
            "waiting": waiting,
            "kv_usage": usage,
            "rollout_seats": self.keeper.seats,
            "seat_cuts": self.keeper.cuts,
        }

    def _die(self, err: BaseException) -> None:
        """Fail everything that waits, now and later."""
        dead = err if isinstance(err, EngineDead) else EngineDead(f"engine {self._name}: its step loop failed: {err!r}")
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
            elif isinstance(item, list):
                for live in item:
                    live.on_done(dead)
