"""Memory of a whole GPU while something runs, by NVML: every process, every CUDA context, every cache."""

from __future__ import annotations

import threading
from typing import Any

GIB = 2**30


class GpuMemoryWatch:
    """Samples the used bytes of GPU `index` at 10 Hz between `with` and its end; the first sample is `before_bytes`.

    Raises ImportError where nvidia-ml-py is missing, its NVMLError where there is no GPU.
    """

    def __init__(self, index: int = 0, every_s: float = 0.1) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-memory", daemon=True)
        self.before_bytes = self.used_bytes()
        self.samples: list[int] = []

    def used_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    @property
    def peak_gib(self) -> float:
        return max(self.samples) / GIB

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.samples.append(self.used_bytes())

    def __enter__(self) -> GpuMemoryWatch:
        self.samples.append(self.used_bytes())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append(self.used_bytes())
