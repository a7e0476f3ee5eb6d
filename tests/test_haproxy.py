"""deploy/haproxy.cfg: HAProxy takes it, and through it a router streams and operators' paths stay closed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.serving.operators_port import operators_port
from tests.serving.serving_parts import Parts

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "deploy" / "haproxy.cfg"
pytestmark = pytest.mark.slow  # needs the programs haproxy and openssl


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_requests_go_through_it_with_tls(tmp_path: Path) -> None:
    haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    assert haproxy, "haproxy is not installed; on Debian: apt-get install haproxy"
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
