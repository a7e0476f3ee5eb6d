"""Prepared launches: every argument lands where the kernel expects it, for batches of other sizes too."""

import types

import pytest
import torch
from kernel_cases import problem, slot_list

from epilora.kernels import lora_expand as beside
from epilora.kernels.direct import DirectLaunch
from epilora.plugin import direct
from epilora.plugin.gpu_ops import Batch, Call

K, WIDTHS, R, L = 64, (48, 32), 16, 3


class Emulated:
    """A compiled launch whose `run` hands addresses back as tensors to the kernel's ordinary launch."""

    def __init__(self, kernel, constants, tensors):
        self.names = tuple(kernel.arg_names)
        self.kernel, self.constants = kernel, constants
        self.tensors = {t.data_ptr(): t for t in tensors}

    def __call__(self, programs, arguments, device_index):
        given = [self.tensors.get(value, value) for value in arguments]
        assert sum(isinstance(value, torch.Tensor) for value in given) >= 10
        self.kernel[(programs,)](*given, **self.constants)


def call_of(p, M, kind, device):
    groups = beside.group_tokens(slot_list(kind, M, L, device), L)
    flag, count = torch.tensor([False]), torch.tensor([L + 1], dtype=torch.int32)
    a, b = ([o.values.unsqueeze(1) for o in side] for side in (p.lora_a, p.lora_b))
    weight = p.weight.values.t()
    return Call(p.x, None, None, weight, p.weight.scales, None, a, b, [], [], p.slots, Batch(groups, flag, count))


@pytest.mark.parametrize("sizes", [(32, 32), (32, 19), (64, 40)])
def test_a_plan_runs_batches_of_any_size_in_its_bucket(sizes, device, dtype):
    bucket, M = sizes
    shrink = beside.shrink_config_for(bucket, len(WIDTHS), K, R, L)
    expand = beside.expand_config_for(bucket, len(WIDTHS), sum(WIDTHS), R, L)
    p = problem(M, K, WIDTHS, R, L, kind="mixed", dtype=dtype, device=device)
    call = call_of(p, M, "mixed", device)
    groups = call.batch.groups
    y = torch.randn(M, sum(WIDTHS), device=device).to(dtype)
    h = beside.lora_shrink_grouped(p.x, p.lora_a, groups, config=shrink)
    want = beside.lora_expand_add(y.clone(), h, p.lora_b, groups, config=expand)

    out = torch.full_like(h, float("nan"))
    tensors = [
        p.x,
        out,
        y,
        *call.lora_a,
        *call.lora_b,
        groups.sorted_tokens,
        groups.active_slots,
        groups.counts,
        groups.starts,
    ]
    _, _, first = beside.shrink_launch(p.x, p.lora_a, groups, out, shrink)
    _, _, second = beside.expand_launch(y, out, p.lora_b, groups, expand, use_pdl=False)
    variant = (
        Emulated(beside._lora_shrink_grouped_kernel, first, tensors),
        Emulated(beside._lora_expand_add_kernel, second, tensors),
    )
    plan = direct.Plan(call, variant, shrink, expand, pdl=False)
    plan.run_shrink(p.x, out)
    assert torch.equal(plan.run_expand(y, out), want)


def test_an_interpreted_kernel_cannot_be_launched_directly():
    fake = type(
        "Kernel", (), {"__getitem__": lambda self, grid: lambda *a, **k: None, "arg_names": ["x"], "__name__": "fake"}
    )()
    with pytest.raises(TypeError, match=r"fake: launching it returned NoneType"):
        DirectLaunch(fake, (1,), [1], {})


def test_constants_follow_the_arguments_in_the_kernels_order(monkeypatch):
    seen = []
    compiled = types.SimpleNamespace(
        run=lambda *given: seen.append(given), packed_metadata="meta", function="function", launches=0
    )
    fake = type(
        "Kernel",
        (),
        {"__getitem__": lambda self, grid: lambda *a, **k: compiled, "arg_names": ["x", "M", "TILE", "FLAG"]},
    )()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    launch = DirectLaunch(fake, (1,), ["x", 3], {"FLAG": True, "TILE": 16, "num_warps": 4})
    launch(5, [1024, 9], 0)
    assert seen == [(5, 1, 1, 77, "function", "meta", None, None, None, 1024, 9, 16, True)]


@pytest.mark.gpu
def test_prepared_launches_are_accepted_on_this_gpu(device, dtype):
    p = problem(40, K, WIDTHS, R, L, kind="mixed", dtype=dtype, device=device)
    call = call_of(p, 40, "mixed", device)
    shrink = beside.shrink_config_for(64, len(WIDTHS), K, R, L)
    expand = beside.expand_config_for(64, len(WIDTHS), sum(WIDTHS), R, L)
    for streams in (False, True):
        assert direct._checked(call, shrink, expand, streams=streams) is not None
