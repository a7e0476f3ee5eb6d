"""Exported tensors come back as views of the same bytes: through one handle for each storage, or directly at home.

CUDA's two calls are stood in for by a table of storages; everything else is the real code. tests/plugin/test_gpu_one_copy.py
runs it between processes.
"""

import gc
import pickle

import pytest
import torch

from epilora.quant import cuda_ipc
from epilora.quant.manifest import Transport


@pytest.fixture
def driver(monkeypatch):
    """handle -> storage, and how often each call was made."""
    table, calls = {}, {"share": 0, "open": 0}

    def share(storage):
        calls["share"] += 1
        handle = f"handle{calls['share']}".encode()
        table[handle] = storage
        return (0, handle, storage.nbytes(), 0, b"counter", 0, b"event", False)

    def new(device, handle, size, *_):
        calls["open"] += 1
        assert device == 1
        if handle not in table:
            raise RuntimeError("CUDA error: invalid resource handle")
        assert size == table[handle].nbytes()
        return table[handle]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new), raising=False)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: "GPU-b" if device.index in (None, 1) else "GPU-a")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda_ipc, "_opened", {})
    return table, calls


def elsewhere(monkeypatch):
    """This process, seen as another one."""
    monkeypatch.setattr(cuda_ipc, "_PROCESS", "another")


def test_views_of_one_storage_travel_under_one_handle(driver, monkeypatch):
    _, calls = driver
    whole = torch.arange(24.0)
    views = [
        whole[4:16].view(3, 4),
        whole[4:16].view(3, 4).t(),
        whole.view(torch.uint8)[8:16].view(torch.float8_e4m3fn),
    ]
    entries = pickle.loads(pickle.dumps([cuda_ipc.export_tensor(view) for view in views]))
    assert [entry.stride for entry in entries] == [(4, 1), (1, 4), (1,)]
    assert {entry.location.transport for entry in entries} == {Transport.CUDA_IPC}
    assert {entry.location.gpu_uuid for entry in entries} == {"GPU-b"}
    elsewhere(monkeypatch)
    mapped = [cuda_ipc.map_tensor(entry) for entry in entries]
    assert calls == {"share": 1, "open": 1}
    for view, other in zip(views, mapped, strict=True):
        assert (other.data_ptr(), other.dtype, other.stride()) == (view.data_ptr(), view.dtype, view.stride())
    whole[5] = -1.0
    assert mapped[0][0, 1] == -1.0


def test_at_home_nothing_is_opened(driver):
    tensor = torch.arange(6.0).view(2, 3)
    entry = cuda_ipc.export_tensor(tensor)
    assert cuda_ipc.map_tensor(entry).data_ptr() == tensor.data_ptr()
    assert driver[1] == {"share": 1, "open": 0}
    driver[0].clear()
    del tensor
    gc.collect()
    with pytest.raises(RuntimeError, match=r"\(2, 3\).*was freed"):
        cuda_ipc.map_tensor(entry)


def test_an_exporter_that_is_gone_and_a_gpu_that_is_not_here(driver, monkeypatch):
    kept = torch.arange(6.0)
    entry = cuda_ipc.export_tensor(kept)
    elsewhere(monkeypatch)
    driver[0].clear()
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        cuda_ipc.map_tensor(entry)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"GPU-b.*sees \['GPU-a'\]"):
        cuda_ipc.map_tensor(entry)


def test_memory_that_cannot_be_shared_says_why(driver, monkeypatch):
    def refuse(_):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refuse)
    with pytest.raises(RuntimeError, match="expandable_segments"):
        cuda_ipc.export_tensor(torch.zeros(2))
