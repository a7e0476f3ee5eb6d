"""HAProxy in front: deploy/haproxy.cfg with TLS, and Ray Serve's own HAProxy ingress."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.ports import free_port
from tests.serving.operators_port import operators_port
from tests.serving.serving_parts import Parts

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "deploy" / "haproxy.cfg"
pytestmark = pytest.mark.slow  # needs the programs haproxy and openssl


def haproxy_program() -> str:
    haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    assert haproxy, "haproxy is not installed; on Debian: apt-get install haproxy"
    return haproxy


def test_requests_go_through_it_with_tls(tmp_path: Path) -> None:
    haproxy = haproxy_program()
    pem = tmp_path / "epilora.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    parts, tls, plain = Parts(tmp_path / "store"), free_port(), free_port()
    with operators_port(parts.core) as (url, _):
        text = CONFIG.read_text()
        for old, new in (
            ("/etc/haproxy/certs/epilora.pem", str(pem)),
            ("bind :443", f"bind 127.0.0.1:{tls}"),
            ("bind :80", f"bind 127.0.0.1:{plain}"),
            ("127.0.0.1:8000", url.removeprefix("http://")),
        ):
            assert text.count(old) >= 1, old
            text = text.replace(old, new)
        (tmp_path / "haproxy.cfg").write_text(text)
        checked = subprocess.run(
            [haproxy, "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
        assert "warning" not in checked.stderr.lower()
        running = subprocess.Popen([haproxy, "-db", "-f", tmp_path / "haproxy.cfg"], stdout=subprocess.DEVNULL)
        try:
            client = httpx.Client(verify=False, base_url=f"https://127.0.0.1:{tls}", timeout=20)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            headers = {"authorization": "Bearer acme-key"}
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            for path in ("/metrics", "/ready", "/", "/page.js"):
                assert client.get(path).status_code == 404, path
            moved = httpx.get(f"http://127.0.0.1:{plain}/health")
            assert (moved.status_code, moved.headers["location"]) == (308, f"https://127.0.0.1:{plain}/health")
        finally:
            running.terminate()
            running.wait(10)


# Serve reads the variables when it is imported, so it runs in a process of its own. Prints what it saw as JSON.
THROUGH_SERVE = """
import json, sys, time
import httpx, openai, ray
from ray import serve
from actors.adapter_store import start_store
from actors.router import build_app
from tests.actors.fake_engine import CONTEXT, FakeEngine

root, port = sys.argv[1], int(sys.argv[2])
ray.init(address="local", namespace="epilora", num_cpus=2, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 << 20)
store, seen = start_store(root), {}
engine = FakeEngine.options(name="base", namespace="epilora", max_concurrency=1000).remote(token_s=0.05)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(build_app({"engines": "base", "tenants": [{"name": "acme", "key": "acme-key"}]}), name="router", route_prefix="/")
url, key = f"http://127.0.0.1:{port}", {"authorization": "Bearer acme-key"}
client = openai.OpenAI(base_url=f"{url}/v1", api_key="acme-key", max_retries=0, timeout=30)
deadline = time.monotonic() + 60
while True:
    try:
        if httpx.get(f"{url}/ready", timeout=30).status_code == 200:
            break
    except httpx.TransportError:
        pass
    assert time.monotonic() < deadline
    time.sleep(0.2)
whole = client.completions.with_raw_response.create(model="tiny", prompt="hi", max_tokens=3, extra_headers={"x-request-id": "mine"})
seen["whole"], seen["request_id"] = whole.parse().choices[0].text, whole.headers["x-request-id"]
body = {"model": "tiny", "prompt": "hold on", "max_tokens": 3, "stream": True}
with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=30) as answer:
    lines = answer.iter_lines()
    seen["first"] = json.loads(next(lines)[6:])["choices"][0]["text"]  # while the engine holds the rest back
    ray.get(engine.release.remote("hold on"))
    seen["last"] = [line for line in lines if line][-1]
for name, given in (("no_key", {}), ("key", key)):
    answer = httpx.post(f"{url}/v1/completions", json={"model": "ghost", "prompt": "hi"}, headers=given)
    seen[name] = [answer.status_code, answer.json()["error"]["code"]]
# HAProxy takes a closed connection for half closed until it writes to it: who has left is noticed at the next token
long = {**body, "prompt": "hi", "max_tokens": CONTEXT - 2}
with httpx.stream("POST", f"{url}/v1/completions", json=long, headers=key, timeout=30) as answer:
    next(answer.iter_lines())
deadline = time.monotonic() + 30
while ray.get(engine.seen.remote())["running"] and time.monotonic() < deadline:
    time.sleep(0.05)
seen["left"] = ray.get(engine.seen.remote())
print("SEEN" + json.dumps(seen))
serve.shutdown()
ray.shutdown()
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: Ray adds a node's id and HAProxy a socket's name, and such paths end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.ray
def test_the_router_behind_serves_own_haproxy(tmp_path: Path, short: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": haproxy_program(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(short / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(short / "admin.sock"), "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(short),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(short / "server-state"), "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_SERVE, str(tmp_path / "store"), str(free_port())],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.rpartition("SEEN")[2].splitlines()[0])
    assert len(list(short.rglob("haproxy.cfg"))) == 1  # it was HAProxy, not Serve's own proxy
    assert (seen["whole"], seen["request_id"]) == ("base:0 base:1 base:2 ", "mine")
    assert (seen["first"], seen["last"]) == ("base:0 ", "data: [DONE]")
    assert seen["no_key"] == [401, "invalid_api_key"]
    assert seen["key"] == [404, "model_not_found"]
    assert seen["left"]["running"] == []
    assert len(seen["left"]["aborted"]) == 1
