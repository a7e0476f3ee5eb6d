"""Is this adapter one we can serve rightly? PEFT config and tensors against a description of the base, before
acceptance.

Every case is either served exactly (rank and alpha patterns, rsLoRA, regex and "all-linear" targets, fp32 / fp16 /
bf16) or refused with the module, what it has and what it should have. Nothing is skipped in silence: a tensor that no
base module would use, a module the config targets but the file lacks, and an adapter that covers nothing are all
refusals.

PEFT's matching rules are followed as of peft 0.17+: a list entry matches a module's whole name or its end after a dot;
a string is a regular expression over the whole name; patterns match with an optional dotted prefix, first match wins.
Pure functions; numpy only. File access is in `peft_files`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

PREFIX = "base_model.model."
MAX_REGEX_CHARS = 2000
MAX_REGEX_REPEATS = 8
MAX_PATTERNS = 4096

_KEY = re.compile(r"base_model\.model\.(?P<module>[A-Za-z0-9_.\-]{1,256})\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_NOT_SERVED_MODULES = ("lm_head", "embed_tokens", "embed_out", "wte", "word_embeddings")

# Options that change what the adapter computes in ways the engine does not: name -> (values that are harmless, reason).
_REFUSED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": (
        (False, None),
        "DoRA rescales the base weight's columns; the shared base cannot be rescaled per adapter",
    ),
    "bias": (("none", None), "a bias would have to be added to the shared base's output"),
    "lora_bias": ((False, None), "a bias on lora_B is not applied by the engine"),
    "modules_to_save": ((None, [], ()), "it replaces whole modules of the shared base"),
    "fan_in_fan_out": ((False, None), "transposed base weights (Conv1D) are not supported"),
    "layer_replication": ((None, [], ()), "it changes the base's layer list"),
    "trainable_token_indices": ((None, [], (), {}), "it changes the shared embedding"),
    "target_parameters": ((None, [], ()), "LoRA on bare parameters (fused experts) is not supported"),
    "use_qalora": ((False, None), "QA-LoRA pools the input; the engine does not"),
    "use_bdlora": ((None, False), "block-diagonal LoRA is not supported"),
    "alora_invocation_tokens": ((None, [], ()), "activated LoRA switches within the prompt; the engine does not"),
    "arrow_config": ((None,), "Arrow routes between adapters per token; the engine does not"),
    "kasa_config": ((None,), "KaSA has a diagonal between A and B"),
    "monteclora_config": ((None,), "MonteCLoRA samples its weights"),
    "velora_config": ((None,), "VeLoRA is not supported"),
    "megatron_config": ((None,), "Megatron-parallel adapters must be exported to plain PEFT first"),
    "ensure_weight_tying": ((False, None), "it touches the tied embedding"),
}
_SAFE_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")


@dataclass(frozen=True)
class PreflightReport:
    """What was checked and accepted.

    covered: base modules with an A and a B. base_modules: how many the base has (0 if no base was given).
    ranks, scalings: per covered module, patterns and rsLoRA folded; scaling multiplies B A. zero_b: modules whose B is
    all zero (no effect yet, as at step 0 of training). bytes: fp32 size. notes: what a person should know.
    """

    spec: AdapterSpec
    covered: tuple[str, ...]
    base_modules: int
    ranks: dict[str, int]
    scalings: dict[str, float]
    zero_b: int
    bytes: int
    notes: tuple[str, ...] = ()


def preflight(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    base: Mapping[str, tuple[int, int]] | None = None,
    *,
    max_rank: int | None = None,
    base_model: str | None = None,
) -> PreflightReport:
    """Check a PEFT `adapter_config.json` and its tensors.

    tensors: PEFT key -> fp32 array. base: module name -> (out features, in features) of every linear module that may be
    adapted; None checks everything that needs no base. max_rank: the engine's. base_model: refuse another
    `base_model_name_or_path` (compared by last path component), None accepts any.
    Raises AdapterRejected.
    """
    spec, excluded = parse_config(config, base)
    if base_model is not None:
        _check_base_model(config, base_model)
    report = check_tensors(spec, tensors, base, max_rank=max_rank)
    _check_targets(config, report.covered, base, excluded)
    plain_list = not isinstance(config.get("target_modules"), str)
    if plain_list and not excluded and config.get("layers_to_transform") is None:
        return report
    return replace(report, spec=replace(spec, target_modules=_suffixes(report.covered, base)))


def _suffixes(covered: tuple[str, ...], base: Mapping[str, tuple[int, int]] | None) -> tuple[str, ...]:
    """Shortest list of names that selects exactly `covered`: last components if they select nothing else, else
    whole names.
    """
    suffixes = tuple(sorted({module.rsplit(".", 1)[-1] for module in covered}))
    selected = {module for module in base or () if module.endswith(tuple(f".{suffix}" for suffix in suffixes))}
    return suffixes if selected == set(covered) else tuple(sorted(covered))


def parse_config(
    config: Mapping[str, Any], base: Mapping[str, tuple[int, int]] | None = None
) -> tuple[AdapterSpec, tuple[str, ...]]:
    """The spec of a PEFT config, and the modules `exclude_modules` names among the base's. Raises AdapterRejected."""
    if not isinstance(config, Mapping):
        raise AdapterRejected("adapter_config.json is not a JSON object")
    peft_type = config.get("peft_type", "LORA")
    if str(peft_type).upper() != "LORA":
        raise AdapterRejected(f"peft_type is {peft_type!r}; only LORA is served")
    for option, (harmless, reason) in _REFUSED_OPTIONS.items():
        value = config.get(option, harmless[0])
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            raise AdapterRejected(f"{option}={_short(value)} cannot be served: {reason}; allowed: {harmless[0]!r}")
    init = config.get("init_lora_weights", True)
    if isinstance(init, (list, dict)) or init not in _SAFE_INITS:
        raise AdapterRejected(
            f"init_lora_weights={_short(init)} cannot be served: that initialisation changes the base's weights;"
            " convert the adapter to plain LoRA (PEFT: save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    use_rslora = config.get("use_rslora", False)
    if use_rslora is None:
        use_rslora = False
    if not isinstance(use_rslora, bool):
        raise AdapterRejected(f"use_rslora={_short(use_rslora)}; allowed are true and false")
    rank = _rank("r", config.get("r", 8))
    alpha = _alpha("lora_alpha", config.get("lora_alpha", 8))
    rank_pattern = _pattern(config, "rank_pattern", _rank)
    alpha_pattern = _pattern(config, "alpha_pattern", _alpha)
    targets = _targets(config.get("target_modules"), base)
    excluded: tuple[str, ...] = ()
    if config.get("exclude_modules"):
        matches = _matcher("exclude_modules", config["exclude_modules"])
        excluded = tuple(module for module in base or () if matches(module))
    spec = AdapterSpec(rank, alpha, targets, use_rslora, rank_pattern, alpha_pattern)
    return spec, excluded


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 4096:
        raise AdapterRejected(f"{name}={_short(value)}; allowed are whole numbers from 1 to 4096")
    return value


def _alpha(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= abs(value) <= 1e9:
        raise AdapterRejected(f"{name}={_short(value)}; allowed are finite numbers other than 0 (0 switches it off)")
    return float(value)


def _pattern(config: Mapping[str, Any], field: str, check: Any) -> tuple[tuple[str, Any], ...]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, Mapping) or len(patterns) > MAX_PATTERNS:
        raise AdapterRejected(
            f"{field} must be an object of at most {MAX_PATTERNS} module patterns; got {_short(patterns)}"
        )
    out = []
    for pattern, value in patterns.items():
        safe_regex(field, pattern)
        out.append((pattern, check(f"{field}[{_short(pattern)}]", value)))
    return tuple(out)


def _targets(targets: Any, base: Mapping[str, tuple[int, int]] | None) -> tuple[str, ...]:
    """target_modules as the suffixes a spec records; a regex or "all-linear" is resolved against the base."""
    if targets is None or targets in ([], ""):
        raise AdapterRejected("target_modules is missing or empty; name the modules the adapter changes")
    if isinstance(targets, str):
        if targets == "all-linear" or base is None:
            if targets != "all-linear":
                safe_regex("target_modules", targets)
            return (targets,)
        matches = _matcher("target_modules", targets)
        suffixes = sorted({module.rsplit(".", 1)[-1] for module in base if matches(module)})
        if not suffixes:
            raise AdapterRejected(
                f"target_modules={_short(targets)} matches none of the base's {len(base)} linear modules"
            )
        return tuple(suffixes)
    if not isinstance(targets, (list, tuple, set)) or len(targets) > MAX_PATTERNS:
        raise AdapterRejected(f"target_modules={_short(targets)}; allowed are a list of names, a regex or 'all-linear'")
    for target in targets:
        if not isinstance(target, str) or not target:
            raise AdapterRejected(f"target_modules has the entry {_short(target)}; every entry must be a module name")
        if target.rsplit(".", 1)[-1] in _NOT_SERVED_MODULES:
            raise AdapterRejected(f"target_modules names {target!r}: LoRA on the embedding or lm_head is not served")
    return tuple(sorted(set(targets)))


def safe_regex(field: str, pattern: Any) -> re.Pattern[str]:
    """Compile an uploader's pattern, refusing the kinds that take exponential time.

    Refused: not a string, too long, invalid, more than 8 unbounded repeats, or one repeat inside another.
    """
    if not isinstance(pattern, str) or not pattern or len(pattern) > MAX_REGEX_CHARS:
        raise AdapterRejected(f"{field}: {_short(pattern)} is not a pattern of 1 to {MAX_REGEX_CHARS} characters")
    try:
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise AdapterRejected(f"{field}: {_short(pattern)} is not a valid regular expression: {err}") from err
    if _count_repeats(tree, inside=False, field=field, pattern=pattern) > MAX_REGEX_REPEATS:
        raise AdapterRejected(
            f"{field}: {_short(pattern)} has more than {MAX_REGEX_REPEATS} unbounded repeats; simplify it"
        )
    return compiled


def _count_repeats(tree: Any, *, inside: bool, field: str, pattern: str) -> int:
    count = 0
    for operation, argument in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = argument
            many = int(most) > 16
            if many and inside:
                raise AdapterRejected(
                    f"{field}: {_short(pattern)} repeats a repeat, which can take forever; simplify it"
                )
            count += many
            count += _count_repeats(body, inside=inside or int(most) > 1, field=field, pattern=pattern)
        elif name == "BRANCH":
            # Alternatives are tried one after the other: the worst of them counts.
            branches = (_count_repeats(branch, inside=inside, field=field, pattern=pattern) for branch in argument[1])
            count += max(branches, default=0)
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            count += _count_repeats(argument[-1], inside=inside, field=field, pattern=pattern)
        elif name == "ATOMIC_GROUP":
            count += _count_repeats(argument, inside=inside, field=field, pattern=pattern)
        elif name == "GROUPREF_EXISTS":
            for branch in argument[1:]:
                if branch is not None:
                    count += _count_repeats(branch, inside=inside, field=field, pattern=pattern)
        elif name == "GROUPREF":
            raise AdapterRejected(f"{field}: {_short(pattern)} refers back to a group, which is not allowed")
    return count


def _matcher(field: str, targets: Any) -> Any:
    if isinstance(targets, str):
        if targets == "all-linear":
            return lambda module: module.rsplit(".", 1)[-1] not in _NOT_SERVED_MODULES
        compiled = safe_regex(field, targets)
        return lambda module: compiled.fullmatch(module) is not None
    if not isinstance(targets, (list, tuple, set)) or not all(isinstance(target, str) for target in targets):
        raise AdapterRejected(f"{field}={_short(targets)}; allowed are a list of names or a regular expression")
    suffixes = tuple(f".{target}" for target in targets)
    whole = set(targets)
    return lambda module: module in whole or module.endswith(suffixes)


def module_rank(spec: AdapterSpec, module: str) -> int:
    """The rank PEFT gives this module."""
    return int(_first_match(spec.rank_pattern, module, spec.rank))


def module_scaling(spec: AdapterSpec, module: str) -> float:
    """The factor PEFT multiplies this module's B A by: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank = module_rank(spec, module)
    alpha = float(_first_match(spec.alpha_pattern, module, spec.alpha))
    return alpha / (math.sqrt(rank) if spec.use_rslora else rank)


def _first_match(patterns: Iterable[tuple[str, Any]], module: str, default: Any) -> Any:
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def check_tensors(
    spec: AdapterSpec,
    tensors: Mapping[str, Any],
    base: Mapping[str, tuple[int, int]] | None = None,
    *,
    max_rank: int | None = None,
) -> PreflightReport:
    """Check tensors against a spec and, if given, the base's shapes. Raises AdapterRejected naming the module."""
    parts: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if found is None:
            raise AdapterRejected(_why_not(key))
        module, part = found["module"], found["part"]
        if part in parts.setdefault(module, {}):
            raise AdapterRejected(f"module {module}: lora_{part} is given twice")
        parts[module][part] = tensor
    if not parts:
        raise AdapterRejected("the adapter has no LoRA tensors: it would change nothing")
    ranks: dict[str, int] = {}
    scalings: dict[str, float] = {}
    zero_b = total = 0
    for module in sorted(parts):
        if module.rsplit(".", 1)[-1] in _NOT_SERVED_MODULES:
            raise AdapterRejected(f"module {module}: LoRA on the embedding or lm_head is not served")
        if len(parts[module]) != 2:
            missing = "B" if "A" in parts[module] else "A"
            raise AdapterRejected(f"module {module}: lora_{missing} is missing")
        a, b = parts[module]["A"], parts[module]["B"]
        n, k = _expected(module, base, a, b)
        rank = module_rank(spec, module)
        if max_rank is not None and rank > max_rank:
            raise AdapterRejected(f"module {module}: rank {rank}; the engine allows at most {max_rank}")
        for part, tensor, want in (("A", a, (rank, k)), ("B", b, (n, rank))):
            shape = tuple(int(size) for size in tensor.shape)
            if shape != want:
                raise AdapterRejected(
                    f"module {module}: lora_{part} has shape {list(shape)}, should have {list(want)}"
                    f" (rank {rank}, base weight [{n}, {k}])"
                )
            if isinstance(tensor, np.ndarray):
                _check_finite(module, part, tensor)
        zero_b += isinstance(b, np.ndarray) and not b.any()
        total += 4 * rank * (n + k)
        ranks[module], scalings[module] = rank, module_scaling(spec, module)
    notes = (f"{zero_b} of {len(ranks)} modules have B = 0 and change nothing yet",) if zero_b else ()
    return PreflightReport(spec, tuple(ranks), len(base or ()), ranks, scalings, zero_b, total, notes)


def _expected(module: str, base: Mapping[str, tuple[int, int]] | None, a: Any, b: Any) -> tuple[int, int]:
    """(out, in) of the module: the base's, or without a base what the tensors themselves claim."""
    if base is not None:
        if module not in base:
            raise AdapterRejected(f"module {module}: the base has no such linear module{_nearest(module, base)}")
        return base[module]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise AdapterRejected(
            f"module {module}: lora_A has shape {list(a.shape)} and lora_B {list(b.shape)},"
            " should be [rank, in] and [out, rank]"
        )
    return int(b.shape[0]), int(a.shape[1])


def _check_finite(module: str, part: str, tensor: np.ndarray) -> None:
    if not np.isfinite(tensor).all():
        bad = int(tensor.size - np.isfinite(tensor).sum())
        raise AdapterRejected(
            f"module {module}: lora_{part} has {bad} values that are NaN or infinite, should have none"
        )


def _why_not(key: Any) -> str:
    """Why a tensor's key is refused, in the terms of the feature that made it."""
    text = str(key)
    if "lora_magnitude_vector" in text:
        return f"tensor {_short(text)}: DoRA magnitude vectors are not served"
    if "lora_embedding_" in text:
        return f"tensor {_short(text)}: LoRA on embeddings is not served"
    if text.endswith(".bias"):
        return f"tensor {_short(text)}: biases are not served (train with bias='none')"
    if "modules_to_save" in text or (text.startswith(PREFIX) and ".lora_" not in text):
        return f"tensor {_short(text)}: a full weight (modules_to_save) is not served"
    return f"tensor {_short(text)}: not a LoRA tensor; expected {PREFIX}<module>.lora_A.weight or .lora_B.weight"


def _nearest(module: str, base: Mapping[str, tuple[int, int]]) -> str:
    last = module.rsplit(".", 1)[-1]
    alike = sorted(name for name in base if name.endswith(f".{last}"))
    if alike:
        return f"; it has {len(alike)} ending in .{last}, the first is {alike[0]}"
    return "; its modules end in " + ", ".join(sorted({name.rsplit(".", 1)[-1] for name in base}))


def _check_base_model(config: Mapping[str, Any], base_model: str) -> None:
    said = str(config.get("base_model_name_or_path") or "")
    if said and said.rstrip("/").rsplit("/", 1)[-1].lower() != base_model.rstrip("/").rsplit("/", 1)[-1].lower():
        raise AdapterRejected(f"the adapter was trained on {said!r}, the base here is {base_model!r}")


def _check_targets(
    config: Mapping[str, Any],
    covered: tuple[str, ...],
    base: Mapping[str, tuple[int, int]] | None,
    excluded: tuple[str, ...],
) -> None:
    """What the config targets and what the file holds must be the same modules."""
    targets = config.get("target_modules")
    matches = _matcher("target_modules", targets)
    layers, layer_of = _layers(config)

    def wanted(module: str) -> bool:
        if module in excluded or not matches(module):
            return False
        if layers is None or isinstance(targets, str):
            return True
        index = layer_of.match(module)
        return index is not None and int(index[1]) in layers

    for module in covered:
        if not wanted(module):
            raise AdapterRejected(f"module {module}: has tensors, but the config's target_modules do not select it")
    if base is None:
        return
    has = set(covered)
    lacking = [module for module in base if module.rsplit(".", 1)[-1] not in _NOT_SERVED_MODULES and wanted(module)]
    lacking = [module for module in lacking if module not in has]
    if lacking:
        raise AdapterRejected(
            f"module {lacking[0]}: the config targets it but the file has no tensors for it"
            f" ({len(lacking)} such modules; {len(has)} are covered)"
        )


def _layers(config: Mapping[str, Any]) -> tuple[set[int] | None, re.Pattern[str]]:
    """The layer numbers `layers_to_transform` selects (None: all) and how a module's number is found, as PEFT does."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        chosen = None
    elif type(layers) is int:
        chosen = {layers}
    elif isinstance(layers, list) and all(type(layer) is int for layer in layers):
        chosen = set(layers)
    else:
        raise AdapterRejected(f"layers_to_transform={_short(layers)}; allowed are layer numbers")
    names = config.get("layers_pattern") or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise AdapterRejected(f"layers_pattern={_short(names)}; allowed are names such as 'layers'")
    before = f"(?:{'|'.join(names)})" if names else r"[^.]*"
    return chosen, re.compile(rf"(?:.*?\.)?{before}\.(\d+)\.")


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
