"""Who may import whom: every package is imported in a fresh process with the packages it must not know blocked."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BLOCKER = """
import importlib, pkgutil, sys
blocked = set({blocked!r})
class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in blocked):
            raise AssertionError(f"{{name}} must not be imported by {package}")
sys.meta_path.insert(0, Block())
root = importlib.import_module({package!r})
names = [root.__name__]
if hasattr(root, "__path__"):
    names += [m.name for m in pkgutil.walk_packages(root.__path__, root.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""

UPPER = ["actors", "jobs", "ray"]
RULES = {
    "epilora.types": ["torch", "numpy", "vllm", "epilora.quant", *UPPER],
    "epilora.errors": ["torch", "numpy", "vllm", *UPPER],
    "epilora.config": ["torch", "vllm", "epilora.quant", "epilora.kernels", *UPPER],
    "epilora.quant": ["vllm", "transformers", "epilora.kernels", "epilora.adapters", *UPPER],
    "epilora.kernels": ["vllm", "transformers", "epilora.adapters", "epilora.config", "epilora.types", *UPPER],
    "epilora.adapters": ["vllm", "transformers", "epilora.plugin", "epilora.trainer", *UPPER],
    "epilora.store": ["torch", "vllm", "transformers", "epilora.plugin", "epilora.trainer", *UPPER],
    "epilora.fairness": ["torch", "numpy", "vllm", "epilora.quant", "epilora.serving", *UPPER],
    "epilora.serving": ["torch", "vllm", "transformers", *UPPER],
    "epilora.tasks": ["vllm", "epilora.plugin", "epilora.trainer", *UPPER],
    "epilora.trainer": ["vllm", "epilora.plugin", *UPPER],
    "epilora.planner": ["torch", "vllm", *UPPER],
    "actors.protocols": ["torch", "vllm", "ray"],
    "actors.handles": ["torch", "vllm", "ray"],
    "actors.router": ["torch", "vllm", "transformers", "jobs"],
    "actors.engine_pool": ["torch", "vllm", "transformers", "jobs"],
    "jobs.loop": ["torch", "vllm", "ray"],
}


@pytest.mark.parametrize("package", sorted(RULES))
def test_package_imports_only_what_it_may(package: str) -> None:
    code = BLOCKER.format(blocked=RULES[package], package=package)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_only_the_plugin_imports_vllm() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("epilora", "actors", "jobs")
        for path in (ROOT / folder).rglob("*.py")
        if "plugin" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith(("import vllm", "from vllm"))
    ]
    assert offenders == []


def test_no_tensor_code_in_jobs() -> None:
    allowed = {"pretrain_tiny.py", "convert_smollm2.py"}  # they make model folders by calling epilora.models
    offenders = [
        path.name
        for path in (ROOT / "jobs").glob("*.py")
        if path.name not in allowed
        for line in path.read_text().splitlines()
        if line.strip().startswith(("import torch", "from torch"))
    ]
    assert offenders == []
