"""One rank of a `ShardedTrainer`: python -m epilora.trainer.rank_process DESCRIPTOR

Reads calls from the inherited socket DESCRIPTOR, (method, args, wanted), answers (True, the result if it is wanted) or (False,
the exception), and ends with the socket.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from .ranks import RankGroup
from .trainer import LoraTrainer


def serve(connection: Connection, setup: dict[str, Any]) -> None:
    """Answer calls until the other side is gone."""
    device = torch.device(setup["trainer"].get("device", "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share the machine's cores
    else:
        device = torch.device("cuda", 0)  # the only one this process sees
        torch.cuda.set_device(device)
    group = RankGroup(setup["rank"], setup["size"], setup["store"], device, setup["timeout_s"])
    trainer = LoraTrainer(**setup["trainer"], group=group)
    while True:
        try:
            method, args, wanted = connection.recv()
        except EOFError:
            return
        try:
            result = getattr(trainer, method)(*args)
            answer = (True, result if wanted else None)
        except Exception as err:  # handed to the caller, which raises it
            answer = (False, _portable(err))
        connection.send(answer)


def _portable(err: Exception) -> Exception:
    """The exception, or its text where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:  # whatever a class of another package does when it is pickled
        return RuntimeError(f"{type(err).__name__}: {err}")
    return err


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    serve(connection, connection.recv())


if __name__ == "__main__":
    main()
