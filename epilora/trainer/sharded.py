"""A trainer of several tensor-parallel ranks, each a process on a device of its own, behind the face of one.

    ShardedTrainer.train_rl(...)  --the same call-->  rank 0, rank 1, ...  (LoraTrainer with a RankGroup)
                                  <--their answers--

Every call goes to all ranks, because all of them take part in its collectives, and the answer is rank 0's. The ranks start
when the base is attached: a rank sees only the GPU that its part of the base lies on. A rank that ends, or that answers
otherwise than the rest, takes the whole group with it: `TrainerDead`, within `timeout_s` if it hangs and at once if it is
gone. What it trained is in the checkpoints; a new trainer takes them up.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from epilora.adapters.device_tensors import DeviceTensors
from epilora.adapters.digest import ranks_digest
from epilora.errors import TrainerDead
from epilora.gpus import visible_device
from epilora.quant.manifest import WeightManifest
from epilora.types import AdapterSpec, RolloutGroup

from .batch import TokenPair
from .ranks import in_rank_order

START_TIMEOUT_S = 300.0  # for a rank to import torch and to map and check its part of the base
# Figures of one device; the rest is summed.
_LARGEST = ("largest_dequantised_bytes", "device_bytes", "peak_device_bytes")


class ShardedTrainer:
    """See `actors.protocols.Trainer`. Calls from several threads run one after another; `check` waits for none."""

    def __init__(self, ranks: int, timeout_s: float = 120.0, **trainer: Any) -> None:
        """ranks: as many as the engine has. timeout_s: bound on a collective, and on a rank that lags behind the others.
        trainer: arguments of each rank's `LoraTrainer`.
        """
        if ranks < 2:
            raise ValueError(f"ShardedTrainer: ranks={ranks}; allowed: >= 2 (one rank is a LoraTrainer)")
        self._count, self._timeout_s, self._arguments = ranks, timeout_s, dict(trainer)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder = ""
        self._dead: TrainerDead | None = None
        self._lock = threading.Lock()  # guards the end of the group
        self._turn = threading.Lock()  # one call at a time: its answers are the next ones to arrive

    # ---- the processes --------------------------------------------------------------------------------------------

    def _start(self, manifests: Sequence[WeightManifest]) -> None:
        self._folder = tempfile.mkdtemp(prefix="epilora-ranks-")
        setup = {
            "size": self._count,
            "store": os.path.join(self._folder, "store"),
            "timeout_s": self._timeout_s,
            "trainer": self._arguments,
        }
        for rank, manifest in enumerate(manifests):
            ours, theirs = socket.socketpair()
            environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same modules
            uuids = {entry.values.location.gpu_uuid for entry in manifest.entries} - {""}
            if uuids:
                environment["CUDA_VISIBLE_DEVICES"] = visible_device(uuids.pop())
                environment.setdefault("NCCL_NVLS_ENABLE", "0")  # memory that others map cannot be multicast
            else:
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            command = [sys.executable, "-m", "epilora.trainer.rank_process", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            )
            theirs.close()
            self._connections.append(Connection(ours.detach()))
            self._send(rank, {**setup, "rank": rank})

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._connections[rank].send(message)
        except OSError as err:
            raise self._end(f"rank {rank} ended ({self._exit_of(rank)})") from err

    def _exit_of(self, rank: int) -> str:
        process = self._processes[rank]
        for _ in range(50):  # a pipe closes a little before its process is gone
            if process.poll() is not None:
                return f"exit status {process.returncode}"
            time.sleep(0.02)
        return "its pipe is closed"

    def _end(self, why: str) -> TrainerDead:
        """Kill every rank; what all later calls raise."""
        with self._lock:
            if self._dead is None:
                self._dead = TrainerDead(
                    f"a trainer of {self._count} ranks lost one: {why}; start a new one, its jobs resume from their checkpoints"
                )
            for process in self._processes:
                process.kill()
                process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            return self._dead

    def check(self) -> None:
        """Raise TrainerDead if a rank is gone. Never waits for a call that runs."""
        if self._dead is not None:
            raise self._dead
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self._end(f"rank {rank} ended (exit status {process.returncode})")

    def close(self) -> None:
        """End the ranks. Repeated calls do nothing."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._dead = self._dead or TrainerDead("this trainer is closed")

    def _call(self, method: str, *args: Any) -> Any:
        """The method's result. Raises what all ranks raised, TrainerDead if they differ or one is gone."""
        return self._on_all(method, args, every=False)[0]

    def _on_all(self, method: str, args: tuple[Any, ...], *, every: bool) -> list[Any]:
        """The method's results by rank; of rank 0 alone (None else) unless `every`."""
        with self._turn:
            self.check()
            if not self._processes:
                raise RuntimeError("the trainer has no base yet; call attach(manifests) first")
            for rank in range(self._count):
                self._send(rank, (method, args, every or rank == 0))
            return self._answers(START_TIMEOUT_S if method == "attach" else None)

    def _answers(self, first_s: float | None) -> list[Any]:
        """first_s: bound on the first answer; the others follow within the collectives' bound."""
        missing = dict(enumerate(self._connections))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = None if first_s is None else time.monotonic() + first_s
        while missing:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(missing.values()), left)
            if not ready:
                raise self._end(f"ranks {sorted(missing)} did not answer in time")
            for rank in [rank for rank, connection in missing.items() if connection in ready]:
                try:
                    answers[rank] = missing.pop(rank).recv()
                except (EOFError, OSError) as err:
                    raise self._end(f"rank {rank} ended ({self._exit_of(rank)})") from err
            if answers and deadline is None:
                deadline = time.monotonic() + 2 * self._timeout_s
        failed = {rank: value for rank, (succeeded, value) in sorted(answers.items()) if not succeeded}
        if failed and (len(failed) < self._count or len({type(value) for value in failed.values()}) > 1):
            rank, cause = next(iter(failed.items()))
            raise self._end(f"rank {rank} of {sorted(failed)} raised {cause!r}, the others did not") from cause
        if failed:
            raise failed[0]
        return [answers[rank][1] for rank in range(self._count)]

    # ---- the trainer ----------------------------------------------------------------------------------------------

    def attach(self, manifests: Sequence[WeightManifest]) -> None:
        """Start the ranks, if they have not, and have each map its part. Raises as `LoraTrainer.attach`, TrainerDead."""
        self.check()
        if not self._processes:
            ordered = in_rank_order(manifests)
            if len(ordered) != self._count:
                raise ValueError(
                    f"ShardedTrainer: ranks={self._count}, the engine has {len(ordered)}; give both the same tensor_parallel"
                )
            self._start(ordered)
        self._call("attach", list(manifests))

    def base_checksum(self) -> str:
        """sha256 of the mapped codes and scales of all ranks, computed now; equals the engine's."""
        return ranks_digest(self._on_all("base_checksum", (), every=True))

    def open_session(self, session: str, spec: AdapterSpec, optimizer: Mapping[str, Any], seed: int) -> None:
        self._call("open_session", session, spec, dict(optimizer), seed)

    def open_adapter(self, session: str, spec: AdapterSpec, tensors: Mapping[str, Any]) -> None:
        self._call("open_adapter", session, spec, dict(tensors))

    def close_session(self, session: str) -> None:
        self._call("close_session", session)

    def train_rl(self, session: str, groups: Sequence[RolloutGroup], loss: Mapping[str, Any]) -> dict[str, float]:
        return self._call("train_rl", session, list(groups), dict(loss))

    def train_rl_together(
        self, requests: Sequence[tuple[str, Sequence[RolloutGroup], Mapping[str, Any]]]
    ) -> list[dict[str, float] | Exception]:
        return self._call("train_rl_together", list(requests))

    def train_sft(self, session: str, examples: Sequence[TokenPair]) -> dict[str, float]:
        return self._call("train_sft", session, list(examples))

    def logprobs(self, session: str | None, sequences: Sequence[TokenPair]) -> list[list[float]]:
        return self._call("logprobs", session, list(sequences))

    def adapter(self, session: str) -> tuple[AdapterSpec, dict[str, Any]]:
        return self._call("adapter", session)

    def adapter_and_digest(self, session: str) -> tuple[AdapterSpec, dict[str, Any], str]:
        return self._call("adapter_and_digest", session)

    def shared_adapter(self, session: str) -> tuple[AdapterSpec, tuple[DeviceTensors, ...] | None]:
        """Spec and, on GPUs, handles of the whole adapter on each rank's GPU, in the ranks' order."""
        found = self._on_all("shared_adapter", (session,), every=True)
        handles = tuple(shared for _, shared in found)
        return found[0][0], None if None in handles else handles

    def state(self, session: str) -> bytes:
        return self._call("state", session)

    def load_state(self, session: str, state: bytes) -> None:
        self._call("load_state", session, state)

    def memory(self) -> dict[str, int]:
        """As `LoraTrainer.memory`, summed over ranks; figures of a device: the largest."""
        found = self._on_all("memory", (), every=True)
        return {key: (max if key in _LARGEST else sum)(rank[key] for rank in found) for key in found[0]}
