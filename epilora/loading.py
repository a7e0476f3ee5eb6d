"""Objects by import path: how configuration and actors name a class or function without importing it."""

from __future__ import annotations

import importlib
from typing import Any


def load_object(path: str) -> Any:
    """The object `package.module:name`.

    Raises ValueError if the path has no colon, ImportError or AttributeError with the path in the message otherwise.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise ValueError(f"{path!r} is no import path; write package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as err:
        raise ImportError(f"{path}: cannot import {module_name}: {err}") from err
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")][:12]
        raise AttributeError(f"{path}: {module_name} has no {name!r}; it has {public}")
    return getattr(module, name)
