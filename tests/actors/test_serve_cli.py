"""configs/serve.yaml through Serve's own command line, on a Ray cluster with a real engine, asked with curl and openai."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.router import build_app
from benchmarks.ports import free_ports
from epilora.serving.keys import issue

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "configs" / "serve.yaml"
BIN = Path(sys.executable).parent

ENGINE = """
import ray
from actors.adapter_store import start_store
from actors.engine import EngineActor
from epilora.models import resolve_model_path
ray.init(address="auto", namespace="epilora", log_to_driver=False)
store = start_store({root!r})
engine = EngineActor.options(name="base", namespace="epilora", lifetime="detached", num_cpus=1).remote(
    "epilora.plugin.engine:VllmEngine",
    dict(name="base", model_path=str(resolve_model_path("package:tiny-arith")), max_model_len=32, max_num_seqs=16),
)
ray.get([store.ready.remote(), engine.ready.remote()], timeout=300)
"""


def test_the_file_is_what_serve_and_the_builder_accept(tmp_path: Path) -> None:
    document = yaml.safe_load(SERVE.read_text())
    parsed = ServeDeploySchema.parse_obj(document)
    (application,) = parsed.applications
    assert application.import_path == "actors.router:build_app"
    assert str(parsed.http_options.host) == "127.0.0.1"
    tenants = tmp_path / "tenants.json"
    issue(tenants, "acme", {}, admin=False, revoke=False)
    assert build_app({**application.args, "tenants_file": str(tenants)})


class Cluster:
    """A head node of its own, its ports and the environment for commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        gcs, self.dashboard, self.http, self.admin, client = free_ports(5)
        self.folder = folder
        self.environment = {
            **os.environ, "RAY_ADDRESS": f"127.0.0.1:{gcs}", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        self.head = subprocess.Popen(
            [BIN / "ray", "start", "--head", "--block", f"--port={gcs}", f"--dashboard-port={self.dashboard}",
             f"--ray-client-server-port={client}", "--num-cpus=4", "--object-store-memory=150000000",
             f"--temp-dir={folder}", "--disable-usage-stats"],
            env={key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"},
            stdout=(folder / "head.log").open("w"), stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def run(self, *command: str, timeout: float = 300) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def wait(self, condition: Any, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except (httpx.TransportError, AssertionError):
                pass
            assert time.monotonic() < deadline, "what was waited for did not come"
            time.sleep(0.5)

    def stop(self) -> None:
        self.head.terminate()
        self.head.wait(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        started = Cluster(Path(folder))
        try:
            started.wait(
                lambda: httpx.get(f"http://127.0.0.1:{started.dashboard}/api/version").status_code in (200, 401)
            )
            yield started
        finally:
            started.stop()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_serve_deploy_serves_a_real_engine(cluster: Cluster) -> None:
    root = cluster.folder / "store"
    tenants = root / "tenants.json"
    key = issue(tenants, "acme", {"p99_ttft_ms": 2000}, admin=False, revoke=False)
    admin = issue(tenants, "operator", {}, admin=True, revoke=False)
    cluster.run(sys.executable, "-c", ENGINE.format(root=str(root)), timeout=400)
    document = yaml.safe_load(SERVE.read_text())
    document["http_options"]["port"] = cluster.http
    document["applications"][0]["args"] |= {"tenants_file": str(tenants), "admin_port": cluster.admin}
    config = cluster.folder / "serve.yaml"
    config.write_text(yaml.safe_dump(document))
    cluster.run(str(BIN / "serve"), "deploy", str(config))
    url = f"http://127.0.0.1:{cluster.http}"
    cluster.wait(lambda: httpx.get(f"{url}/ready").status_code == 200)
    assert "RUNNING" in cluster.run(str(BIN / "serve"), "status")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
    assert "base" in [model.id for model in client.models.list().data]
    whole = client.completions.create(model="base", prompt="1+2=", max_tokens=4, temperature=0)
    streamed = client.completions.create(model="base", prompt="1+2=", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text != ""
    body = json.dumps({"model": "base", "prompt": "1+2=", "max_tokens": 4, "temperature": 0})
    answer = cluster.run(
        "curl", "-sS", f"{url}/v1/completions", "-H", f"Authorization: Bearer {key}", "-H",
        "Content-Type: application/json", "-d", body,
    )  # fmt: skip
    assert json.loads(answer)["choices"][0]["text"] == whole.choices[0].text
    assert httpx.get(f"{url}/metrics").status_code == 404
    out = cluster.run(
        sys.executable,
        "-m",
        "epilora.cli",
        "top",
        "--once",
        "--url",
        f"http://127.0.0.1:{cluster.admin}",
        "--key",
        admin,
    )
    assert "acme" in out
    document["applications"][0]["args"]["max_active"] = 8  # a second deploy changes the running application
    config.write_text(yaml.safe_dump(document))
    cluster.run(str(BIN / "serve"), "deploy", str(config))
    cluster.wait(lambda: "DEPLOYING" not in cluster.run(str(BIN / "serve"), "status"))
    cluster.wait(lambda: client.completions.create(model="base", prompt="1+2=", max_tokens=1).choices[0].text != "")
