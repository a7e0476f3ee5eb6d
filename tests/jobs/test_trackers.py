"""Trackers through their own packages, without a network: what a run logs is read back from their files."""

from __future__ import annotations

import json
import logging
import struct
import sys
from pathlib import Path

import pytest

from epilora.config import load_config
from jobs.recorder import Recorder, read_metrics
from jobs.trackers import make_trackers

BASE = ["engine.model_path=m", "task.path=a:b", "name=tracked", "rl.steps=3"]


def run(config, run_dir: Path, steps: range) -> None:
    recorder = Recorder(run_dir, 3, quiet=True, trackers=make_trackers(config, run_dir))
    for step in steps:
        recorder.step(step, {"rollout/reward_mean": step / 4, "time/step_s": 2.0})
    recorder.close()


def test_mlflow_holds_the_settings_and_every_step_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlruns"
    config = load_config(None, [*BASE, f"tracking.mlflow={{tracking_uri: '{uri}', experiment: rl}}"])
    for steps in (range(1, 3), range(3, 4)):
        run(config, tmp_path / "run", steps)
    client = MlflowClient(tracking_uri=uri)
    [found] = client.search_runs([client.get_experiment_by_name("rl").experiment_id])
    assert (found.info.run_name, found.info.status) == ("tracked", "FINISHED")
    assert found.data.params["engine.model_path"] == "m"
    assert found.data.params["trainer.placement"] == "shared_kv_released"
    history = client.get_metric_history(found.info.run_id, "rollout/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def log_records(content: bytes) -> list[bytes]:
    """Records of a file in LevelDB's log format after W&B's 7 bytes: blocks of 32 KiB; checksum, length, kind, data."""
    assert content[:4] == b":W&B"
    found, at, parts = [], 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(parts)
            parts = b""
    return found


def test_wandb_offline_writes_a_run_with_the_settings_and_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(None, [*BASE, "tracking.wandb={project: p, mode: offline}"])
    run_dir = tmp_path / "run"
    run(config, run_dir, range(1, 4))
    [file] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    rows, settings, identity = [], {}, None
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            rows.append((values["_step"], values["rollout/reward_mean"]))
        elif kind == "run":
            identity = (record.run.project, record.run.display_name, record.run.run_id)
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert identity == ("p", "tracked", (run_dir / "wandb_run_id.txt").read_text())
    assert rows == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert settings["engine"]["model_path"] == "m"


def test_a_tracker_that_fails_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def step(self, step: int, metrics: object) -> None:
            raise ConnectionError("server is gone")

        def close(self) -> None:
            raise AssertionError("left out before")

    recorder = Recorder(tmp_path, 2, quiet=True, trackers=[Broken()])
    with caplog.at_level(logging.ERROR):
        for step in (1, 2):
            recorder.step(step, {"train/loss": 0.5})
        recorder.close()
    assert [record.message.split(";")[0] for record in caplog.records] == ["Broken failed"]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_what_is_missing_or_misspelt_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_trackers(load_config(None, BASE), tmp_path) == []
    with pytest.raises(ValueError, match=r"tracking\.wandb\.mode='off'; allowed: online, offline"):
        load_config(None, [*BASE, "tracking.wandb={project: p, mode: 'off'}"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"tracking\.wandb needs the package wandb: pip install 'epilora\[track\]'"):
        make_trackers(load_config(None, [*BASE, "tracking.wandb={project: p}"]), tmp_path)
