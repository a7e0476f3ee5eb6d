"""`epilora top` against the operators' port on a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from epilora import cli
from epilora.serving.tenants import TenantConfig
from tests.actors.fake_engine import BASE_DIGEST
from tests.serving.operators_port import operators_port
from tests.serving.serving_parts import SPEC, Parts


def with_traffic(tmp_path: Path) -> tuple[Parts, list]:
    parts = Parts(tmp_path, tenants=[TenantConfig("acme", p99_ttft_ms=250.0), TenantConfig("bolt")])
    rng = np.random.default_rng(0)
    for step in range(5):
        tensors = {
            "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(2, 8)).astype(np.float32),
            "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(8, 2)).astype(np.float32),
        }
        parts.store.store.publish(
            "policy-run", SPEC, tensors, base_model="tiny", base_digest=BASE_DIGEST, owner="job:run",
            metadata={"step": step, "reward": step / 4, "mismatch": 1e-7},
        )  # fmt: skip
    parts.publish("tone", 1)
    return parts, [{"model": "tone"}, {}, {"max_tokens": 0}]


def test_top_prints_the_state_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    parts, requests = with_traffic(tmp_path)
    with operators_port(parts.core) as (url, loop):
        for fields in requests:
            asyncio.run_coroutine_threadsafe(parts.complete(**fields), loop).result(10)
        assert cli.main(["top", "--url", url, "--key", "admin-key", "--once"]) == 0
        out = capsys.readouterr().out
        (acme,) = [line for line in out.splitlines() if "acme" in line]
        cells = [cell.strip() for cell in acme.strip(" │┃|").split("│")]
        assert cells[:4] == ["acme", "3", "1", "4"]
        assert cells[5].endswith("of 250")
        (job,) = [line for line in out.splitlines() if "policy-run" in line]
        assert ".-+*@ 1" in job
        assert "1e-07" in job
        assert cli.main(["top", "--url", url, "--key", "acme-key", "--once"]) == 1
        assert "refuses (403)" in capsys.readouterr().err


def test_top_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.delenv("EPILORA_ADMIN_KEY", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["top", "--url", "http://127.0.0.1:9"])
    assert "no admin key" in capsys.readouterr().err
    monkeypatch.setenv("EPILORA_ADMIN_KEY", "k")
    assert cli.main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "does not answer" in capsys.readouterr().err
