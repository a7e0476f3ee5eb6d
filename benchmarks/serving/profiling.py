"""Where a step's GPU time goes: kernels of decode steps by class, from torch's profiler.

Classes go by kernel names, first match wins. `lora` are kernels that do adapter work (our prologue, which
also quantises, among them); a kernel of ours that multiplies base and adapter together counts as `base_gemm`. `gap_us` is time of a step in which no kernel ran: host work that the GPU
waited for, and launch latency. `host_us` is the time from a step's first launch to its last: what a step outside CUDA graphs
pays on the host.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.driving import Request, add_request

# class -> pattern; order matters.
CLASSES: tuple[tuple[str, str], ...] = (
    ("lora", r"lora_(shrink|expand)|^prologue"),
    ("base_gemm", r"cutlass|gemm|matmul|nvjet|xmma|w8a16"),
    ("attention", r"flash|attention|attn|fmha|reshape_and_cache|paged"),
    ("quantise_norm", r"quant|rms|norm|silu|triton_(poi|red|per)_fused"),
    ("sampling", r"argmax|softmax|sample|top_?k|top_?p|gumbel|sort|cumsum|scan"),
)
SKIP_STEPS = 8  # the first steps after a prefill run with other shapes


def kernel_class(name: str) -> str:
    """The class of a kernel by its name."""
    lowered = name.lower()
    return next((label for label, pattern in CLASSES if re.search(pattern, lowered)), "other")


def profile_steps(engine: Any, requests: Sequence[Request], skip: int = SKIP_STEPS) -> dict[str, Any]:
    """Serve `requests` together and profile the steps after the first `skip` (0: the prefill too).

    Returns steps, step_us (wall time a step, profiler on), gpu_us (by class, a step), launches (kernels by class, a
    step), gap_us, host_us, and the ten longest kernels. On a machine without a GPU the GPU's numbers are zero.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    for request in requests:
        add_request(engine, request)
    for _ in range(skip):
        engine.step()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    steps = 0
    with profile(activities=activities) as recorded:
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_us = (time.perf_counter() - began) * 1e6
    return summarise_kernels(kernels_of(recorded), steps, wall_us) | {
        "host_us": round(launch_span_us(recorded) / steps, 1)
    }


def launch_span_us(recorded: Any) -> float:
    """Microseconds from the first to the last launch of a kernel or graph in a profile; 0 without launches."""
    launches = [event.time_range for event in recorded.events() if re.match(r"cu(da)?(Graph)?Launch", event.name)]
    return max((t.end for t in launches), default=0.0) - min((t.start for t in launches), default=0.0)


def kernels_of(recorded: Any) -> list[tuple[str, float]]:
    """(name, microseconds) of every device activity in a profile."""
    import torch

    return [
        (event.name, float(event.time_range.elapsed_us()))
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def summarise_kernels(kernels: Sequence[tuple[str, float]], steps: int, wall_us: float) -> dict[str, Any]:
    """Sums per step from (name, microseconds) of every kernel. Raises ValueError for no steps."""
    if steps < 1:
        raise ValueError("profile_steps: no step left after the first; ask for more new tokens")
    times: dict[str, float] = {}
    launches: dict[str, int] = {}
    by_name: dict[str, float] = {}
    for name, us in kernels:
        label = kernel_class(name)
        times[label] = times.get(label, 0.0) + us
        launches[label] = launches.get(label, 0) + 1
        by_name[name] = by_name.get(name, 0.0) + us
    busy = sum(times.values())
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    return {
        "steps": steps,
        "step_us": round(wall_us / steps, 1),
        "gpu_us": {label: round(us / steps, 1) for label, us in sorted(times.items())},
        "launches": {label: round(n / steps, 1) for label, n in sorted(launches.items())},
        "gap_us": round(max(0.0, wall_us - busy) / steps, 1),
        "longest": [{"kernel": name[:120], "us": round(us / steps, 1)} for name, us in longest],
    }
