"""Where switches come from, and what is refused."""

import types

import pytest

from epilora.plugin.settings import Settings, settings_of


def config(**ours):
    return types.SimpleNamespace(additional_config={"epilora": ours})


def test_defaults():
    assert settings_of(None, {}) == settings_of(config(), {}) == Settings()
    assert settings_of(types.SimpleNamespace(additional_config=None), {}) == Settings()


def test_variables_and_the_engines_own_config_beats_them():
    environment = {"EPILORA_PATH": "hybrid", "EPILORA_REQUIRE": "1", "EPILORA_TIMED": "0", "EPILORA_ADAPTERS": ""}
    found = settings_of(config(path="decode", batch_invariant=True), environment)
    assert found == Settings(path="decode", require=True, timed=False, batch_invariant=True)
    assert settings_of(config(activations="w8a16"), {"EPILORA_ACTIVATIONS": "w8a8"}).activations == "w8a16"


@pytest.mark.parametrize(
    ("ours", "environment", "message"),
    [
        ({"path": "fast"}, {}, r"epilora.path='fast'; allowed are auto, decode"),
        ({}, {"EPILORA_REQUIRE": "yes"}, r"EPILORA_REQUIRE='yes'; allowed are 0, 1"),
        ({"paths": "auto"}, {}, r"epilora.paths: unknown; allowed are activations, path"),
        ({"adapters": "fp8", "path": "vendor"}, {}, r"adapters=fp8 with path=vendor.*hybrid"),
        ({"adapters": "fp8"}, {"EPILORA_PATH": "stock"}, r"adapters=fp8 with path=stock"),
    ],
)
def test_what_is_refused(ours, environment, message):
    with pytest.raises(ValueError, match=message):
        settings_of(config(**ours), environment)


def test_the_compilers_key_changes_with_what_it_sees():
    one = {
        Settings(**change).traced() for change in ({}, {"path": "stock"}, {"quantise": "op"}, {"batch_invariant": True})
    }
    assert len(one) == 4
    assert Settings(timed=False, require=True).traced() == Settings().traced()
