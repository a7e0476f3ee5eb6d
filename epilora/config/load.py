"""Schema -> YAML -> `key=value` overrides, merged by OmegaConf; the result is plain dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from .schema import JobConfig


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """The job configuration in `path` (None: schema defaults), with `overrides` such as `rl.steps=10` applied.

    A file may name another it builds on with a top-level `extends: other.yaml` (relative to itself).
    Raises FileNotFoundError, omegaconf's errors (unknown key, wrong type, missing value; all with the full key) and
    ValueError for domain rules.
    """
    layers = [OmegaConf.structured(JobConfig)]
    layers += _files(Path(path)) if path is not None else []
    layers += [_override(text) for text in overrides]
    merged = OmegaConf.merge(*layers)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ValueError(f"{path}: no value for {', '.join(missing)}; set them in the file or as key=value")
    config = OmegaConf.to_object(merged)
    assert isinstance(config, JobConfig)
    return config


def _override(text: str) -> DictConfig:
    """One `key=value`; the value is YAML, so `tenants=[{name: a, ...}]` works."""
    if "=" not in text:
        raise ValueError(f"{text!r} is not key=value; for example rl.steps=10")
    try:
        return OmegaConf.from_dotlist([text])
    except YAMLError as err:
        raise ValueError(f"{text!r}: the value is not valid YAML: {err}") from err


def _files(path: Path) -> list:
    """The chain of files from the most general to `path` itself."""
    if not path.exists():
        raise FileNotFoundError(
            f"no configuration file {path}; those here: {sorted(str(p) for p in Path('configs').glob('*.yaml'))}"
        )
    layer = OmegaConf.load(path)
    if not isinstance(layer, DictConfig):
        raise ValueError(f"{path} holds {type(layer).__name__}; a configuration is a mapping of keys to values")
    base = layer.pop("extends", None)
    return [*(_files(path.parent / base) if base else []), layer]


def to_yaml(config: JobConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
