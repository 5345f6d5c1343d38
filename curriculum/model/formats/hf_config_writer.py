"""Writing config.json of a Hugging Face folder, for the transformers class that computes a model."""

from collections.abc import Mapping
from typing import Any

from curriculum.errors import InputError, shown
from curriculum.model.formats.hf_config import ALWAYS_WRITTEN, CLASSES, shortest
from curriculum.model.presets import ModelConfig

# Config fields that config.json and the tensors record, or that do not affect the model: qkv_bias with a bias, which
# covers it. A field that is not recorded must have its default.
_WRITTEN = (*ALWAYS_WRITTEN, "no_rope_every", "qkv_bias")
_WRITTEN_WITH_ROPE = (*_WRITTEN, "bias", "d_head", "qk_norm", "sliding_window")
_HAVE_ATTENTION_BIAS = ("llama", "qwen3", "smollm3")


def hf_config_of(
    config: ModelConfig,
    *,
    bos: int | None,
    eos: int | list[int] | None,
    dtype: str = "float32",
    qwen_tokenizer: bool = True,
) -> dict[str, Any]:
    """config.json for the transformers class that computes this model. `dtype`: float32, float16 or bfloat16.

    qwen_tokenizer: whether Qwen2 may be the class. For its model_type transformers 5 builds Qwen's tokenizer anew,
    whatever tokenizer.json and tokenizer_class say. Other tokenizers need a class whose biases are those of query, key,
    value and output; the last is then 0 (see `needs_out_bias`).

    A padded vocabulary is written without its padding. Rope is written twice, for transformers 5 and for earlier
    versions. Raises InputError that names the fields if no class has their combination.
    """
    model_type = _class_for(config, qwen_tokenizer)
    common = {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": config.num_ids or config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model_type == "gpt2":
        return common | {
            "n_embd": config.d_model,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": config.d_ff,
            "n_positions": config.max_seq_len,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": 0.0,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
        }
    written = common | {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_width,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        **_written_rope(config),
    }
    if model_type in _HAVE_ATTENTION_BIAS:
        written["attention_bias"] = config.bias or config.qkv_bias
    if model_type in ("llama", "smollm3"):
        written["mlp_bias"] = config.bias
    if model_type != "llama":
        written["sliding_window"] = config.sliding_window
    slides = config.sliding_window is not None
    if model_type in ("qwen2", "qwen3", "smollm3"):
        written["use_sliding_window"] = slides
        written["layer_types"] = ["sliding_attention" if slides else "full_attention"] * config.n_layer
    if model_type in ("qwen2", "qwen3"):
        written["max_window_layers"] = 0 if slides else config.n_layer
    if model_type == "smollm3":
        written["no_rope_layers"] = [int(config.has_rope(layer)) for layer in range(config.n_layer)]
        written["no_rope_layer_interval"] = config.no_rope_every or config.n_layer + 1
        written["pad_token_id"] = None  # the class has one of its own, of another vocabulary
    return written


def needs_out_bias(config: ModelConfig, hf_config: Mapping[str, Any]) -> bool:
    """Whether the class of `hf_config` has a bias of attention's output that the model has not; it is written as 0."""
    return config.qkv_bias and not config.bias and hf_config["model_type"] in _HAVE_ATTENTION_BIAS


def _written_rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        default = {"rope_type": "default", "rope_theta": config.rope_theta}
        return {"rope_theta": config.rope_theta, "rope_parameters": default}
    stretched: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        stretched |= {
            "original_max_position_embeddings": scaling.original_max_seq_len,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    parameters = stretched | {"rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta, "rope_scaling": stretched, "rope_parameters": parameters}


def _class_for(config: ModelConfig, qwen_tokenizer: bool) -> str:
    """The model_type that computes a model; Mistral and SmolLM3 are chosen only for what Llama cannot do."""
    config = shortest(config)
    if config.pos_encoding == "learned":
        wanted = {"mlp_type": "gelu", "norm_type": "layernorm", "bias": True, "n_kv_head": config.n_head}
        wanted = config.defaults_beside(_WRITTEN) | wanted
        _refuse_unlike(config, wanted, "GPT-2, the class with learned positions,")
        return "gpt2"
    wanted = config.defaults_beside(_WRITTEN_WITH_ROPE) | {"mlp_type": "swiglu", "norm_type": "rmsnorm"}
    _refuse_unlike(config, wanted, "the Llama family, the classes with rope,")
    if config.qk_norm:
        _refuse_unlike(config, {"bias": False, "no_rope_every": None}, "Qwen3, the class with qk_norm,")
        return "qwen3"
    if config.qkv_bias and not config.bias and config.no_rope_every is None and qwen_tokenizer:
        return "qwen2"
    odd_width = config.d_model % config.n_head != 0  # Llama's class refuses that, whatever the width of a head
    has_bias = config.bias or config.qkv_bias
    if config.no_rope_every is not None or (has_bias and (config.sliding_window is not None or odd_width)):
        return "smollm3"
    return "mistral" if config.sliding_window is not None or odd_width else "llama"


def _refuse_unlike(config: ModelConfig, wanted: Mapping[str, Any], who: str) -> None:
    problems = []
    for name, its in wanted.items():
        if (ours := getattr(config, name)) != its:
            got, expected = (shown(value) for value in (ours, its))
            expected = "none" if its is None else expected
            problems.append(f"model.{name}: got {got}, but {who} has {expected}; no class has both")
    if problems:
        raise InputError(*problems)
