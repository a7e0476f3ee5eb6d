"""Compile CUDA C++ at run time and launch it with launch attributes, through ctypes: no build step, no extra dependency.

Source is compiled by NVRTC (it comes with CUDA builds of torch) or, where that library is absent, by `nvcc` on the PATH.
What was compiled is kept on disk (`cache_folder`), since an engine needs dozens of variants at start, seconds each.
Kernels are launched by `cuLaunchKernelEx` on torch's current stream and context, which CUDA graph capture records.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import logging
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import torch

logger = logging.getLogger(__name__)
_HERE = pathlib.Path(__file__).parent
_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    """A CUDA driver or compiler call failed; the message has the call and the reason."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *[(f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def _library_candidates() -> list[str]:
    found: list[str] = []
    site = pathlib.Path(torch.__file__).parent.parent
    for pattern in ("nvidia/*/lib/libnvrtc.so.*", "nvidia/*/lib64/libnvrtc.so.*"):
        found += sorted(glob.glob(str(site / pattern)), reverse=True)
    for root in ("/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)):
        found += sorted(glob.glob(f"{root}/lib64/libnvrtc.so.*"), reverse=True)
    return [path for path in found if "builtins" not in path and "alt" not in os.path.basename(path)] + [
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    for path in _library_candidates():
        try:
            # NVRTC opens its builtins by name when it first compiles; a copy that is loaded already is found without a path.
            for builtins in glob.glob(f"{os.path.dirname(path)}/libnvrtc-builtins.so.*") if "/" in path else ():
                ctypes.CDLL(builtins)
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def compiler_name() -> str | None:
    """`nvrtc`, `nvcc` or None: what `compile_cubin` would use here."""
    if _nvrtc() is not None:
        return "nvrtc"
    return "nvcc" if shutil.which("nvcc") else None


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept: $EPILORA_KERNEL_CACHE, else `epilora/kernels` in the user's cache folder."""
    named = os.environ.get("EPILORA_KERNEL_CACHE")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "epilora" / "kernels"


@functools.cache
def _compiler_version() -> str:
    lib = _nvrtc()
    if lib is None:
        return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc {major.value}.{minor.value}"


def cached_cubin(file_name: str, macros: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    """`compile_cubin`, from the disk where the same source, macros, architecture and compiler were compiled before.

    Processes may race: each writes a file of its own and renames it. A cache that cannot be written is not an error.
    """
    if compiler_name() is None:
        return compile_cubin(file_name, macros, arch)  # raises, and says what is missing
    named = repr((_with_includes(file_name, set()), sorted(macros.items()), arch, _compiler_version()))
    path = cache_folder() / f"{pathlib.Path(file_name).stem}-{hashlib.sha256(named.encode()).hexdigest()[:32]}"
    binary, log = path.with_suffix(".cubin"), path.with_suffix(".log")
    if binary.exists() and log.exists():
        return binary.read_bytes(), log.read_text()
    found = compile_cubin(file_name, macros, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, content in ((log, found[1].encode()), (binary, found[0])):
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as whole:
                whole.write(content)
            os.replace(whole.name, target)
    except OSError as err:
        logger.warning(
            "compiled kernels are not kept: %s (set EPILORA_KERNEL_CACHE to a folder that can be written)", err
        )
    return found


def compile_cubin(file_name: str, macros: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    """Compile a source file of this folder.

    file_name: e.g. `decode.cu`. macros: preprocessor definitions. arch: e.g. `sm_90`.
    Returns (cubin, log); the log has ptxas' registers and spills. Raises CudaError when no compiler is found or it fails.
    """
    source = _with_includes(file_name, set())
    defines = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    lib = _nvrtc()
    if lib is not None:
        return _compile_nvrtc(lib, source, file_name, defines, arch)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CudaError(
            "no CUDA compiler: neither libnvrtc (part of CUDA builds of torch) nor nvcc was found; use implementation='triton'"
        )
    with tempfile.TemporaryDirectory() as folder:
        out, whole = pathlib.Path(folder) / "out.cubin", pathlib.Path(folder) / file_name
        whole.write_text(source)
        target = f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"
        command = [
            nvcc,
            "-cubin",
            target,
            "-std=c++17",
            "-lineinfo",
            "-Xptxas",
            "-v",
            *defines,
            "-o",
            str(out),
            str(whole),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CudaError(f"nvcc failed on {file_name} {defines} {arch}: {done.stdout}{done.stderr}")
        return out.read_bytes(), done.stdout + done.stderr


def _with_includes(file_name: str, seen: set[str]) -> str:
    """A source file of this folder with every `#include "..."` of another one replaced by its text, once each."""
    if file_name in seen:
        return ""
    seen.add(file_name)
    text = (_HERE / file_name).read_text().replace("#pragma once\n", "")
    return re.sub(r'^#include "(.+)"$', lambda found: _with_includes(found.group(1), seen), text, flags=re.MULTILINE)


def _compile_nvrtc(
    lib: ctypes.CDLL, source: str, file_name: str, defines: Sequence[str], arch: str
) -> tuple[bytes, str]:
    program = ctypes.c_void_p()

    def call(function: str, *args: object) -> None:
        code = getattr(lib, function)(*args)
        if code:
            raise CudaError(f"{function} failed with {code} on {file_name} {list(defines)} {arch}: {log()}")

    def log() -> str:
        if not program:
            return ""
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        lib.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), file_name.encode(), 0, None, None)
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", "--generate-line-info", *defines]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        call("nvrtcCompileProgram", program, len(options), array)
        size = ctypes.c_size_t()
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw, log()
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log: str) -> dict[str, int]:
    """Registers a thread and spilled bytes read out of a compiler log. Raises ValueError if the log has none."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise ValueError(f"no register count in the compiler's log: {log!r}")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    return {"registers": int(registers.group(1)), "spill_bytes": sum(spills)}


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{call} failed with {code}: {(text.value or b'').decode()}")


def _make_context_current(index: int) -> None:
    """Make the device's primary context (torch's) the calling thread's: a thread that has run nothing has none."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuInit(0), "cuInit")
    _check(_driver().cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


class TensorMap:
    """A tensor map of the copy engine over bytes: 3 dimensions, 128-byte swizzle, parts outside the tensor read as zeros.

    address: device pointer. dims, strides: bytes of the three dimensions (innermost first) and of the outer two. box: extents.
    `value` is what a kernel takes as a `const __grid_constant__` parameter. Raises CudaError when the driver refuses it.
    """

    def __init__(
        self, address: int, dims: tuple[int, int, int], strides: tuple[int, int], box: tuple[int, int, int]
    ) -> None:
        raw = (ctypes.c_char * 192)()
        self.value = (ctypes.c_char * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)
        _check(
            _driver().cuTensorMapEncodeTiled(
                ctypes.byref(self.value),
                0,  # unsigned bytes
                3,
                ctypes.c_void_p(address),
                (ctypes.c_uint64 * 3)(*dims),
                (ctypes.c_uint64 * 2)(*strides),
                (ctypes.c_uint32 * 3)(*box),
                (ctypes.c_uint32 * 3)(1, 1, 1),
                0,  # no interleave
                3,  # swizzle of 128 bytes
                3,  # promote L2 fetches to 256 bytes
                0,  # zeros outside
            ),
            f"cuTensorMapEncodeTiled(dims={dims}, strides={strides}, box={box})",
        )


def byte_matrix_map(address: int, rows: int, K: int, box_rows: int, stage_k: int) -> tuple[TensorMap, bool]:
    """Map of a contiguous [rows, K] byte matrix for boxes of `box_rows` x `stage_k`, and whether one box is a whole stage.

    K a multiple of 128: seen as [K/128][rows][128], one box a stage. Else [1][rows][K], one box per 128 bytes.
    """
    if K % 128 == 0:
        return TensorMap(address, (128, rows, K // 128), (K, 128), (128, box_rows, stage_k // 128)), True
    return TensorMap(address, (K, rows, 1), (K, rows * K), (128, box_rows, 1)), False


class Kernel:
    """One loaded kernel.

    function: its extern "C" name. num_threads: threads a block. Parameters are given as ctypes objects in order.
    """

    def __init__(
        self, file_name: str, function: str, macros: Mapping[str, int], num_threads: int, device: torch.device
    ) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        # warpgroup instructions exist for exactly one architecture, whose name ends in "a"
        cubin, self.log = cached_cubin(file_name, macros, f"sm_{major}{minor}" + ("a" if macros.get("WGMMA") else ""))
        self.num_threads = num_threads
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _make_context_current(device.index or 0)
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, function.encode()),
            f"cuModuleGetFunction({function})",
        )
        self._shared_limit = 48 * 1024
        self._attribute = _Attribute(_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1, b"")

    def read_global(self, name: str, num_bytes: int) -> bytes:
        """The contents of a `__device__` variable, after everything launched before has ended. Raises CudaError."""
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        _check(
            _driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, name.encode()),
            f"cuModuleGetGlobal({name})",
        )
        out = ctypes.create_string_buffer(min(num_bytes, size.value))
        torch.cuda.synchronize()
        _check(_driver().cuMemcpyDtoH_v2(out, address, ctypes.c_size_t(len(out.raw))), f"cuMemcpyDtoH({name})")
        return out.raw

    def launch(
        self,
        grid: int,
        parameters: Sequence[ctypes._SimpleCData | ctypes.Structure | ctypes.Array],
        *,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Launch `grid` blocks on torch's current stream. dependent: programmatic stream serialisation (may start early).

        Raises CudaError with the driver's reason.
        """
        if shared_bytes > self._shared_limit:
            _check(
                _driver().cuFuncSetAttribute(self._function, _FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED, shared_bytes),
                f"shared memory of {shared_bytes} bytes",
            )
            self._shared_limit = shared_bytes
        config = _LaunchConfig(
            grid, 1, 1, self.num_threads, 1, 1, shared_bytes, torch.cuda.current_stream().cuda_stream
        )
        if dependent:
            config.attributes, config.num_attributes = ctypes.pointer(self._attribute), 1
        pointers = (ctypes.c_void_p * len(parameters))(*[ctypes.addressof(p) for p in parameters])
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "cuLaunchKernelEx")
