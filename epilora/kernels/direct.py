"""Launch a compiled Triton kernel without Triton's launcher: no argument binding, no look-up of a specialisation.

A launch through `kernel[grid](...)` takes the host 20 to 40 us for kernels of 40 arguments, since every argument is inspected to find
the compiled variant. In a step that is not replayed from a CUDA graph this is paid for every projection. Here the variant is
fixed once; the caller answers for arguments of the same kind: pointers to 16 bytes, the same strides and constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class DirectLaunch:
    """One compiled variant of a `@triton.jit` kernel."""

    def __init__(self, kernel: Any, grid: tuple[int], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        """Launch the kernel the ordinary way, which compiles it, and keep what was compiled.

        arguments: in the kernel's order, up to the first compile-time constant that `constants` names; constants: the others, and
        launch options. Raises TypeError if this Triton gives nothing back that can be launched (the interpreter).
        """
        self._compiled = kernel[grid](*arguments, **constants)
        if not hasattr(self._compiled, "run") or not hasattr(self._compiled, "packed_metadata"):
            raise TypeError(
                f"{getattr(kernel, '__name__', kernel)}: launching it returned {type(self._compiled).__name__}"
            )
        self.names: tuple[str, ...] = tuple(kernel.arg_names)
        self._tail = [constants[name] for name in self.names[len(arguments) :]]

    def __call__(self, programs: int, arguments: Sequence[Any], device_index: int) -> None:
        """Launch `programs` programs on torch's current stream. arguments: as at first; tensors, their addresses, numbers."""
        compiled = self._compiled
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *self._tail
        )  # fmt: skip
