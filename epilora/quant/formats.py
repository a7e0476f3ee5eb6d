"""Facts about the storage formats of weights, activations and adapters, stated once.

A *format* says how numbers are stored (element type, values per byte, block length, type of the scales). An *axis* says
how far one scale reaches. Scales always multiply stored values back to real ones.

Sources: FP8 (Micikevicius et al., arXiv 2209.05433); NVFP4 as in the OCP/NVIDIA description: e2m1 codes, one e4m3 scale per
16 values along K, one fp32 scale per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(str, Enum):
    """How one value is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    NVFP4 = "nvfp4"


class ScaleAxis(str, Enum):
    """How far one scale reaches in a [N, K] weight or a [M, K] activation."""

    NONE = "none"  # no scale (16- and 32-bit formats)
    TENSOR = "tensor"  # one scale for everything
    CHANNEL = "channel"  # one scale per row: out channel of a weight, token of an activation
    BLOCK = "block"  # one scale per block of `block` = (rows, columns)


@dataclass(frozen=True)
class FormatFacts:
    """What is fixed for a format. `torch_dtype` names the torch dtype of the stored values."""

    torch_dtype: str
    values_per_byte: float
    largest: float  # largest finite magnitude of one stored value
    scale_torch_dtype: str | None  # None: the format carries no scales
    block_k: int | None  # values of K that share a scale by definition of the format; None: not block scaled
    has_global_scale: bool


FACTS: dict[Format, FormatFacts] = {
    Format.FP32: FormatFacts("float32", 0.25, 3.4028234663852886e38, None, None, False),
    Format.BF16: FormatFacts("bfloat16", 0.5, 3.3895313892515355e38, None, None, False),
    Format.FP16: FormatFacts("float16", 0.5, 65504.0, None, None, False),
    Format.FP8_E4M3: FormatFacts("float8_e4m3fn", 1.0, 448.0, "float32", None, False),
    Format.NVFP4: FormatFacts("uint8", 2.0, 6.0, "float8_e4m3fn", 16, True),
}

E4M3_MAX = 448.0
# Smallest scale vLLM's quantisers produce: a zero row gets this scale, not 0 / 0.
E4M3_MIN_SCALE = 1.0 / (448.0 * 512.0)


def format_of_torch_dtype(dtype_name: str) -> Format:
    """Format of a stored torch dtype name such as `float8_e4m3fn` (uint8 is read as NVFP4's packed pairs).

    Raises ValueError for a dtype no format stores.
    """
    for fmt, facts in FACTS.items():
        if facts.torch_dtype == dtype_name:
            return fmt
    allowed = ", ".join(facts.torch_dtype for facts in FACTS.values())
    raise ValueError(f"dtype {dtype_name!r} is stored by no format; allowed: {allowed}")
