"""Models the repository ships or makes: where they lie, and the code that made them."""

from __future__ import annotations

from pathlib import Path

TINY_ARITH = Path(__file__).parent / "tiny-arith"
SHIPPED = {"tiny-arith": TINY_ARITH}


def resolve_model_path(name: str) -> Path:
    """Folder of a model: `package:NAME` is one shipped here, anything else is a path.

    Raises ValueError for an unknown shipped name, FileNotFoundError if the folder has no config.json.
    """
    if name.startswith("package:"):
        shipped = name.removeprefix("package:")
        if shipped not in SHIPPED:
            raise ValueError(f"model {name!r} is not shipped; shipped: {', '.join('package:' + n for n in SHIPPED)}, or give a folder")
        return SHIPPED[shipped].resolve()
    folder = Path(name).resolve()
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"model folder {name}: no config.json there; convert or download the model first")
    return folder
