"""Configuration: dataclass schemas, YAML files and `key=value` overrides."""

from .load import load_config, to_yaml
from .schema import JobConfig

__all__ = ["JobConfig", "load_config", "to_yaml"]
