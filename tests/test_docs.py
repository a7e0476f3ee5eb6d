"""Every command of the documentation is run as it stands there.

A fenced block is `bash` (run in `make test`), `bash minutes` (slow) or `bash server` (slow; started, waited for, and left running for the
blocks after it). Slow ones run in a copy of the checkout with ports of its own. Code spans in the text are held against what exists.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.ports import free_ports
from epilora.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```bash ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = ("", "minutes", "server")
SHORT_RUN = "rl.prompts_per_step=8 rl.group_size=4 rl.eval_problems=16"
# What a reader need not say: a small run, so that the blocks take minutes.
SMALL = f"rl.steps=4 {SHORT_RUN} tenant_baseline_s=1 tenant_prompts=8"


@dataclass(frozen=True)
class Block:
    """A fenced block: its file and line, its kind, its commands."""

    where: str
    kind: str
    text: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(f"docs/{path.name}:{text[: found.start()].count(chr(10)) + 1}", found[1], found[2])
        for found in FENCE.finditer(text)
    ]


def environment(root: Path) -> dict[str, str]:
    """Of a reader's shell with the virtual environment active. root: the checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST_"))}
    return kept | {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


CHEAP = [block for path in DOCS for block in blocks(path) if not block.kind]


@pytest.mark.parametrize("block", CHEAP, ids=lambda block: block.where)
def test_a_cheap_block_runs(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.where}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_there_are_blocks_of_every_kind_and_of_no_other() -> None:
    found = [block.kind for path in DOCS for block in blocks(path)]
    assert set(found) == set(KINDS)
    fences = sum(path.read_text().count("```bash") for path in DOCS)
    assert len(found) == fences


def test_code_spans_name_what_exists() -> None:
    """Commands in the running text: the program's sub-command, module, make target and the checkout's files."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for path in [*DOCS, ROOT / "README.md"]:
        for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)):
            words = span.split()
            for word in words:
                if re.match(r"(configs|deploy|jobs|scripts)/[\w/.-]+\.\w+$", word):
                    assert (ROOT / word).exists(), (path.name, span)
            module = re.search(r"python -m ([\w.]+)", span)
            assert module is None or find_spec(module[1]) is not None, (path.name, span)
            assert words[:1] != ["epilora"] or len(words) == 1 or words[1] in COMMANDS, (path.name, span)
            assert words[:1] != ["make"] or len(words) == 1 or words[1] in targets, (path.name, span)
            seen += len(words) > 1
    assert seen > 50


def test_links_lead_somewhere() -> None:
    for path in DOCS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (path.name, target)


def test_messages_of_troubleshooting_are_in_the_source() -> None:
    sources = [file for folder in ("epilora", "actors", "jobs") for file in (ROOT / folder).rglob("*.py")]
    said = "\n".join(
        node.value
        for file in sources
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    ours = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Ray, Serve and the machine")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)
    assert len(messages) > 15
    missing = [piece for message in messages for piece in message.split("...") if piece.strip() and piece not in said]
    assert missing == []


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    explained = re.findall(r"^\| (Epilora\w+) \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules]


# ---- the slow blocks -------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Follows a page in a copy of the checkout. Exported variables stay from block to block."""

    folder: Path
    ray_dir: str
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")
        (self.folder / ".gitignore").open("a").write("/.venv\n")  # what a folder of that name is already
        for name in ("pyproject.toml", "scripts/bootstrap.py"):
            os.utime(self.folder / name, (0, 0))  # the environment is newer
        # Not in the checkout: a submitted job's copy is named after what is in it.
        self._kept = Path(self.ray_dir) / "exported"
        self.http, self.admin, gcs, dashboard, client, agent = free_ports(6)
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        serve = self.folder / "configs" / "serve.yaml"
        serve.write_text(self._here(serve.read_text().replace("port: 8000", f"port: {self.http}")))
        self._head = (
            f" --port={gcs} --dashboard-port={dashboard} --ray-client-server-port={client} --disable-usage-stats"
            f" --dashboard-agent-listen-port={agent} --temp-dir={self.ray_dir} --object-store-memory=150000000"
        )
        self._after_head = {
            "RAY_ADDRESS": f"127.0.0.1:{gcs}", "RAY_API_SERVER_ADDRESS": self._dashboard,
            "RAY_DASHBOARD_ADDRESS": self._dashboard,
        }  # fmt: skip
        self._variables = environment(self.folder)
        self._variables["ARGS"] = f"{SMALL} router.port={self.http} router.admin_port={self.admin}"

    def _here(self, text: str) -> str:
        """The same commands on this reader's ports."""
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.http}").replace(
            "127.0.0.1:8001", f"127.0.0.1:{self.admin}"
        )
        return text.replace("admin_port: 8001", f"admin_port: {self.admin}")

    def follow(self, name: str) -> None:
        for block in blocks(ROOT / "docs" / name):
            if block.kind == "server":
                self._serve(block)
            elif block.kind == "minutes":
                self._run(block)

    def _run(self, block: Block) -> None:
        text = self._here(block.text).replace("configs/rl_small.yaml", f"configs/rl_small.yaml {SHORT_RUN}")
        script = f"set -euo pipefail\n{text}\nexport -p > {self._kept}\n"
        before = f"source {self._kept}\n" if self._kept.exists() else ""
        done = subprocess.run(
            ["bash", "-c", before + script], cwd=self.folder, env=self._variables, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        logs = "".join(log.read_text()[-3000:] for log in self._kept.parent.glob("server-*.log"))
        assert done.returncode == 0, f"{block.where}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"

    def _serve(self, block: Block) -> None:
        command, log = block.text.strip(), self._kept.parent / f"server-{len(self.servers)}.log"
        head = command.startswith("ray start --head")
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}{self._head if head else ''}"], cwd=self.folder, env=self._variables,
            stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.servers.append(server)
        if head:
            self._wait(lambda: httpx.get(f"{self._dashboard}/api/version").status_code == 200, server, log)
            self._variables |= self._after_head
            self._wait(self._takes_jobs, server, log)
        else:
            self._wait(lambda: "epilora top" in log.read_text(), server, log)
            self._variables["KEY"] = re.search(r"^  acme +(\S+)$", log.read_text(), re.MULTILINE)[1]  # type: ignore[index]
            self._wait(lambda: httpx.get(f"http://127.0.0.1:{self.http}/ready").status_code == 200, server, log)

    def _takes_jobs(self) -> bool:
        done = subprocess.run(
            ["ray", "job", "submit", "--", "true"],
            env=self._variables,
            cwd=self.folder,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    @staticmethod
    def _wait(there: Callable[[], bool], server: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + 400
        while True:
            try:
                if there():
                    return
            except httpx.TransportError:
                pass
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)

    def stop(self) -> None:
        for server in reversed(self.servers):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(90)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with _short_folder() as ray_dir:
        started = Reader(tmp_path, ray_dir)
        try:
            yield started
        finally:
            started.stop()


@contextmanager
def _short_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_newcomer_follows_the_quickstart_and_trains(reader: Reader) -> None:
    reader.follow("quickstart.md")
    reader.stop()
    reader.servers.clear()
    reader.follow("rl.md")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_an_operator_follows_cluster_serving_and_operations(reader: Reader) -> None:
    for page in ("cluster.md", "serving.md", "operations.md"):
        reader.follow(page)


def test_every_slow_block_is_followed() -> None:
    pages = {path.name for path in DOCS if any(block.kind for block in blocks(path))}
    assert pages == {"quickstart.md", "rl.md", "cluster.md", "serving.md", "operations.md"}
