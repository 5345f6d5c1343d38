"""Reading config.json of Hugging Face folders; each key means what it means in transformers' class.

Nothing here imports jax, so that a plan can be printed without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from curriculum.errors import InputError, shown
from curriculum.model.presets import (
    HOW,
    LARGEST_SIZE,
    ModelConfig,
    ModelSection,
    RopeScaling,
    model_problems,
    resolve_model,
)
from curriculum.parsing.typed import Limits, read

HF_CONFIG = "config.json"
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Defaults of each class for keys that config.json leaves out; a null counts as given.
_COMMON = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None}
_COMMON |= {"max_position_embeddings": 32_768, "rope_theta": 1e4, "sliding_window": None}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _COMMON | {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": _COMMON | {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "smollm3": _COMMON | {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
}
# Config fields that config.json and GGUF record of any model, or that do not affect it: rope with learned positions.
ALWAYS_WRITTEN = (
    *("vocab_size", "num_ids", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_seq_len", "pos_encoding"),
    *("tie_embeddings", "norm_eps", "rope_theta", "rope_scaling", "lora"),
)
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of one formula
_SILU = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SIZE = Annotated[int, Limits(ge=1, le=LARGEST_SIZE)]
_COUNT = Annotated[int, Limits(ge=0, le=LARGEST_SIZE)]
_POSITIVE = Annotated[float, Limits(gt=0, le=sys.float_info.max)]


def read_hf_config(folder: str | os.PathLike) -> ModelConfig:
    """The architecture of a Hugging Face folder, from its config.json; all of its `vocab_size` rows are ids.

    Raises InputError that lists all that this program does not compute as transformers does.
    """
    keys = _Keys(Path(folder) / HF_CONFIG)
    model_type = keys.data.get("model_type")
    if not isinstance(model_type, str) or model_type not in CLASSES:
        raise InputError(
            f"{keys.path}: model_type: got {shown(model_type)}, expected one of: {', '.join(sorted(CLASSES))}"
        )
    if keys.data.get("quantization_config") is not None:
        keys.problem("quantization_config", "the weights are quantised; expected float32, float16 or bfloat16 ones")
    fields = _read_gpt2(keys) if model_type == "gpt2" else _read_llama(keys, model_type)
    if not keys.problems:
        section = ModelSection(**fields)
        for name, message in model_problems(section, fields["vocab_size"]):
            keys.problem("", f"as {name or 'a model'}: {message}")
    if keys.problems:
        raise InputError(*keys.problems)
    return shortest(resolve_model(section, fields["vocab_size"]))


def hf_model_type(folder: str | os.PathLike) -> str:
    """`model_type` of a folder that `read_hf_config` accepts."""
    return _Keys(Path(folder) / HF_CONFIG).data["model_type"]


def architecture_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a `model` section for this architecture, without vocabulary and adapters, as plain JSON."""
    elsewhere = ("vocab_size", "num_ids", "lora", *HOW)
    return {name: value for name, value in asdict(config).items() if name not in elsewhere}


def _read_gpt2(keys: _Keys) -> dict[str, Any]:
    keys.one_of("activation_function", _GELU_TANH, "gelu_new")
    keys.one_of("scale_attn_weights", (True,), True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        keys.one_of(key, (False,), False)
    n_embd, n_head = keys.read("n_embd", _SIZE), keys.read("n_head", _SIZE)
    return {
        "vocab_size": keys.read("vocab_size", _SIZE),
        "n_layer": keys.read("n_layer", _SIZE),
        "n_head": n_head,
        "n_kv_head": n_head,
        "d_model": n_embd,
        "d_ff": keys.read("n_inner", _SIZE | None, None) or 4 * n_embd,
        "max_seq_len": keys.read("n_positions", _SIZE, 1024),
        "pos_encoding": "learned",
        "mlp_type": "gelu",
        "norm_type": "layernorm",
        "bias": True,
        "tie_embeddings": keys.read("tie_word_embeddings", bool, True),
        "norm_eps": keys.read("layer_norm_epsilon", _POSITIVE | None, None) or 1e-5,
    }


def _read_llama(keys: _Keys, model_type: str) -> dict[str, Any]:
    left_out = _LEFT_OUT[model_type]
    keys.one_of("hidden_act", _SILU, "silu")
    n_head = keys.read("num_attention_heads", _SIZE)
    fields = {
        "vocab_size": keys.read("vocab_size", _SIZE),
        "n_layer": keys.read("num_hidden_layers", _SIZE),
        "n_head": n_head,
        "n_kv_head": keys.read("num_key_value_heads", _SIZE | None, left_out["num_key_value_heads"]) or n_head,
        "d_model": keys.read("hidden_size", _SIZE),
        "d_ff": keys.read("intermediate_size", _SIZE),
        "max_seq_len": keys.read("max_position_embeddings", _SIZE, left_out["max_position_embeddings"]),
        "tie_embeddings": keys.read("tie_word_embeddings", bool, left_out["tie_word_embeddings"]),
        "norm_eps": keys.read("rms_norm_eps", _POSITIVE | None, None) or left_out["rms_norm_eps"],
        "d_head": keys.read("head_dim", _SIZE | None, left_out["head_dim"]),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
        "sliding_window": _sliding_window(keys, model_type),
    }
    theta, fields["rope_scaling"] = _rope(keys, left_out["rope_theta"], fields["max_seq_len"])
    fields["rope_theta"] = theta
    if model_type in ("llama", "qwen3", "smollm3"):
        has_mlp_bias = model_type != "qwen3" and keys.read("mlp_bias", bool, False)
        has_attention_bias = keys.read("attention_bias", bool, False)
        fields["bias"] = has_attention_bias and has_mlp_bias
        fields["qkv_bias"] = has_attention_bias and not has_mlp_bias
        if has_mlp_bias and not has_attention_bias:
            keys.problem("mlp_bias", "got true with attention_bias false; expected biases in both, or in neither")
    if model_type == "smollm3":
        fields["no_rope_every"] = _no_rope_every(keys, fields["n_layer"])
    return fields


def _rope(keys: _Keys, theta: float, max_seq_len: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` or, as before transformers 5, from `rope_theta` and `rope_scaling`."""
    name = next((key for key in ("rope_scaling", "rope_parameters") if keys.data.get(key)), "rope_parameters")
    inner = keys.data.get(name) or {}
    if not isinstance(inner, dict):
        keys.problem(name, f"got {type(inner).__name__}, expected a mapping")
        inner = {}
    rope = _Keys(keys.path, inner, f"{name}.", keys.problems)
    outer_theta = keys.read("rope_theta", _POSITIVE | None, None)
    theta = rope.read("rope_theta", _POSITIVE | None, None) or outer_theta or theta
    for place in (keys, rope):
        place.one_of("partial_rotary_factor", (None, 1.0), None)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        if nested := [key for key, value in inner.items() if isinstance(value, dict)]:
            keys.problem(name, f"got one for each of: {', '.join(nested)}; expected one for all layers")
        return theta, None
    if kind not in ("linear", "llama3"):
        rope.problem("rope_type", f"got {shown(kind)}, expected default, linear or llama3")
        return theta, None
    scaling: dict[str, Any] = {"kind": kind, "factor": rope.read("factor", _POSITIVE)}
    if kind == "llama3":
        before = keys.read("original_max_position_embeddings", _SIZE | None, None)
        scaling["original_max_seq_len"] = before or rope.read("original_max_position_embeddings", _SIZE, max_seq_len)
        scaling["low_freq_factor"] = rope.read("low_freq_factor", _POSITIVE)
        scaling["high_freq_factor"] = rope.read("high_freq_factor", _POSITIVE)
    if scaling["factor"] < 1:
        rope.problem("factor", f"got {scaling['factor']}, expected 1 or more")
    if rope.problems:
        return theta, None
    try:
        return theta, RopeScaling(**scaling)
    except ValueError as error:
        keys.problem(name, str(error))
        return theta, None


def _sliding_window(keys: _Keys, model_type: str) -> int | None:
    """How many tokens each token attends to, the same in every layer; None: all."""
    if model_type == "llama":
        return None
    window = keys.read("sliding_window", _SIZE | None, _LEFT_OUT[model_type]["sliding_window"])
    kinds = keys.data.get("layer_types")
    if model_type == "mistral" and kinds is None:  # with layer_types it is Ministral to transformers
        return window
    if model_type != "mistral" and not keys.read("use_sliding_window", bool, False):
        window = None
    num_layers = keys.read("num_hidden_layers", _SIZE)
    if kinds is None and model_type == "smollm3":
        slides = [window is not None and not has_rope for has_rope in _ropes(keys, num_layers)]
    elif kinds is None:
        first = keys.read("max_window_layers", _COUNT | None if window is None else _COUNT, 28)
        slides = [window is not None and layer >= first for layer in range(num_layers)]
    elif not isinstance(kinds, list) or len(kinds) < num_layers or not all(kind in _LAYER_TYPES for kind in kinds):
        expected = f"expected full_attention and sliding_attention only, for each of {num_layers} layers"
        keys.problem("layer_types", f"got {shown(kinds)}, {expected}")
        return None
    else:
        slides = [kind == "sliding_attention" for kind in kinds[:num_layers]]
    if not any(slides):
        return None
    if not all(slides):
        got = f"{sum(slides)} of {len(slides)} layers see {window} tokens and the others all"
        keys.problem("layer_types" if kinds is not None else "use_sliding_window", f"{got}; expected all layers alike")
    elif window is None:
        keys.problem(
            "sliding_window", "missing, though layer_types has sliding_attention; expected the window in tokens"
        )
    return window


def _ropes(keys: _Keys, num_layers: int) -> list[bool]:
    given = keys.data.get("no_rope_layers")
    if given is None:
        every = keys.read("no_rope_layer_interval", _SIZE, 4)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or not all(one in (0, 1) for one in given):
        keys.problem("no_rope_layers", f"got {shown(given)}, expected a 1 or a 0 for each of {num_layers} layers")
        return [True] * num_layers
    return [one == 1 for one in given[:num_layers]]


def _no_rope_every(keys: _Keys, num_layers: int) -> int | None:
    has_rope = _ropes(keys, num_layers)
    if all(has_rope):
        return None
    every = has_rope.index(False) + 1
    if has_rope != [(layer + 1) % every != 0 for layer in range(num_layers)]:
        without = [layer for layer, rope in enumerate(has_rope) if not rope]
        keys.problem("no_rope_layers", f"none in layers {without}; expected every n-th layer without rope")
    return every


def shortest(config: ModelConfig) -> ModelConfig:
    """The same config, without `d_head` if it is d_model / n_head."""
    follows = config.d_head is not None and config.d_head * config.n_head == config.d_model
    return replace(config, d_head=None) if follows else config


class _Keys:
    """Keys of a JSON file, read by type; what does not fit is recorded as a problem."""

    def __init__(self, path: Path, data: dict[str, Any] | None = None, prefix: str = "", problems: list | None = None):
        self.path, self.prefix = path, prefix
        self.problems: list[str] = [] if problems is None else problems
        self.data = _read_object(path) if data is None else data

    def problem(self, key: str, message: str) -> None:
        line = f"{self.path}: {self.prefix}{key}: {message}" if key else f"{self.path}: {message}"
        if line not in self.problems:
            self.problems.append(line)

    def read(self, key: str, kind: Any, *default: Any) -> Any:
        """The value of a key as `parsing.typed` reads `kind`, or the default if it is left out.

        The default, or else 1, stands for what does not fit, so that reading can go on.
        """
        value = default[0] if default else 1
        if key in self.data:
            found = read(kind, self.data[key], "", wrong := [])
            for _, message in wrong:
                self.problem(key, message)
            return value if wrong else found
        if not default:
            self.problem(key, "missing; this key is needed")
        return value

    def one_of(self, key: str, options: Sequence[Any], default: Any) -> None:
        value = self.data.get(key, default)
        if value not in options:
            self.problem(key, f"got {shown(value)}, expected {' or '.join(shown(o) for o in options)}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; expected the config.json of a Hugging Face folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; copy the folder again") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: got {type(data).__name__}, expected a JSON object")
    return data
