"""What the plugin puts into vLLM, that it says so, and that it steps aside where it does not understand."""

import logging
import types

import pytest

from epilora.errors import UnsupportedKernel
from epilora.plugin import compat, register

pytestmark = pytest.mark.vllm

FEATURES = {"layers", "cpu_rows", "cache_key", "matched", "float32", "seeds"}


def test_everything_is_installed_through_the_entry_point(main_engine):
    assert main_engine.info().plugin_active
    assert set(register.installed().features) == FEATURES
    assert register.installed().reasons == dict.fromkeys(("paths", "mapping"), "only needed on the GPU backend")


def test_entry_point_names_register():
    from importlib.metadata import entry_points

    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "epilora"]
    assert found.load() is register.register


def test_register_twice_changes_nothing(main_engine):
    import vllm.lora.utils as lora_utils

    classes, status = lora_utils._all_lora_classes, register.installed()
    register.register()
    assert lora_utils._all_lora_classes is classes
    assert register.installed() is status


def test_classes_are_ours_and_pass_for_vllms(main_engine):
    import vllm.lora.utils as lora_utils
    from vllm.lora.layers import (
        MergedQKVParallelLinearWithLoRA,
        RowParallelLinearWithLoRA,
        VocabParallelEmbeddingWithLoRA,
    )

    names = [cls.__name__ for cls in lora_utils._all_lora_classes]
    assert "EpiloraMergedQKVParallelLinearWithLoRA" in names
    assert "RowParallelLinearWithLoRA" not in names
    assert VocabParallelEmbeddingWithLoRA in lora_utils._all_lora_classes  # not a linear layer: left alone
    layers = main_engine._engine.collective_rpc("_epilora_lora_layers")[0]
    assert isinstance(layers["model.layers.0.self_attn.qkv_proj"], MergedQKVParallelLinearWithLoRA)
    assert isinstance(layers["model.layers.1.mlp.down_proj"], RowParallelLinearWithLoRA)
    assert {type(layer).__name__[:7] for layer in layers.values()} == {"Epilora"}


@pytest.fixture
def fresh(monkeypatch):
    """register() as if it had not run, with installers that only note their names."""
    noted: list[str] = []
    monkeypatch.setattr(register, "_status", None)
    for name in {*FEATURES, "paths", "mapping"}:
        monkeypatch.setattr(register, f"_install_{name}", lambda name=name: noted.append(name))
    return noted


def test_disabled_by_variable(fresh, monkeypatch):
    monkeypatch.setenv("EPILORA_DISABLE", "1")
    register.register()
    assert fresh == []
    assert not register.installed().active
    assert register.installed().reasons == {"all": "EPILORA_DISABLE=1"}


def unknown(monkeypatch, feature, problem):
    stock = compat.problems
    monkeypatch.setattr(compat, "problems", lambda name: [problem] if name == feature else stock(name))


def test_an_unknown_feature_leaves_stock_and_is_logged_once(fresh, monkeypatch, caplog):
    unknown(monkeypatch, "layers", "apply takes other arguments")
    with caplog.at_level(logging.WARNING, logger="epilora"):
        register.register()
        register.register()
    assert set(fresh) == FEATURES - {"layers"}
    assert not register.installed().active
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "layers not installed" in lines[0]
    assert "apply takes other arguments" in lines[0]


def test_layers_need_the_row_mapping(fresh, monkeypatch):
    unknown(monkeypatch, "cpu_rows", "no mapping")
    register.register()
    assert "layers" not in fresh
    assert "needs cpu_rows" in register.installed().reasons["layers"]


def test_cpu_features_stay_away_from_other_platforms(fresh, monkeypatch):
    monkeypatch.setattr(compat, "is_cpu", lambda: False)
    register.register()
    assert set(fresh) == {"layers", "paths", "mapping", "cache_key", "matched"}


def test_required_layers_that_cannot_be_installed_are_an_error(fresh, monkeypatch):
    unknown(monkeypatch, "layers", "apply takes other arguments")
    monkeypatch.setenv("EPILORA_REQUIRE", "1")
    with pytest.raises(UnsupportedKernel, match=r"EPILORA_REQUIRE=1.*apply takes other arguments.*0\.26"):
        register.register()


@pytest.mark.parametrize("feature", compat.WANTED)
def test_patch_points_exist_in_the_installed_vllm(feature):
    assert compat.problems(feature) == []


def test_compile_caches_of_other_switches_are_not_shared(main_engine, monkeypatch):
    from vllm.config import VllmConfig

    def key(**ours):
        return VllmConfig(additional_config={"epilora": ours}).compute_hash()

    assert key() == key()
    assert len({VllmConfig().compute_hash(), key(path="stock"), key(path="hybrid"), key(quantise="op")}) == 4
    before = VllmConfig().compute_hash()
    assert before != VllmConfig.compute_hash.__wrapped__(VllmConfig())  # stock vLLM's key
    monkeypatch.setenv("EPILORA_PATH", "stock")
    assert VllmConfig().compute_hash() != before


def test_a_changed_signature_is_noticed(monkeypatch):
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    monkeypatch.setattr(BaseLinearLayerWithLoRA, "apply", lambda self, hidden, bias=None: None)
    (problem,) = compat.problems("layers")
    assert "BaseLinearLayerWithLoRA.apply" in problem
    assert "expected ['self', 'x', 'bias']" in problem
    monkeypatch.delattr(BaseLinearLayerWithLoRA, "_get_quant_method")
    assert any("_get_quant_method is missing" in problem for problem in compat.problems("layers"))


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        (None, "w8a8"),
        ({}, "w8a8"),
        ({"epilora": {}}, "w8a8"),
        ({"epilora": {"activations": "w8a16"}}, "w8a16"),
    ],
)
def test_activations_come_from_additional_config(extra, want):
    from epilora.plugin.layers import requested_activations

    assert requested_activations(types.SimpleNamespace(additional_config=extra)) == want


def test_unknown_activations_are_refused():
    from epilora.plugin.layers import requested_activations

    with pytest.raises(ValueError, match=r"w4a4.*w8a8, w8a16"):
        requested_activations(types.SimpleNamespace(additional_config={"epilora": {"activations": "w4a4"}}))
