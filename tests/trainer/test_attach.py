"""Mapping a manifest: the right bytes, read-only, one copy."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from epilora.errors import BaseMismatch, UnsupportedKernel
from epilora.quant.manifest import Location, Transport, WeightManifest
from epilora.quant.reference import quantize_weight_ref
from epilora.trainer.attach import MappedBase, attach_single
from epilora.trainer.local_base import make_local_base
from epilora.trainer.memory import mapping_bytes

from .conftest import Small


def test_local_base_packs_and_quantises_as_documented(small_qwen: Small) -> None:
    base = MappedBase(small_qwen.base.manifest)
    weights = load_file(small_qwen.folder / "model.safetensors")
    names = [f"model.layers.1.self_attn.{leaf}.weight" for leaf in ("q_proj", "k_proj", "v_proj")]
    packed = torch.cat([weights[name] for name in names])
    entry = small_qwen.base.manifest.entry("model.layers.1.self_attn.qkv_proj")
    assert entry.slices == (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))
    operand = base.operands[entry.name]
    expected = quantize_weight_ref(packed)
    assert torch.equal(operand.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(operand.scales.reshape(-1), expected.scales)
    assert torch.equal(base.operands["model.norm"].values, weights["model.norm.weight"])
    assert small_qwen.base.manifest.num_bytes < os.path.getsize(small_qwen.base.path)


def test_a_changed_byte_is_a_base_mismatch(small_qwen: Small, tmp_path: Path) -> None:
    base = make_local_base(small_qwen.folder, tmp_path)
    assert base.manifest.base_digest == small_qwen.base.manifest.base_digest
    offset = base.manifest.entry("model.layers.0.mlp.down_proj").values.location.offset_bytes
    content = bytearray(base.path.read_bytes())
    content[offset + 5] ^= 1
    base.path.write_bytes(content)
    with pytest.raises(BaseMismatch, match="export the weights again"):
        MappedBase(base.manifest)


def _write(manifest: WeightManifest, seen: Connection) -> None:
    faulthandler.disable()
    base = MappedBase(manifest)
    target = base.operands["model.norm"].values.data_ptr()
    seen.send(base.operands["model.norm"].values[0].item())
    ctypes.memset(target, 7, 4)


def test_a_write_through_the_mapping_faults(small_qwen: Small) -> None:
    context = multiprocessing.get_context("fork")
    seen, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write, args=(small_qwen.base.manifest, theirs))
    child.start()
    assert seen.poll(30)
    assert seen.recv() == 1.0
    child.join(30)
    assert child.exitcode == -signal.SIGSEGV
    assert MappedBase(small_qwen.base.manifest).digest() == small_qwen.base.manifest.base_digest


def test_two_mappings_are_the_same_pages_and_are_counted(small_qwen: Small) -> None:
    first, second = MappedBase(small_qwen.base.manifest), MappedBase(small_qwen.base.manifest)
    assert first.paths == second.paths
    resident, _ = mapping_bytes(first.paths)
    assert resident >= 2 * small_qwen.base.manifest.num_bytes  # both mappings are resident, of one file


def test_other_transports_ranks_and_dead_engines_are_refused(small_qwen: Small, tmp_path: Path) -> None:
    manifest = small_qwen.base.manifest
    with pytest.raises(UnsupportedKernel, match="rank 0/2"):
        attach_single([dataclasses.replace(manifest, tp_size=2)])
    with pytest.raises(UnsupportedKernel, match="one whole base"):
        attach_single([])
    entry = manifest.entries[0]
    elsewhere = Location(Transport.CUDA_IPC, handle=("another process", 1), gpu_uuid="GPU-of-another-machine")
    values = dataclasses.replace(entry.values, location=elsewhere)
    with pytest.raises(ValueError, match="lie on GPU GPU-of-another-machine; this process sees"):
        MappedBase(dataclasses.replace(manifest, entries=(dataclasses.replace(entry, values=values),)))
    base = make_local_base(small_qwen.folder, tmp_path)
    base.remove()
    with pytest.raises(FileNotFoundError, match="is the engine still up"):
        MappedBase(base.manifest)
