"""The operators against stock arithmetic and fp32, one projection at a time, in plain torch."""

import gc
import weakref

import pytest
import torch

from epilora.errors import UnsupportedKernel
from epilora.plugin import gpu_ops
from epilora.plugin.gpu_ops import PATHS, Mode, Path
from epilora.quant.formats import ScaleAxis
from epilora.quant.nvfp4 import quantize_nvfp4_stack_ref
from epilora.quant.reference import dequantize, quantize_per_token_ref, quantize_rows_ref, quantize_weight_ref

L, R, K, WIDTHS = 3, 16, 32, (48, 16, 16)
MAPPINGS = {
    "one": [2],
    "none": [-1, -1],
    "all of one": [1] * 5,
    "mixed": [-1, 0, 2, 0, -1, 1, 2, 2],
    "many": [(7 * i) % (L + 1) - 1 for i in range(70)],
}
TORCH_GEMM = gpu_ops.VENDORS.index("ChannelWiseTorchFP8ScaledMMLinearKernel")


def meta_of(slots, room=128):
    """vLLM's batch description of slots, with stale entries past them."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    meta = LoRAKernelMeta.make(L, room, device="cpu")
    meta.prepare_tensors(torch.randint(0, L, (room,), dtype=torch.int32))
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32))
    return meta


def arguments(slots, *, dtype=torch.bfloat16, stored="16bit", axis=ScaleAxis.CHANNEL, bias=True, codes=True, padding=0):
    g = torch.Generator().manual_seed(len(slots))

    def rand(*size):
        return torch.randn(*size, generator=g)

    M, N = len(slots) + padding, sum(WIDTHS)
    x = rand(M, K).to(dtype)
    weight = quantize_weight_ref(rand(N, K) * torch.linspace(0.5, 2, N)[:, None], axis)
    a = [(rand(L, 1, R, K) * 0.3).to(dtype) for _ in WIDTHS]
    b = [(rand(L, 1, n, R) * 0.3).to(dtype) for n in WIDTHS]
    scales = ([], [])
    if stored != "16bit":
        quantise = quantize_rows_ref if stored == "fp8" else quantize_nvfp4_stack_ref
        held = [[quantise(s.squeeze(1)) for s in side] for side in (a, b)]
        a, b = ([o.values.unsqueeze(1) for o in side] for side in held)
        scales = tuple(
            [o.scales for o in side] + [o.global_scale for o in side if o.global_scale is not None] for side in held
        )
    meta = meta_of(slots)
    quantised = quantize_per_token_ref(x) if codes else (None, None)
    return (
        x, *quantised, weight.values.t(), weight.scales.reshape(-1, 1) if axis is ScaleAxis.CHANNEL else weight.scales,
        rand(N).to(dtype) if bias else None, a, b, *map(list, scales), gpu_ops.register_batch(meta),
    )  # fmt: skip


def call_of(given):
    return gpu_ops.Call(*given, gpu_ops.batch_of(given[-1]))


def exact(call, slots, *, matched=False):
    """The projection in fp64 on the stored values, and the same without adapters."""
    x = call.x.double()
    if not matched:
        codes, scale = quantize_per_token_ref(call.x)
        x = codes.double() * scale.double()
    y = x @ dequantize(call.base()).double().t()
    if call.bias is not None:
        y = y + call.bias.double()
    base = y.clone()
    a, b = ([dequantize(o).double() for o in side] for side in call.adapters())
    for row, slot in enumerate(slots):
        if slot >= 0:
            deltas = [b_LNR[slot] @ (a_LRK[slot] @ call.x[row].double()) for a_LRK, b_LNR in zip(a, b, strict=True)]
            y[row] += torch.cat(deltas)
    return y, base


def forced(path, *, matched=False):
    return Mode(TORCH_GEMM, int(matched), PATHS.index(path) + 1 if path else 0).pack()


def error(y, want):
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("path", [None, Path.DECODE, Path.HYBRID, Path.HYBRID_STREAMS, Path.FUSED])
@pytest.mark.parametrize("stored", ["16bit", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_every_path_adds_the_rows_own_adapter(name, stored, path):
    slots = MAPPINGS[name]
    given = arguments(slots, stored=stored)
    call = call_of(given)
    want, base = exact(call, slots)
    y = torch.ops.epilora.lora_linear(*given, forced(path))
    assert y.dtype == torch.bfloat16
    assert error(y, want) < 4e-3  # one rounding to bf16 of a sum in fp32, h rounded once: 2**-9 each
    without = [i for i, slot in enumerate(slots) if slot < 0]
    stock = gpu_ops.vendor_gemm(TORCH_GEMM, call)
    if name == "none":
        assert torch.equal(y, stock)
    elif path in (Path.HYBRID, Path.HYBRID_STREAMS):
        assert torch.equal(y[without], stock[without])
    assert error(y[without], base[without]) < 3e-3 if without else True


@pytest.mark.parametrize("axis", [ScaleAxis.CHANNEL, ScaleAxis.TENSOR])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("matched", [False, True])
def test_formats_biases_and_dtypes(matched, dtype, bias, axis):
    slots = MAPPINGS["mixed"]
    given = arguments(slots, dtype=dtype, bias=bias, axis=axis, codes=not matched)
    if axis is ScaleAxis.TENSOR and not matched:
        given = (
            *given[:4],
            given[4].expand(sum(WIDTHS)).reshape(-1, 1).contiguous(),
            *given[5:],
        )  # as vLLM's GEMM takes it
    want, _ = exact(call_of(given), slots, matched=matched)
    y = torch.ops.epilora.lora_linear(*given, forced(None, matched=matched))
    assert error(y, want) < (4e-3 if dtype is torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("matched", [False, True])
def test_a_rows_bits_do_not_depend_on_its_batch_in_the_invariant_mode(matched):
    slots = MAPPINGS["many"]
    given = list(arguments(slots, codes=False))
    mode = Mode(TORCH_GEMM, int(matched), batch_invariant=1).pack()
    whole = torch.ops.epilora.lora_linear(*given, mode)
    assert error(whole, exact(call_of(given), slots, matched=matched)[0]) < 4e-3
    x = given[0]
    for rows in ([3], [3, 8, 9], [*range(40)]):
        given[0], given[-1] = x[rows], gpu_ops.register_batch(meta_of([slots[i] for i in rows]))
        part = torch.ops.epilora.lora_linear(*given, mode)
        # The reference's own GEMM is not invariant: equal to a rounding here, to the bit on a GPU.
        assert error(part, whole[rows].double()) < 2e-3


def test_padded_rows_never_read_stale_slots():
    slots = MAPPINGS["mixed"]
    given = arguments(slots, padding=9)
    want, _ = exact(call_of(given), slots)
    for path in (Path.DECODE, Path.HYBRID):
        y = torch.ops.epilora.lora_linear(*given, forced(path))
        assert error(y[: len(slots)], want[: len(slots)]) < 4e-3


def test_stale_slots_count_for_nothing_when_no_adapter_is_active():
    given = list(arguments([0, 1, 2]))
    meta = meta_of([-1, -1, -1])
    assert (meta.token_lora_mapping[:3] >= 0).all()  # vLLM leaves them there
    meta.no_lora_flag_cpu = torch.tensor([False])  # as a graph captured with adapters saw it
    given[-1] = gpu_ops.register_batch(meta)
    _, base = exact(call_of(given), [-1, -1, -1])
    for path in (Path.DECODE, Path.HYBRID):
        assert error(torch.ops.epilora.lora_linear(*given, forced(path)), base) < 3e-3


def test_the_operator_quantises_where_the_compiler_did_not():
    slots = MAPPINGS["mixed"]
    with_codes, without = arguments(slots), arguments(slots, codes=False)
    mode = forced(Path.HYBRID)
    assert torch.equal(torch.ops.epilora.lora_linear(*with_codes, mode), torch.ops.epilora.lora_linear(*without, mode))


def test_adapters_beside_any_base():
    slots = MAPPINGS["mixed"]
    given = arguments(slots)
    call = call_of(given)
    want, base = exact(call, slots)
    y = base.to(torch.bfloat16)
    torch.ops.epilora.lora_add_(y, call.x, *given[6:], Mode().pack())
    assert error(y, want) < 5e-3
    unchanged = [i for i, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[unchanged], base.to(torch.bfloat16)[unchanged])


def test_a_mapping_that_nobody_registered_is_refused():
    given = list(arguments([0, 1]))
    given[-1] = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(KeyError, match=r"no registered batch description.*register_batch"):
        torch.ops.epilora.lora_linear(*given, forced(None))


def test_a_registered_mapping_keeps_its_address():
    """A freed one's could become another tensor's, whose tokens would then get adapters of a batch long gone."""
    held = weakref.ref(gpu_ops.register_batch(meta_of([0, 1])))
    gc.collect()
    assert held() is not None


def test_a_decode_path_gives_way_above_its_limit(monkeypatch):
    from epilora.plugin import path_table

    given = arguments(MAPPINGS["many"])
    call = call_of(given)
    monkeypatch.setattr(path_table, "_table", path_table.PathTable({call.key: [(16, Path.DECODE)]}))
    assert len(MAPPINGS["many"]) > 32
    assert gpu_ops.path_of(call, Mode(TORCH_GEMM)) is Path.HYBRID_STREAMS
    assert gpu_ops.path_of(call, Mode(TORCH_GEMM, forced=PATHS.index(Path.DECODE) + 1)) is Path.HYBRID_STREAMS
    few = call_of(arguments(MAPPINGS["mixed"]))
    assert gpu_ops.path_of(few, Mode(TORCH_GEMM)) is Path.DECODE


def test_an_empty_batch():
    given = list(arguments([0]))
    given[0], given[1], given[2] = given[0][:0], given[1][:0], given[2][:0]
    assert torch.ops.epilora.lora_linear(*given, forced(None)).shape == (0, sum(WIDTHS))


def test_a_path_that_cannot_run_here_says_so():
    with pytest.raises(UnsupportedKernel, match=r"vLLM's LoRA kernels need a GPU.*cpu"):
        torch.ops.epilora.lora_linear(*arguments([0]), forced(Path.VENDOR))


def test_mode_packs_every_field():
    modes = [Mode(v, m, f, b) for v in (0, 1) for m in (0, 1) for f in (0, 5) for b in (0, 1)]
    assert [Mode.unpack(mode.pack()) for mode in modes] == modes
    assert len({mode.pack() for mode in modes}) == len(modes)


def test_shapes_without_running():
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = arguments(MAPPINGS["mixed"])
    with FakeTensorMode() as fake:

        def convert(value):
            if isinstance(value, list):
                return [fake.from_tensor(v) for v in value]
            return None if value is None else fake.from_tensor(value)

        y = torch.ops.epilora.lora_linear(*map(convert, given), forced(None))
    assert (y.shape, y.dtype) == ((8, sum(WIDTHS)), torch.bfloat16)


def test_tiles_are_chosen_for_powers_of_two():
    assert [gpu_ops.bucket(M) for M in (1, 2, 3, 17, 32, 33, 512, 8000)] == [1, 2, 4, 32, 32, 64, 512, 8192]


def test_which_paths_a_gpu_has():
    ada, hopper, blackwell = (8, 9), (9, 0), (12, 0)
    few, many = [Path.DECODE, Path.HYBRID, Path.HYBRID_STREAMS], [Path.HYBRID_STREAMS, Path.HYBRID]
    for M in (1, 32):
        assert gpu_ops.paths_for(ada, M) == [Path.DECODE, Path.FUSED, Path.HYBRID, Path.HYBRID_STREAMS, Path.VENDOR]
        assert gpu_ops.paths_for(hopper, M) == gpu_ops.paths_for(blackwell, M) == [*few, Path.VENDOR]
        assert gpu_ops.paths_for(hopper, M, stored=True) == few
    for M in (64, 8192):
        assert gpu_ops.paths_for(ada, M) == [Path.FUSED, *many, Path.VENDOR]
        assert gpu_ops.paths_for(ada, M, stored=True) == [Path.FUSED, *many]
        assert gpu_ops.paths_for(hopper, M) == [*many, Path.VENDOR]
    assert gpu_ops.paths_for(ada, 33)[0] is Path.FUSED
    for capability in (None, ada, hopper):
        assert gpu_ops.paths_for(capability, 5, matched=True) == [Path.MATCHED]
        assert gpu_ops.paths_for(capability, 5, matched=True, batch_invariant=True) == [Path.INVARIANT]
    assert gpu_ops.paths_for(None, 5) == few
