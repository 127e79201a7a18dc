"""How a checkpoint's matrices are quantised, from its ``quantization_config``; other schemes are refused here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swiftllm.model.checkpoint import DRAFT_PREFIX, stored_names, text_name
from swiftllm.model.folder import is_there, read_object, tell
from swiftllm.ops.matrices import CODES_PER_WORD, GROUP_MULTIPLE, MXFP4_GROUP

AWQ, GPTQ, COMPRESSED_TENSORS, MXFP4 = "AWQ", "GPTQ", "compressed-tensors", "MXFP4"
SUPPORTED = (
    "supported are 4-bit AWQ (gemm), GPTQ (with or without act-order), auto-round (packed as one of these) and "
    "compressed-tensors (pack-quantized), for gpt-oss MXFP4 in place of these, and 16 or 32 bits: take another "
    "checkpoint of the model"
)
OLD_GPTQ_FILE = "quantize_config.json"  # beside a config.json that says nothing
PACKED_WEIGHTS = ("qweight", "weight_packed")  # a tensor of these names is in a module's place of ``weight``
MATRIX = re.compile(r"layers\.\d+\..*\.(\w+_proj|in_proj_\w+)$")
OF_QKV = re.compile(r"\.in_proj_[qkv]$")  # parts that a checkpoint has in one module
DECAY = re.compile(r"\.in_proj_(a|b|ba)$")
STACKS = ("gate_up_proj", "down_proj")  # of all experts of a layer, without a module of its own
IN_REGEXES = set("*+?^$()[]{}|\\")  # auto-round takes a name with one of them for a regular expression


@dataclass(frozen=True)
class ModuleRule:
    """What ``quantization_config`` says of some modules, by their names in the checkpoint."""

    name: str
    is_pattern: bool = False
    """Whether ``name`` is a regular expression, which matches from the beginning of a module's name on."""
    is_left_out: bool = True
    """Whether they keep their 16 bits."""
    changed: str = ""
    """What they have unlike the others, as ``bits=8``; nobody reads such a module."""


@dataclass(frozen=True)
class QuantisationScheme:
    """What all quantised matrices of a checkpoint have in common."""

    method: str
    """One of ``AWQ``, ``GPTQ``, ``COMPRESSED_TENSORS`` and ``MXFP4``."""
    group_size: int | None
    """Inputs that share a scale; None: all inputs of an output do."""
    ordered: bool = False
    """Whether groups hold inputs in an order of their own (act-order)."""
    symmetric: bool = False
    """Whether every zero point is 8."""
    zero_offset: int = 0
    """What the checkpoint says is to be added to a stored zero point: 1 in GPTQ's first version."""
    parts: int = 1
    """Ranks among which the inputs of ``o`` and ``down`` are divided."""
    in_16_bits: frozenset[str] = frozenset()
    """Modules of the text model that the files hold as they were, or all experts of a layer, by the name of these."""
    quantises_decay: bool = False
    """Whether the small matrices of linear attention are quantised, too."""
    rules: tuple[ModuleRule, ...] = ()
    """What single modules are, where there are no files that tell. The first that names a module counts."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], folder: Path, is_wrapped: bool = False) -> QuantisationScheme | None:
        """The scheme that a folder's ``config.json`` names; None: the weights are not quantised.

        Which modules are quantised is what the folder's files hold. ``is_wrapped``: see
        :func:`~swiftllm.model.checkpoint.text_name`.

        Raises:
            ValueError: the scheme is not supported, or contradicts the files; the message says what is not, and what
                would do.
        """
        given = raw.get("quantization_config")
        if given is None and is_there(folder / OLD_GPTQ_FILE):
            given = {"quant_method": "gptq", **read_object(folder / OLD_GPTQ_FILE)}
        if given is None:
            return None
        readers = {
            "awq": _awq,
            "gptq": _gptq,
            "auto-round": _auto_round,
            "intel/auto-round": _auto_round,  # of its first versions
            "compressed-tensors": _compressed_tensors,
            "mxfp4": _mxfp4,
        }
        if not isinstance(given, Mapping):
            raise _refusal(folder, f"quantization_config={given!r}")
        method = given.get("quant_method")
        if method not in readers:
            raise _refusal(folder, f"quant_method={method!r}")
        if method == COMPRESSED_TENSORS and given.get("kv_cache_scheme"):
            tell(f"{folder}: kv_cache_scheme of quantization_config is not followed: the cache has a format of its own")
            if not given.get("config_groups"):
                return None  # nothing else is quantised
        try:
            scheme = readers[method](given)
            names = None if scheme.experts_only else stored_names(folder)
            if names is not None:
                scheme = scheme._of_files(names, is_wrapped, folder)
            elif method == COMPRESSED_TENSORS and not (scheme._leaves_out("lm_head") or raw.get("tie_word_embeddings")):
                raise _Unsupported("a quantised lm_head")
        except _Unsupported as what:
            raise _refusal(folder, str(what)) from None
        except re.error as error:
            raise ValueError(f"{folder}: quantization_config has a pattern that is none: {error}") from None
        if scheme.group_size is not None and (scheme.group_size < 1 or scheme.group_size % GROUP_MULTIPLE):
            raise _refusal(folder, f"group_size={scheme.group_size} (no multiple of {GROUP_MULTIPLE})")
        return scheme

    def keeps_16_bits(self, module: str) -> bool:
        """Whether a module of the text model, by its name in Llama, is not quantised."""
        module = OF_QKV.sub(".in_proj_qkv", module)
        if module in self.in_16_bits or f"{module.partition('.experts.')[0]}.experts" in self.in_16_bits:
            return True
        return self._leaves_out(module) or self._leaves_out(module.replace("model.", "model.language_model.", 1))

    def _leaves_out(self, module: str) -> bool:
        rule = self._rule_of(module)
        return rule is not None and rule.is_left_out

    def _rule_of(self, module: str) -> ModuleRule | None:
        """``module``: as the checkpoint calls it."""
        names, patterns = self._sorted_rules
        return names.get(module) or next((rule for pattern, rule in patterns if pattern.match(module)), None)

    @cached_property
    def _sorted_rules(self) -> tuple[dict[str, ModuleRule], list[tuple[re.Pattern[str], ModuleRule]]]:
        names = {rule.name: rule for rule in self.rules if not rule.is_pattern}
        return names, [(re.compile(rule.name), rule) for rule in self.rules if rule.is_pattern]

    def _of_files(self, names: Iterable[str], is_wrapped: bool, folder: Path) -> QuantisationScheme:
        """The scheme as the files with tensors of these ``names`` have it.

        Raises:
            ValueError: they hold a module quantised that should not be.
            _Unsupported: or quantised in another way than others.
        """
        in_16_bits, quantises_decay = set(), False
        for stored in names:
            own, _, kind = stored.rpartition(".")
            if kind not in ("weight", *PACKED_WEIGHTS, *STACKS):
                continue
            name = text_name(stored, is_wrapped)
            if name is None or name.startswith(DRAFT_PREFIX):
                continue
            module = name.rpartition(".")[0]
            if kind in STACKS or (kind == "weight" and MATRIX.search(module)):
                in_16_bits.add(module)
            elif kind in PACKED_WEIGHTS:
                rule = self._rule_of(own)
                if module == "lm_head":
                    raise _Unsupported("a quantised lm_head")
                if rule is not None and rule.changed:
                    raise _Unsupported(f"{rule.changed} of {own}")
                if rule is not None and rule.is_left_out:
                    raise ValueError(
                        f"{folder}: quantization_config says that {own} is not quantised, and its weights are: "
                        "take another checkpoint of the model"
                    )
                quantises_decay |= DECAY.search(module) is not None
        if not quantises_decay:
            in_16_bits = {module for module in in_16_bits if not DECAY.search(module)}
        return replace(self, in_16_bits=frozenset(in_16_bits), quantises_decay=quantises_decay, rules=())

    @property
    def experts_only(self) -> bool:
        """Whether attention's matrices are not quantised."""
        return self.method == MXFP4

    def group_size_of(self, in_features: int) -> int:
        """Inputs that share a scale in a matrix of so many inputs.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        group_size = self.group_size or in_features
        if in_features % group_size:
            raise ValueError(
                f"groups of {group_size} do not divide {in_features} inputs: take a checkpoint with groups of 64 or 32"
            )
        return group_size

    def can_be_divided(self, heads: int, kv_heads: int, ffn: int) -> bool:
        """Whether matrices may be cut to so many outputs of Q, outputs of K and V, and rows of the FFN.

        The first and the last are inputs of other matrices too, and groups of these must stay whole. With act-order
        or one group no rank has whole groups.
        """
        if self.experts_only and self.group_size is not None:  # MXFP4, whose groups are of 32
            return ffn % self.group_size == 0
        unit = CODES_PER_WORD if self.ordered else self.group_size or GROUP_MULTIPLE
        return heads % unit == 0 and ffn % unit == 0 and kv_heads % CODES_PER_WORD == 0

    def describe(self) -> str:
        """For people: ``4-bit GPTQ, groups of 128, act-order``."""
        groups = f"groups of {self.group_size}" if self.group_size else "one group"
        count = len(self.in_16_bits)
        left_out = f", {count} {'matrix' if count == 1 else 'matrices'} in 16 bits" if count else ""
        return f"4-bit {self.method}, {groups}{', act-order' if self.ordered else ''}{left_out}"


class _Unsupported(Exception):
    """What a checkpoint asks for that there is no reader for."""


def _refusal(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: quantised weights with {what} are not supported; {SUPPORTED}")


def _require(given: Mapping[str, Any], name: str, *wanted: Any, default: Any = None) -> None:
    value = given.get(name, default)
    if (value.lower() if isinstance(value, str) else value) not in wanted:
        raise _Unsupported(f"{name}={value!r}")


def _group_size(value: Any) -> int | None:
    return None if value in (None, -1) else int(value)


def _changed(own: Mapping[str, Any], scheme: Mapping[str, Any]) -> str:
    """The first number of a module's ``own`` scheme that is not the common one."""
    return next((f"{name}={own[name]!r}" for name, common in scheme.items() if own.get(name, common) != common), "")


def _awq(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "bits", 4)
    _require(given, "version", "gemm", default="gemm")
    left_out = given.get("modules_to_not_convert") or ()  # parts of names
    rules = tuple(ModuleRule(rf"(?:.*\.)?{re.escape(part)}(?:\.|$)", is_pattern=True) for part in left_out)
    return QuantisationScheme(AWQ, _group_size(given.get("group_size", 128)), rules=rules)


def _gptq(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "bits", 4)
    version = given.get("checkpoint_format") or given.get("format") or "gptq"
    _require({"checkpoint_format": version}, "checkpoint_format", "gptq", "gptq_v2")
    _require(given, "lm_head", False, default=False)
    group_size, ordered = given.get("group_size", 128), bool(given.get("desc_act", False))
    symmetric = bool(given.get("sym", True))
    scheme, rules = {"bits": 4, "group_size": group_size, "desc_act": ordered, "sym": symmetric}, []
    for pattern, own in (given.get("dynamic") or {}).items():
        is_left_out, changed = pattern.startswith("-:"), _changed(own or {}, scheme)
        rules.append(ModuleRule(pattern.removeprefix("-:").removeprefix("+:"), True, is_left_out, changed))
    zero_offset = 0 if version == "gptq_v2" else 1
    return QuantisationScheme(GPTQ, _group_size(group_size), ordered, symmetric, zero_offset, rules=tuple(rules))


def _auto_round(given: Mapping[str, Any]) -> QuantisationScheme:
    """Packed as GPTQ's first version or AWQ."""
    _require(given, "bits", 4)
    _require(given, "data_type", "int", default="int")
    _require(given, "act_bits", 16, 32, default=16)
    packing = given.get("packing_format") or "auto_round:auto_gptq"
    _require({"packing_format": packing}, "packing_format", *(f"auto_round:{name}" for name in PACKINGS))
    group_size, symmetric = given.get("group_size", 128), bool(given.get("sym", True))
    scheme, rules = {"bits": 4, "group_size": group_size, "sym": symmetric, "data_type": "int"}, []
    for name, own in (given.get("extra_config") or {}).items():
        is_pattern, is_left_out = not IN_REGEXES.isdisjoint(name), own.get("bits", 4) >= 16
        pattern = f".*(?:{name})" if is_pattern else name
        rules.append(ModuleRule(pattern, is_pattern, is_left_out, "" if is_left_out else _changed(own, scheme)))
    if PACKINGS[packing.partition(":")[2].lower()] == AWQ:
        return QuantisationScheme(AWQ, _group_size(group_size), rules=tuple(rules))
    return QuantisationScheme(GPTQ, _group_size(group_size), False, symmetric, 1, rules=tuple(rules))


PACKINGS = {"auto_gptq": GPTQ, "gptq": GPTQ, "auto_awq": AWQ, "awq": AWQ}


def _compressed_tensors(given: Mapping[str, Any]) -> QuantisationScheme:
    _require(given, "format", "pack-quantized")
    for name in ("transform_config", "sparsity_config"):
        if given.get(name):
            raise _Unsupported(name)
    groups = list(given.get("config_groups", {}).values())
    schemes = {_compressed_group(group) for group in groups}
    if len(schemes) != 1:
        raise _Unsupported(f"{len(groups)} config_groups")
    left_out = [_in_compressed_tensors(name) for name in given.get("ignore") or ()]
    targets = [target for group in groups for target in group["targets"]]
    if "Linear" not in targets:  # the modules that no target names
        any_target = "|".join(
            f"(?:{rule.name if rule.is_pattern else re.escape(rule.name) + '$'})"
            for rule in map(_in_compressed_tensors, targets)
        )
        left_out.append(ModuleRule(f"(?!{any_target})", is_pattern=True))
    return replace(schemes.pop(), rules=tuple(left_out))


def _in_compressed_tensors(name: str) -> ModuleRule:
    return ModuleRule(name.removeprefix("re:"), is_pattern=name.startswith("re:"))


def _compressed_group(group: Mapping[str, Any]) -> QuantisationScheme:
    _require(group, "format", None, "pack-quantized")
    _require(group, "input_activations", None)
    _require(group, "output_activations", None)
    targets = group.get("targets") or ()
    if not targets or not all(target == "Linear" or target.startswith("re:") or "." in target for target in targets):
        raise _Unsupported(f"targets={group.get('targets')!r}")
    weights = group.get("weights") or {}
    _require(weights, "num_bits", 4)
    _require(weights, "type", "int", default="int")
    _require(weights, "strategy", "group", "channel")
    _require(weights, "actorder", None, False, True, "weight", "static", "group", "dynamic")
    _require(weights, "dynamic", False, default=False)
    return QuantisationScheme(
        COMPRESSED_TENSORS,
        _group_size(weights.get("group_size")) if weights["strategy"] == "group" else None,
        ordered=weights.get("actorder") in ("group", "dynamic", True),
        symmetric=bool(weights.get("symmetric", True)),
    )


def _mxfp4(given: Mapping[str, Any]) -> QuantisationScheme:
    """Attention, routers, embedding and vocabulary are not quantised, as in all checkpoints of gpt-oss."""
    for pattern in given.get("modules_to_not_convert") or ():
        if not pattern.endswith((".self_attn", ".mlp.router", "embed_tokens", "lm_head")):
            raise _Unsupported(f"modules_to_not_convert={pattern!r}")
    return QuantisationScheme(MXFP4, MXFP4_GROUP)
