"""Every shipped configuration names objects that exist."""

from pathlib import Path

import pytest

from epilora.config import load_config
from epilora.loading import load_object
from jobs.system import base_request

FOLDER = Path(__file__).resolve().parents[2] / "configs"
SERVE = FOLDER / "serve.yaml"  # Ray Serve's, see tests/actors/test_serve_cli.py
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path != SERVE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_import_paths_exist(path: Path) -> None:
    config = load_config(path)
    sources = [config.task, *(t.task or t.prompts_task for t in config.tenants)]
    assert sources
    for source in sources:
        assert callable(load_object(source.path))
        for value in source.args.values():
            if isinstance(value, str) and value.startswith("epilora."):
                assert callable(load_object(value))


def test_jobs_from_two_copies_of_the_package_ask_for_the_same_base() -> None:
    """Each `ray job submit --working-dir .` unpacks a copy; a path into it would make its base another than the running one."""
    request, _ = base_request(load_config(FOLDER / "rl_small.yaml"))
    assert request.engine_kwargs["model_path"] == "package:tiny-arith"
    copies = str(FOLDER.parent)
    assert not [
        value for value in (*request.engine_kwargs.values(), *request.trainer_kwargs.values()) if copies in str(value)
    ]
    assert copies not in str(request.environment)
