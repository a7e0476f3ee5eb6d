"""The patch points in three releases' sources, as `scripts/vllm_facts.py` read them; no vLLM is imported."""

import importlib.util
import json
import pathlib

import pytest

from epilora.plugin import compat

ROOT = pathlib.Path(__file__).parents[2]
FACTS = json.loads((ROOT / "tests" / "plugin" / "vllm_facts.json").read_text())


def program():
    spec = importlib.util.spec_from_file_location("vllm_facts", ROOT / "scripts" / "vllm_facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrong(facts, wanted):
    found = []
    for path, names in wanted.items():
        fact = facts[path]
        if fact is None or (names is not None and (not isinstance(fact, list) or fact[: len(names)] != names)):
            found.append(f"{path}: {fact}, wanted {names}")
    return found


def test_the_releases_that_the_readme_names_are_there():
    assert set(FACTS) >= {"0.26.0", "0.28.0", "0.33.0"}
    assert all(set(facts) == set(compat.touched()) for facts in FACTS.values())  # else run scripts/vllm_facts.py


@pytest.mark.parametrize("feature", [*compat.WANTED, "worker"])
@pytest.mark.parametrize("version", sorted(FACTS))
def test_patch_points_of_a_release(version, feature):
    wanted = compat.WORKER_WANTED if feature == "worker" else compat.WANTED[feature]
    assert wrong(FACTS[version], wanted) == []


@pytest.mark.parametrize("version", sorted(FACTS))
def test_batch_description_has_every_field(version):
    fields = {name: FACTS[version][f"{compat.KERNEL_META}.{name}"] for name in compat.KERNEL_META_FIELDS}
    assert set(fields.values()) == {"value"}


def test_facts_of_the_installed_release_are_what_the_program_reads():
    installed = importlib.util.find_spec("vllm")
    read = program().folder(pathlib.Path(installed.origin).parents[1])
    assert {path: program().fact(read, path) for path in compat.touched()} == FACTS["0.28.0"]


SOURCE = """
import os
if os.name == "posix":
    def chosen(a, /, b, *, c=1): ...
else:
    def chosen(z): ...
class Outer:
    field: int = 3
    class Inner:
        def method(self, x): ...
    @property
    def shown(self): ...
LIMIT = 4
"""


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("pkg.mod:chosen", ["a", "b", "c"]),
        ("pkg.mod:Outer", "class"),
        ("pkg.mod:Outer.field", "value"),
        ("pkg.mod:Outer.Inner.method", ["self", "x"]),
        ("pkg.mod:Outer.shown", ["self"]),
        ("pkg.mod:LIMIT", "value"),
        ("pkg.mod:missing", None),
        ("pkg.mod:Outer.missing", None),
        ("pkg.other:chosen", None),
    ],
)
def test_reading_a_source(path, want):
    assert program().fact({"pkg/mod.py": SOURCE}.get, path) == want
