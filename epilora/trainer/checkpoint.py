"""A session as bytes and back, bit for bit: parameters, moments, step count and random state.

The bytes are a safetensors file, so equal sessions give equal bytes, and nothing is executed on loading. They hold the whole
adapter, however many ranks have parts of it.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .session import Session

FORMAT = "epilora-session-1"


def session_state(session: Session, base_digest: str) -> bytes:
    """Everything `load_session_state` needs to go on as if nothing had happened. base_digest: of the base it trains
    on.
    """
    header = {
        "format": FORMAT,
        "base_digest": base_digest,
        "spec": dataclasses.asdict(session.spec),
        "optimizer": dataclasses.asdict(session.optimizer),
        "step": session.step,
        "seed": session.seed,
    }
    text = json.dumps(header, sort_keys=True).encode()
    return save(
        {
            "theta": session.whole(session.theta),
            "m": session.whole(session.m),
            "v": session.whole(session.v),
            "rng": session.generator.get_state(),
            "header": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        }
    )


def load_session_state(session: Session, state: bytes, base_digest: str) -> None:
    """Put a saved state into a session opened with the same spec.

    Raises ValueError, changing nothing, if the bytes are no session state, or are of another spec, optimizer or base.
    """
    try:
        tensors = load(state)
        header = json.loads(bytes(tensors["header"].numpy()))
    except (SafetensorError, KeyError, ValueError) as err:
        raise ValueError(f"session {session.name!r}: {len(state)} bytes are no saved session ({err})") from err
    want = {
        "format": FORMAT,
        "base_digest": base_digest,
        "spec": json.loads(json.dumps(dataclasses.asdict(session.spec))),
        "optimizer": json.loads(json.dumps(dataclasses.asdict(session.optimizer))),
    }
    for key, value in want.items():
        if header.get(key) != value:
            raise ValueError(
                f"session {session.name!r}: saved {key} is {header.get(key)!r}, the open session has {value!r}"
            )
    if tensors["theta"].shape != (session.num_parameters,):
        raise ValueError(
            f"session {session.name!r}: saved state has {tensors['theta'].numel()} parameters, open one "
            f"{session.num_parameters}"
        )
    for name in ("theta", "m", "v"):
        session.take(getattr(session, name), tensors[name])
    session.generator.set_state(tensors["rng"])
    session.step, session.seed = header["step"], header["seed"]
