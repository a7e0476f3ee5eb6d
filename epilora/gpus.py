"""The GPU types a cluster may offer: memory, which base formats they compute on, and which kernel path serves them.

Keys are the values of Ray's node label `ray.io/accelerator-type` (ray.util.accelerators). Memory is what nvidia-smi reports
as total, in MiB, so an ECC reserve is already off. FP8 tensor cores exist from sm_89 on, NVFP4 from sm_100 on.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
USABLE_SHARE = 0.95  # the rest is left to the driver, to fragmentation and to what the arithmetic does not see


@dataclass(frozen=True)
class GpuType:
    """One accelerator type.

    formats: base formats with native arithmetic, best first. decode_path, many_path: what the kernel dispatch is expected to
    choose for up to 32 tokens and above (it still measures at load). weight_only_path: the same for unrounded activations.
    """

    label: str
    memory_bytes: int
    compute_capability: int
    formats: tuple[str, ...]
    decode_path: str
    many_path: str
    weight_only_path: str

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * USABLE_SHARE)

    def kernel_path(self, base_format: str, activations: str) -> str:
        """In words: the path of decoding and of many tokens."""
        if base_format not in ("fp8", "nvfp4"):
            return "stock 16-bit GEMM, LoRA kernels beside it"
        if activations == "w8a16":
            return f"{'W8A16' if base_format == 'fp8' else 'NVFP4 W4A16'}: {self.weight_only_path}"
        kind = "FP8 W8A8" if base_format == "fp8" else "NVFP4"
        if self.decode_path == self.many_path:
            return f"{kind}: {self.decode_path}"
        return f"{kind}: {self.decode_path} up to 32 tokens, {self.many_path} above"


_HOPPER = {
    "compute_capability": 90,
    "formats": ("fp8", "16bit"),
    "decode_path": "dependent-launch decode path",
    "many_path": "hybrid (vendor GEMM, own adapter kernels)",
    "weight_only_path": "codes widened in registers",
}
_BLACKWELL = {**_HOPPER, "formats": ("nvfp4", "fp8", "16bit")}

GPU_TYPES: dict[str, GpuType] = {
    gpu.label: gpu
    for gpu in (
        GpuType(
            "L40S",
            46_068 * MIB,
            89,
            ("fp8", "16bit"),
            "fused K1+K2",
            "fused K1+K2",
            "fused, codes widened in registers",
        ),
        GpuType("H100", 81_559 * MIB, **_HOPPER),  # type: ignore[arg-type]
        GpuType("GH200", 97_871 * MIB, **_HOPPER),  # type: ignore[arg-type]
        GpuType("H200", 143_771 * MIB, **_HOPPER),  # type: ignore[arg-type]
        GpuType("RTX-PRO-6000", 97_887 * MIB, **{**_BLACKWELL, "compute_capability": 120}),  # type: ignore[arg-type]
        GpuType("B200", 183_359 * MIB, **{**_BLACKWELL, "compute_capability": 100}),  # type: ignore[arg-type]
        GpuType("A100", 81_920 * MIB, 80, ("16bit",), "none", "none", "none"),
    )
}


def visible_device(uuid: str) -> str:
    """A GPU's UUID as CUDA_VISIBLE_DEVICES takes it: torch gives it without what it is the UUID of."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
