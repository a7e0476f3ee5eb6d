"""Where a run's numbers go: `metrics.jsonl`, TensorBoard events, one console line per step, and trackers (jobs/trackers.py)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from jobs.trackers import Tracker

logger = logging.getLogger(__name__)

SHOWN = (
    ("rollout/reward_mean", "reward {:.3f}"),
    ("train/loss", "loss {:+.4f}"),
    ("mismatch/mean_abs_dlogp", "|dlogp| {:.1e}"),
    ("rollout/tok_s", "{:.0f} tok/s"),
    ("time/step_s", "{:.2f} s"),
)


class Recorder:
    """Appends to what a resumed run left; a step recorded twice keeps both lines, the later one counts."""

    def __init__(
        self, run_dir: Path, total_steps: int, *, quiet: bool = False, trackers: Sequence[Tracker] = ()
    ) -> None:
        """trackers: closed with the recorder. One that fails is logged and left out: its server's faults end no training."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._jsonl = (run_dir / "metrics.jsonl").open("a")
        self._events = EventFileWriter(str(run_dir / "tensorboard"))
        self._total = total_steps
        self._quiet = quiet
        self._trackers = list(trackers)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics, all keys `area/name_unit`."""
        self._jsonl.write(json.dumps({"step": step, "time_s": time.time(), **metrics}) + "\n")
        self._jsonl.flush()
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        for tracker in list(self._trackers):
            self._guarded(tracker, lambda tracker=tracker: tracker.step(step, metrics))  # type: ignore[misc]
        if not self._quiet:
            shown = "  ".join(text.format(metrics[key]) for key, text in SHOWN if key in metrics)
            print(f"step {step:>4}/{self._total}  {shown}", flush=True)

    def _guarded(self, tracker: Tracker, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            name = type(tracker).__name__
            logger.exception("%s failed; the run goes on without it, its metrics are in metrics.jsonl", name)
            self._trackers.remove(tracker)

    def close(self) -> None:
        for tracker in list(self._trackers):
            self._guarded(tracker, tracker.close)
        self._jsonl.close()
        self._events.flush()
        self._events.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The last record of every step, in order."""
    latest: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        latest[record["step"]] = record
    return [latest[step] for step in sorted(latest)]
