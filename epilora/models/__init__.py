"""Models the repository ships or makes: where they lie, and the code that made them."""

from __future__ import annotations

from pathlib import Path

PACKAGE_PREFIX = "package:"
TINY_ARITH = Path(__file__).parent / "tiny-arith"


def resolve_model_path(path: str | Path) -> Path:
    """The absolute folder of a model: `package:NAME` is one shipped in this package, anything else a folder.

    Raises FileNotFoundError, saying how to make the model, if there is no config.json.
    """
    text = str(path)
    if text.startswith(PACKAGE_PREFIX):
        folder = Path(__file__).parent / text.removeprefix(PACKAGE_PREFIX)
        shipped = sorted(p.parent.name for p in Path(__file__).parent.glob("*/config.json"))
        advice = f"this package ships {shipped}"
    else:
        folder = Path(text).expanduser().resolve()
        makes_it = "run `python -m jobs.convert_smollm2`" if "smollm2" in text.lower() else "download or make it first"
        advice = f"{makes_it}, or use {PACKAGE_PREFIX}tiny-arith"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model {text!r}: no config.json in {folder}; {advice}")
    return folder


def portable_model_path(path: str | Path) -> str:
    """How a job names a model to others: `package:NAME` stays, whichever copy of this package they run; a folder is absolute.

    Raises as `resolve_model_path`.
    """
    folder = resolve_model_path(path)
    return str(path) if str(path).startswith(PACKAGE_PREFIX) else str(folder)
