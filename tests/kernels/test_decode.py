"""The decode path: both launches together, every implementation this machine has, against the fp32 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import problem, rms_ratio

from epilora.errors import UnsupportedKernel
from epilora.kernels.decode_config import DecodeConfig, config_for, is_legal, num_stages, tuned_entries
from epilora.kernels.lora_decode import DecodeWorkspace, lora_decode, lora_decode_ref
from epilora.kernels.quantize import quantize_ref
from epilora.quant.formats import ScaleAxis

IMPLEMENTATIONS = ["cuda", "triton"] if torch.cuda.is_available() else ["interpreter", "reference"]
# Rounding h once to 16 bits and y once: RMS of each is below half a unit in the last place.
LIMIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def workspace(device, K: int, p) -> DecodeWorkspace:
    rank = p.lora_a[0].values.shape[1]
    return DecodeWorkspace(device, max_k=K, max_h=DecodeWorkspace.h_values(len(p.lora_a), rank))


SHAPES = [
    (1, 64, (32,), 8, 1),
    (4, 1104, (64, 32, 32), 16, 4),  # K off the 512-byte stage
    (9, 576, (576, 192, 192), 64, 8),
    (17, 256, (32, 32, 48, 80), 40, 64),
]
BIG = [
    (1, 4096, (4096, 1024, 1024), 64, 8),
    (16, 12288, (4096,), 64, 8),
    (32, 4096, (12288, 12288), 128, 32),
    (32, 4096, (4096,), 256, 32),
]
ALL_SHAPES = SHAPES + (BIG if torch.cuda.is_available() else [])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["one", "none", "distinct", "mixed", "stale"])
@pytest.mark.parametrize(("M", "K", "widths", "R", "L"), ALL_SHAPES, ids=str)
def test_lora_decode(M, K, widths, R, L, kind, implementation, device, dtype, poisoned_empty):
    axis = ScaleAxis.TENSOR if M == 4 else ScaleAxis.CHANNEL
    p = problem(M, K, widths, R, L, kind=kind, dtype=dtype, device=device, axis=axis, bias=M == 9)
    y = lora_decode(
        p.x, p.weight, *p.lora, bias=p.bias, workspace=workspace(device, K, p), implementation=implementation
    )
    ref = lora_decode_ref(p.x, p.weight, *p.lora, bias=p.bias)
    assert rms_ratio(y, ref) < LIMIT[dtype] * (0.5 if kind == "none" else 1.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lora_decode_without_adapters(implementation, device, dtype):
    p = problem(3, 208, (48,), 16, 2, kind="one", dtype=dtype, device=device)
    ws = workspace(device, 208, p)
    y = lora_decode(p.x, p.weight, workspace=ws, implementation=implementation)
    assert rms_ratio(y, lora_decode_ref(p.x, p.weight)) < LIMIT[dtype] * 0.5
    if implementation != "reference":
        codes, scale = quantize_ref(p.x)
        assert torch.equal(ws.codes[: 3 * 208].view(3, 208), codes.view(torch.uint8))
        assert torch.equal(ws.scale[:3], scale.view(-1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lora_decode_nobody_active_replays_old_slots(implementation, device, dtype):
    p = problem(4, 128, (32, 32), 16, 4, kind="one", dtype=dtype, device=device)
    ws = workspace(device, 128, p)
    active = torch.full((5,), -1, dtype=torch.int32, device=device)
    y = lora_decode(p.x, p.weight, *p.lora, active_lora_ids=active, workspace=ws, implementation=implementation)
    assert rms_ratio(y, lora_decode_ref(p.x, p.weight)) < LIMIT[dtype] * 0.5
    active[0] = 3
    y = lora_decode(p.x, p.weight, *p.lora, active_lora_ids=active, workspace=ws, implementation=implementation)
    assert rms_ratio(y, lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "reference"])
def test_lora_decode_row_does_not_depend_on_neighbours_or_rubbish(implementation, device, dtype):
    """Same path and bucket: a row's bits stay when other rows change adapter or hold rubbish."""
    p = problem(8, 256, (64, 32), 16, 8, kind="distinct", dtype=dtype, device=device)
    ws = workspace(device, 256, p)
    first = lora_decode(p.x, p.weight, *p.lora, workspace=ws, implementation=implementation).clone()
    slots = torch.tensor([0, 0, -1, 99, 5, 5, 2, -3], dtype=torch.int32, device=device)
    x = p.x.clone()
    x[3:] = float("nan")
    ws.h.fill_(float("nan"))
    second = lora_decode(x, p.weight, p.lora_a, p.lora_b, slots, workspace=ws, implementation=implementation)
    assert torch.equal(first[0], second[0])
    assert torch.isfinite(second[:3]).all()


def test_lora_decode_strided_input_and_output(device, dtype):
    p = problem(4, 128, (32,), 16, 4, kind="mixed", dtype=dtype, device=device)
    wide = torch.zeros(4, 256, dtype=dtype, device=device)
    wide[:, 128:] = p.x
    out = torch.full((4, 64), float("nan"), dtype=dtype, device=device)
    ws = workspace(device, 128, p)
    lora_decode(wide[:, 128:], p.weight, *p.lora, workspace=ws, out=out[:, 32:])
    assert rms_ratio(out[:, 32:], lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]
    assert torch.isnan(out[:, :32]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("M", "K", "widths", "R"), [(3, 128, (32, 16), 16), (17, 272, (48, 64, 16), 40)], ids=str)
def test_lora_decode_fp8_adapters(M, K, widths, R, implementation, device, dtype):
    p = problem(M, K, widths, R, 3, kind="mixed", dtype=dtype, device=device, fp8=True)
    y = lora_decode(p.x, p.weight, *p.lora, workspace=workspace(device, K, p), implementation=implementation)
    assert rms_ratio(y, lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "cuda"])
@pytest.mark.parametrize("stored", ["", "fp8", "nvfp4"])
@pytest.mark.parametrize("axis", [ScaleAxis.CHANNEL, ScaleAxis.BLOCK])
def test_lora_decode_every_base_with_every_adapter(axis, stored, implementation, device, dtype):
    kind = {stored: True} if stored else {}
    p = problem(9, 272, (48, 64, 16), 32, 4, kind="mixed", dtype=dtype, device=device, axis=axis, **kind)
    y = lora_decode(p.x, p.weight, *p.lora, workspace=workspace(device, 272, p), implementation=implementation)
    assert rms_ratio(y, lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]
    base = lora_decode(p.x, p.weight, workspace=workspace(device, 272, p), implementation=implementation)
    assert torch.equal(base[p.slots < 0], y[p.slots < 0])


@pytest.mark.gpu
def test_lora_decode_cuda_refuses_other_formats(device, dtype):
    for options, why in (({"axis": ScaleAxis.BLOCK}, "a scale a block"), ({"nvfp4": True}, "stored in nvfp4")):
        p = problem(2, 256, (32,), 16, 2, kind="one", dtype=dtype, device=device, **options)
        with pytest.raises(UnsupportedKernel, match=why):
            lora_decode(p.x, p.weight, *p.lora, workspace=workspace(device, 256, p), implementation="cuda")


def test_lora_decode_rejects(device, dtype):
    p = problem(4, 64, (32,), 16, 3, kind="one", dtype=dtype, device=device)
    ws = workspace(device, 64, p)
    with pytest.raises(ValueError, match="x has 33 tokens; allowed: 0 to 32"):
        lora_decode(torch.zeros(33, 64, dtype=dtype, device=device), p.weight, workspace=ws)
    with pytest.raises(ValueError, match="1 slices of lora_a, 0 of lora_b"):
        lora_decode(p.x, p.weight, p.lora_a, [], p.slots, workspace=ws)
    with pytest.raises(ValueError, match=r"workspace\.h has 1 values"):
        lora_decode(p.x, p.weight, *p.lora, workspace=DecodeWorkspace(device, max_k=64, max_h=1))
    with pytest.raises(ValueError, match=r"out is .*float32 \(4, 32\); needed"):
        lora_decode(p.x, p.weight, workspace=ws, out=torch.zeros(4, 32, device=device))
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedKernel, match="implementation=cuda asked, but tensors are on cpu"):
            lora_decode(p.x, p.weight, workspace=ws, implementation="cuda")
    assert lora_decode(p.x[:0], p.weight, workspace=ws).shape == (0, 32)


def test_config_for_models_is_legal():
    """Every projection of the models we measure fits the stated default, sharded too."""
    from benchmarks.shapes import MODELS

    for layer in MODELS.values():
        for projection in layer:
            for tp in (1, 2, 4):
                try:
                    p = projection.shard(tp)
                except ValueError:
                    continue
                if p.K % 16 or any(n % 16 for n in p.slices):
                    continue
                for M in (1, 8, 16, 32):
                    for rank in (0, 8, 64, 256):
                        for gpu in ("", "NVIDIA H200"):  # the H200's table has no entry of 32 tokens without adapters
                            config = config_for(M, p.N, p.K, rank, 8, device_name=gpu)
                            assert is_legal(config, M, p.K, p.slices, rank), (p, M, rank, gpu)


def test_config_for_takes_the_nearest_entry_of_the_table():
    gpu = "NVIDIA H200"
    entries = tuned_entries(gpu)
    assert {e["M"] for e in entries} == {1, 4, 8, 16, 32}
    one = config_for(1, 6144, 4096, 64, 8, device_name=gpu)
    listed = [e["config"] for e in entries if (e["N"], e["K"], e["M"], e["rank"]) == (6144, 4096, 1, 64)]
    assert one == dataclasses.replace(DecodeConfig(**listed[0]), shrink_groups=0)  # the caller does not know
    assert config_for(3, 6144, 4096, 64, 8, device_name=gpu, distinct_adapters=2).shrink_groups == 2
    many = config_for(20, 24576, 4096, 64, 32, device_name=gpu, distinct_adapters=20)
    few = config_for(20, 24576, 4096, 64, 32, device_name=gpu, distinct_adapters=1)
    assert (many.shrink_groups, few.shrink_groups) == (20, 1)
    assert dataclasses.replace(many, shrink_groups=1) != few
    assert config_for(20, 24576, 4096, 64, 32, device_name=gpu) == dataclasses.replace(few, shrink_groups=0)
    # Entries without adapters serve launches without adapters only; a small rank takes the nearest rank's entry.
    assert config_for(1, 6144, 4096, 16, 8, device_name=gpu) == one
    assert config_for(1, 6144, 4096, 64, 8, device_name="another GPU") == config_for(1, 6144, 4096, 64, 8)
    for entry in entries:
        assert is_legal(DecodeConfig(**entry["config"]), entry["M"], entry["K"], [entry["N"]], entry["rank"]), entry


def test_is_legal_refuses():
    config = DecodeConfig()
    assert is_legal(config, 1, 4096, [4096], 64)
    assert not is_legal(config, 33, 4096, [4096], 64)
    assert not is_legal(config, 1, 4100, [4096], 64)
    assert not is_legal(config, 1, 4096, [4090], 64)
    assert not is_legal(config, 1, 4096, [4096], 12)
    assert not is_legal(DecodeConfig(stage_k=512, k_warps=16), 1, 4096, [4096], 64)
    assert num_stages(config, 16, 1, 64, 99 * 1024, 4096) < num_stages(config, 16, 1, 64, 227 * 1024, 4096)
    fused = DecodeConfig(fused=1)
    assert is_legal(fused, 8, 4096, [4096], 64)
    assert not is_legal(fused, 9, 4096, [4096], 64)
    assert not is_legal(dataclasses.replace(fused, wgmma=True), 1, 4096, [4096], 64)
    assert not is_legal(dataclasses.replace(fused, fused=9), 8, 4096, [4096], 64)  # more groups than multiplying warps
    assert num_stages(fused, 8, 1, 64, 227 * 1024, 12288) < num_stages(fused, 8, 1, 64, 227 * 1024, 4096)


CONFIGS = [
    DecodeConfig(2, 4, 512),
    DecodeConfig(4, 2, 512, lora_warps=2),
    DecodeConfig(1, 4, 512, shrink_groups=1, lora_warps=8, early=False),
    DecodeConfig(2, 2, 512, wgmma=True),
    DecodeConfig(3, 1, 512, wgmma=True, early=False, lora_warps=8),
    DecodeConfig(4, 2, 1024, wgmma=True, window_kib=200),
    DecodeConfig(2, 4, 512, fused=1),
    DecodeConfig(4, 2, 512, fused=4, lora_warps=8),
]
REPEATED = [(1, 4096, 64), (8, 4096, 64), (9, 1104, 16), (32, 4096, 256)]


def legal_somewhere(config):
    return [shape for shape in REPEATED if is_legal(config, shape[0], shape[1], (512, 128, 64), shape[2])]


def test_every_repeated_config_is_legal_for_some_shape():
    for config in CONFIGS:
        assert legal_somewhere(config), config


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(
    ("M", "K", "R", "config"), [(*shape, c) for c in CONFIGS for shape in legal_somewhere(c)], ids=str
)
def test_lora_decode_configs_repeat_their_bits(M, K, R, config):
    """Up-projections that end after the main loop once met a barrier in parts: many calls, one answer."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    p = problem(M, K, (512, 128, 64), R, 8, kind="mixed", dtype=dtype, device=device)
    ws = workspace(device, K, p)
    ref = lora_decode_ref(p.x, p.weight, *p.lora)
    first = lora_decode(p.x, p.weight, *p.lora, workspace=ws, config=config, implementation="cuda")
    assert rms_ratio(first, ref) < LIMIT[dtype]
    for i in range(50):
        ws.h.fill_(float("nan"))
        y = lora_decode(p.x, p.weight, *p.lora, workspace=ws, config=config, implementation="cuda", use_pdl=i % 2 == 0)
        assert torch.equal(y, first), i


@pytest.mark.gpu
def test_lora_decode_captured_replays_follow_changed_slots():
    """100 replays give the same bits; changing slots, adapters and poison in place is followed by the next replay."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    p = problem(16, 4096, (4096, 1024, 1024), 64, 8, kind="mixed", dtype=dtype, device=device)
    ws = workspace(device, 4096, p)
    y = torch.empty(16, 6144, dtype=dtype, device=device)
    z = torch.empty_like(y)

    def both():
        lora_decode(p.x, p.weight, *p.lora, workspace=ws, out=y)
        lora_decode(p.x, p.weight, *p.lora, workspace=ws, out=z)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    plain = lora_decode(p.x, p.weight, *p.lora, workspace=ws, use_pdl=False)
    for _ in range(100):
        y.fill_(float("nan"))
        ws.h.fill_(float("nan"))
        ws.codes.fill_(255)
        ws.scale.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, plain)
        assert torch.equal(z, plain)
    for round_index in range(20):
        p.slots.copy_(torch.randint(-1, 8, (16,), dtype=torch.int32))
        p.lora_b[0].values.normal_(std=0.1)
        p.x.normal_()
        graph.replay()
        expected = lora_decode(p.x, p.weight, *p.lora, workspace=ws, use_pdl=False)
        assert torch.equal(y, expected), round_index
        assert rms_ratio(y, lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [DecodeConfig(2, 4, 512), DecodeConfig(2, 4, 512, fused=4)], ids=str)
def test_lora_decode_sees_slots_written_by_the_kernel_before_it(config):
    """Slots are read early as a guess; a copy right before the call makes the guess wrong."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    p = problem(4, 1024, (512,), 64, 4, kind="distinct", dtype=dtype, device=device)
    ws = workspace(device, 1024, p)
    lists = [[0, 1, 2, 3], [3, 3, -1, 0], [-1, -1, -1, -1], [2, 2, 2, 2]]
    lists = [torch.tensor(v, dtype=torch.int32, device=device) for v in lists]
    expected = []
    for slots in lists:
        p.slots.copy_(slots)
        y = lora_decode(p.x, p.weight, *p.lora, workspace=ws, config=config, implementation="cuda", use_pdl=False)
        assert rms_ratio(y, lora_decode_ref(p.x, p.weight, *p.lora)) < LIMIT[dtype]
        expected.append(y)
    outs = [torch.empty_like(expected[0]) for _ in range(12)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, out in enumerate(outs):
            p.slots.copy_(lists[i % 4])
            lora_decode(p.x, p.weight, *p.lora, workspace=ws, out=out, config=config, implementation="cuda")
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for i, out in enumerate(outs):
            assert torch.equal(out, expected[i % 4]), i


@pytest.mark.gpu
def test_lora_decode_chain_of_dependent_projections_thousands_of_replays():
    """o feeds down feeds o: every projection reads what the previous one wrote, with programmatic launches all along."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    p = [problem(8, 1024, (1024,), 64, 4, kind="mixed", dtype=dtype, device=device) for _ in range(4)]
    for q in p:
        q.weight.scales.mul_(0.3)
    ws = workspace(device, 1024, p[0])
    buffers = [p[0].x] + [torch.empty(8, 1024, dtype=dtype, device=device) for _ in p]

    def chain(**options):
        for i, q in enumerate(p):
            lora_decode(buffers[i], q.weight, *q.lora, workspace=ws, out=buffers[i + 1], **options)

    chain(use_pdl=False)
    expected = [b.clone() for b in buffers]
    assert torch.isfinite(expected[-1]).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(3000):
        for b in buffers[1:]:
            b.fill_(float("nan"))
        graph.replay()
        for b, e in zip(buffers, expected, strict=True):
            wrong += (b != e).sum()
    assert wrong.item() == 0
