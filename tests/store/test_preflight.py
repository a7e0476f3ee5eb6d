"""Preflight: what is served is served exactly, everything else is refused with a reason that names the culprit."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from epilora.errors import AdapterRejected
from epilora.store.peft_files import base_from_checkpoint, parse_config_bytes, peft_config
from epilora.store.preflight import preflight
from epilora.store.safetensors_io import read_tensors
from epilora.types import AdapterSpec
from tests.store.adapters_for_tests import BASE, QV, config, tensors

Q0, V0 = QV[0], QV[1]
A0, B0 = f"base_model.model.{Q0}.lora_A.weight", f"base_model.model.{Q0}.lora_B.weight"


def changed(edit: Callable[[dict[str, np.ndarray]], Any]) -> dict[str, np.ndarray]:
    content = tensors(1)
    edit(content)
    return content


def with_value(value: float) -> dict[str, np.ndarray]:
    return changed(lambda t: t[B0].__setitem__((0, 0), value))


def renamed(old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): tensor for name, tensor in tensors(1).items()}


def plus(key: str) -> dict[str, np.ndarray]:
    return changed(lambda t: t.update({key: np.zeros((2, 2), np.float32)}))


CONFIG_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "ia3": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "dora": ({"use_dora": True}, "use_dora=True cannot be served: DoRA"),
    "bias-all": ({"bias": "all"}, "bias='all' cannot be served"),
    "bias-lora": ({"bias": "lora_only"}, "bias='lora_only' cannot be served"),
    "lora-bias": ({"lora_bias": True}, "lora_bias=True"),
    "modules-to-save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    "conv1d": ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "parameters": ({"target_parameters": ["experts.w"]}, "target_parameters"),
    "qalora": ({"use_qalora": True}, "use_qalora"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    "alora": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    "arrow": ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    "kasa": ({"kasa_config": {}}, "kasa_config"),
    "megatron": ({"megatron_config": {"tp": 2}}, "megatron_config"),
    "tied": ({"ensure_weight_tying": True}, "ensure_weight_tying"),
    "pissa": ({"init_lora_weights": "pissa"}, "initialisation changes the base"),
    "pissa-niter": ({"init_lora_weights": "pissa_niter_4"}, "initialisation changes the base"),
    "olora": ({"init_lora_weights": "olora"}, "initialisation changes the base"),
    "corda": ({"init_lora_weights": "corda"}, "initialisation changes the base"),
    "loftq": ({"init_lora_weights": "loftq"}, "initialisation changes the base"),
    "init-list": ({"init_lora_weights": ["gaussian"]}, "init_lora_weights"),
    "rslora-text": ({"use_rslora": "yes"}, "use_rslora='yes'"),
    "rank-zero": ({"r": 0}, "r=0; allowed are whole numbers from 1 to 4096"),
    "rank-negative": ({"r": -4}, "r=-4"),
    "rank-huge": ({"r": 10**6}, "r=1000000"),
    "rank-text": ({"r": "4"}, "r='4'"),
    "rank-bool": ({"r": True}, "r=True"),
    "rank-float": ({"r": 4.0}, r"r=4\.0"),
    "rank-other": ({"r": 8}, rf"module {Q0}: lora_A has shape \[4, 8\], should have \[8, 8\]"),
    "rank-above-engine": ({"r": 32}, "rank 32; the engine allows at most 16"),
    "alpha-zero": ({"lora_alpha": 0}, "lora_alpha=0"),
    "alpha-nan": ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    "alpha-inf": ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
    "alpha-huge": ({"lora_alpha": 10**400}, "lora_alpha=1000"),
    "alpha-text": ({"lora_alpha": "8"}, "lora_alpha='8'"),
    "rank-pattern-list": ({"rank_pattern": [["q_proj", 2]]}, "rank_pattern must be an object"),
    "rank-pattern-zero": ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\]=0"),
    "rank-pattern-mismatch": ({"rank_pattern": {"q_proj": 2}}, r"lora_A has shape \[4, 8\], should have \[2, 8\]"),
    "rank-pattern-regex": ({"rank_pattern": {"(": 4}}, "not a valid regular expression"),
    "alpha-pattern-nan": ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern"),
    "evil-regex": ({"target_modules": r"(\w+)+!"}, "repeats a repeat"),
    "long-regex": ({"target_modules": "a|" * 2000}, "not a pattern of 1 to 2000"),
    "many-repeats": ({"target_modules": ".*" * 9}, "more than 8 unbounded repeats"),
    "backreference": ({"target_modules": r"(q|v)_\1proj"}, "refers back to a group"),
    "bad-regex": ({"target_modules": "["}, "not a valid regular expression"),
    "no-targets": ({"target_modules": None}, "target_modules is missing or empty"),
    "empty-targets": ({"target_modules": []}, "target_modules is missing or empty"),
    "targets-number": ({"target_modules": 3}, "target_modules=3"),
    "targets-of-numbers": ({"target_modules": ["q_proj", 1]}, "target_modules has the entry 1"),
    "targets-empty-text": ({"target_modules": [""]}, "target_modules has the entry ''"),
    "lm-head": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "LoRA on the embedding or lm_head"),
    "embedding": ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "LoRA on the embedding or lm_head"),
    "regex-matches-nothing": ({"target_modules": r".*\.nothing"}, "matches none of the base's 6 linear modules"),
    "target-not-covered": (
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        r"module model\.layers\.0\.mlp\.down_proj: the config targets it but the file has no tensors",
    ),
    "all-linear-not-covered": ({"target_modules": "all-linear"}, "the config targets it but the file has no tensors"),
    "tensors-not-targeted": ({"target_modules": ["q_proj"]}, "v_proj: has tensors, but the config's target_modules"),
    "layers-not-targeted": ({"layers_to_transform": [0]}, r"layers\.1.*: has tensors, but the config"),
    "layers-a-text": ({"layers_to_transform": "0"}, "layers_to_transform='0'"),
    "layers-nested": ({"layers_to_transform": [[]]}, r"layers_to_transform=\[\[\]\]"),
    "layers-pattern": ({"layers_to_transform": [0, 1], "layers_pattern": "(x"}, "layers_pattern"),
    "layers-other-name": ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, "has tensors, but the config"),
    "layers-of-text": ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    "excluded": ({"exclude_modules": ["v_proj"]}, "v_proj: has tensors, but the config's target_modules"),
    "wrong-base": ({"base_model_name_or_path": "org/other"}, "trained on 'org/other', the base here is 'org/tiny'"),
}

TENSOR_CASES: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "none": ({}, "no LoRA tensors: it would change nothing"),
    "no-b": (changed(lambda t: t.pop(B0)), f"module {Q0}: lora_B is missing"),
    "no-a": (changed(lambda t: t.pop(A0)), f"module {Q0}: lora_A is missing"),
    "module-missing": (
        changed(lambda t: (t.pop(A0), t.pop(B0))),
        f"module {Q0}: the config targets it but the file has no tensors",
    ),
    "nan": (with_value(np.nan), f"module {Q0}: lora_B has 1 values that are NaN or infinite"),
    "inf": (with_value(np.inf), f"module {Q0}: lora_B has 1 values that are NaN or infinite"),
    "transposed-a": (changed(lambda t: t.update({A0: t[A0].T})), r"lora_A has shape \[8, 4\], should have \[4, 8\]"),
    "transposed-b": (changed(lambda t: t.update({B0: t[B0].T})), r"lora_B has shape \[4, 12\], should have \[12, 4\]"),
    "wrong-in": (
        changed(lambda t: t.update({A0: np.zeros((4, 9), np.float32)})),
        r"lora_A has shape \[4, 9\], should have \[4, 8\] \(rank 4, base weight \[12, 8\]\)",
    ),
    "wrong-out": (changed(lambda t: t.update({B0: t[B0][:6]})), r"lora_B has shape \[6, 4\], should have \[12, 4\]"),
    "one-dimension": (changed(lambda t: t.update({A0: t[A0].reshape(-1)})), r"lora_A has shape \[32\]"),
    "scalar": (changed(lambda t: t.update({A0: np.float32(1).reshape(())})), r"lora_A has shape \[\]"),
    "empty-tensor": (changed(lambda t: t.update({A0: t[A0][:0]})), r"lora_A has shape \[0, 8\]"),
    "unknown-layer": (
        renamed("layers.0", "layers.7"),
        "the base has no such linear module; it has 2 ending in .q_proj",
    ),
    "unknown-module": (renamed("q_proj", "qkv_proj"), "its modules end in down_proj, q_proj, v_proj"),
    "no-prefix": (renamed("base_model.model.", ""), "not a LoRA tensor; expected base_model.model"),
    "magnitude": (plus(f"base_model.model.{Q0}.lora_magnitude_vector"), "DoRA magnitude vectors"),
    "embedding": (plus("base_model.model.model.embed_tokens.lora_embedding_A"), "LoRA on embeddings"),
    "lm-head": (plus("base_model.model.lm_head.lora_A.weight"), "lm_head: LoRA on the embedding or lm_head"),
    "bias": (plus(f"base_model.model.{Q0}.bias"), "biases are not served"),
    "b-bias": (plus(f"base_model.model.{Q0}.lora_B.bias"), "biases are not served"),
    "full-weight": (plus("base_model.model.lm_head.weight"), "a full weight"),
    "path": (plus("base_model.model.../../etc/passwd.lora_A.weight"), "not a LoRA tensor"),
    "long-name": (plus("base_model.model." + "a" * 300 + ".lora_A.weight"), "not a LoRA tensor"),
    "twice": (plus(A0.replace(".weight", ".default.weight")), "lora_A is given twice"),
    "other-adapter-name": (renamed(".weight", ".other.weight"), "not a LoRA tensor"),
}


def accept(data: Any, content: dict[str, np.ndarray], **options: Any) -> Any:
    return preflight(data, content, BASE, max_rank=16, base_model="org/tiny", **options)


def test_the_plain_case_is_accepted() -> None:
    report = accept(config(), tensors(1))
    assert report.spec == AdapterSpec(4, 8.0, ("q_proj", "v_proj"))
    assert report.covered == tuple(sorted(QV))
    assert report.base_modules == len(BASE)
    assert set(report.scalings.values()) == {2.0}
    assert report.bytes == sum(tensor.nbytes for tensor in tensors(1).values())
    assert report.notes == ()


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_config_refused(case: str) -> None:
    changes, message = CONFIG_CASES[case]
    with pytest.raises(AdapterRejected, match=message):
        accept(config(**changes), tensors(1))


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_refused(case: str) -> None:
    content, message = TENSOR_CASES[case]
    with pytest.raises(AdapterRejected, match=message):
        accept(config(), content)


def test_every_case_breaks_a_rule_of_its_own() -> None:
    messages = {message for _, message in (*CONFIG_CASES.values(), *TENSOR_CASES.values())}
    assert len(CONFIG_CASES) + len(TENSOR_CASES) >= 60
    assert len(messages) >= 55


@pytest.mark.parametrize("targets", [r".*\.(q|v)_proj", r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"])
def test_regex_targets_become_names(targets: str) -> None:
    report = accept(config(target_modules=targets), tensors(1))
    assert report.spec.target_modules == ("q_proj", "v_proj")


def test_all_linear_and_layers_and_exclusions() -> None:
    every = tensors(1, modules=list(BASE))
    assert len(accept(config(target_modules="all-linear"), every).covered) == 6
    only = tensors(1, modules=QV[:2])
    report = accept(config(layers_to_transform=[0]), only)
    assert report.spec.target_modules == tuple(sorted(QV[:2]))
    assert accept(config(layers_to_transform=0), only).covered == report.covered
    assert accept(config(layers_to_transform=[0], layers_pattern="layers"), only).covered == report.covered
    report = accept(config(exclude_modules=r".*layers\.1\..*"), only)
    assert report.spec.target_modules == tuple(sorted(QV[:2]))


def test_patterns_and_rslora_are_folded_per_module() -> None:
    data = config(
        use_rslora=True, rank_pattern={r"layers\.0\.self_attn\.q_proj": 2}, alpha_pattern={"v_proj": 6, ".*": 5}
    )
    content = tensors(1) | tensors(1, modules=[Q0], rank=2)
    report = accept(data, content)
    assert report.ranks[Q0] == 2
    assert report.scalings[Q0] == pytest.approx(5 / 2**0.5)
    assert report.scalings[V0] == pytest.approx(6 / 2)
    assert report.scalings[QV[2]] == pytest.approx(5 / 2)


def test_peft_agrees_on_ranks_and_scalings() -> None:
    """The same config through stock peft, on a module tree of the same names."""
    import torch
    from peft import LoraConfig, get_peft_model

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = torch.nn.Linear(8, 12), torch.nn.Linear(8, 6)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

    fields: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "^model.layers.0.self_attn.v_proj": 3},
        "alpha_pattern": {"v_proj": 6},
    }
    model = get_peft_model(Model(), LoraConfig(**fields))
    content, ranks, scalings = {}, {}, {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            path = name.removeprefix("base_model.model.")
            ranks[path], scalings[path] = module.r["default"], module.scaling["default"]
            content[f"{name}.lora_A.weight"] = module.lora_A["default"].weight.detach().numpy()
            content[f"{name}.lora_B.weight"] = module.lora_B["default"].weight.detach().numpy()
    report = accept(config(**fields), content)
    assert report.ranks == ranks
    assert report.scalings == pytest.approx(scalings)
    assert report.zero_b == 4
    assert "4 of 4 modules have B = 0" in report.notes[0]
    loaded = LoraConfig(**{k: v for k, v in peft_config(report.spec, "tiny").items() if k != "peft_type"})
    assert (loaded.r, loaded.lora_alpha, loaded.use_rslora) == (4, 8, True)
    assert loaded.rank_pattern == fields["rank_pattern"]


def test_patterns_that_take_forever_are_refused_quickly() -> None:
    for pattern in (r"(a+)+$", r"(\w*)*x", r"((a|b)*c)*d", r"(.*){20}", r"(?:a{1,99}){1,99}b", r"(?=(a+)+)b"):
        start = time.thread_time()
        with pytest.raises(AdapterRejected, match="repeats a repeat"):
            accept(config(target_modules=pattern), tensors(1))
        assert time.thread_time() - start < 0.5


GOOD_FILE = save(tensors(1))
HEADER = json.loads(GOOD_FILE[8 : 8 + int.from_bytes(GOOD_FILE[:8], "little")])


def packed(header: Any, data: bytes = GOOD_FILE[8 + int.from_bytes(GOOD_FILE[:8], "little") :]) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> bytes:
    return packed({**HEADER, A0: {**HEADER[A0], **changes}})


FILE_CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "short": (b"1234", "has 4 bytes"),
    "header-bomb": ((1 << 60).to_bytes(8, "little") + b"{}", "header claims 1152921504606846976 bytes"),
    "header-beyond-file": ((100).to_bytes(8, "little") + b"{}", "header claims 100 bytes; the file has 10"),
    "not-json": (packed(b"not json"), "not valid JSON"),
    "not-utf8": (packed(b"\xff\xfe"), "not valid JSON"),
    "not-object": (packed([1]), "not a JSON object"),
    "deep-json": (packed(b'{"a":' * 5000 + b"1" + b"}" * 5000), "not valid JSON|not an object"),
    "pickle": (b"\x80\x02" + b"\0" * 100, "header claims"),
    "key-twice": (packed(b'{"a": {}, "a": {}}'), "a key appears twice"),
    "metadata-list": (packed({"__metadata__": [1]}), "__metadata__ is not"),
    "entry-list": (packed({**HEADER, A0: [1]}), "header entry is not an object"),
    "dtype-int": (entry(dtype="I64"), "dtype 'I64' is not supported"),
    "dtype-fp8": (entry(dtype="F8_E4M3"), "dtype 'F8_E4M3' is not supported"),
    "dtype-none": (entry(dtype=None), "dtype None is not supported"),
    "shape-negative": (entry(shape=[-4, -8]), "are not whole numbers"),
    "shape-float": (entry(shape=[4.0, 8]), "are not whole numbers"),
    "shape-bomb": (entry(shape=[1 << 40, 1 << 40]), "needs 4835703278458516698824704 bytes"),
    "offsets-beyond": (entry(data_offsets=[0, 1 << 40]), "do not give them"),
    "offsets-reversed": (entry(data_offsets=[128, 0]), "do not give them"),
    "offsets-three": (entry(data_offsets=[0, 1, 2]), "are not whole numbers"),
    "overlap": (entry(data_offsets=[16, 144]), "begins at byte|belong to no tensor|the one before it ends"),
    "trailing": (GOOD_FILE + b"x" * 16, "16 bytes that belong to no tensor"),
    "truncated": (GOOD_FILE[:-8], "do not give them"),
}


@pytest.mark.parametrize("case", FILE_CASES)
def test_files_refused(case: str) -> None:
    data, message = FILE_CASES[case]
    with pytest.raises(AdapterRejected, match=message):
        read_tensors(data)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_config_files_refused(data: bytes) -> None:
    with pytest.raises(AdapterRejected, match=r"adapter_config\.json is not"):
        parse_config_bytes(data)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD_FILE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_are_refused_or_read_whole(edits: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD_FILE)
    for position, value in edits:
        data[position] = value
    try:
        content, _ = read_tensors(bytes(data))
        preflight(config(), content, BASE)
    except AdapterRejected as err:
        seen = str(err)
    else:
        seen = "read whole"
    assert seen


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted({*config(), *(key for changes, _ in CONFIG_CASES.values() for key in changes)})), json_values
)
def test_any_config_value_is_accepted_or_refused_with_a_reason(field: str, value: Any) -> None:
    try:
        seen = accept(config(**{field: value}), tensors(1)).covered
    except AdapterRejected as err:
        seen = re.findall(r"\w+", str(err))
    assert len(seen) >= 3


def test_base_shapes_come_from_checkpoint_headers(tmp_path: Path) -> None:
    weights = {f"{module}.weight": np.zeros(shape, np.float32) for module, shape in BASE.items()}
    weights |= {"model.norm.weight": np.zeros(8, np.float32), "lm_head.weight": np.zeros((50, 8), np.float32)}
    weights |= {"model.embed_tokens.weight": np.zeros((50, 8), np.float32)}
    (tmp_path / "model.safetensors").write_bytes(save(weights))
    assert base_from_checkpoint(tmp_path) == BASE
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors files"):
        base_from_checkpoint(tmp_path / "none")
