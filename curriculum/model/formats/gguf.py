"""A model and its tokenizer as one GGUF file, which llama.cpp and transformers read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from curriculum.data.tokenizers.gguf_vocabulary import gguf_vocabulary
from curriculum.errors import InputError, shown
from curriculum.model.formats.hf_config import ALWAYS_WRITTEN, shortest
from curriculum.model.formats.safetensors_writer import check_rounded
from curriculum.model.presets import ModelConfig
from curriculum.model.rope import unscaled_share

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

    from curriculum.data.chat import Template
    from curriculum.data.tokenizers.tokenizer import Tokenizer

Dtype = Literal["f32", "f16", "bf16", "q8_0"]

BLOCK = 32  # numbers that share a scale in q8_0

_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}  # general.file_type
_PARTS = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}

# Config fields beside ALWAYS_WRITTEN that a file records, by architecture; gpt2's bias covers query, key and value. A
# field that is not recorded must have its default.
_WRITTEN_OF = {
    "gpt2": ("qkv_bias", "no_rope_every"),
    "llama": ("bias", "qkv_bias", "d_head"),
    "qwen2": ("qkv_bias",),
    "qwen3": ("qk_norm", "d_head"),
    "smollm3": ("no_rope_every", "d_head"),
}


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first
    sources: tuple[str, ...]  # our names; several are concatenated along the rows


def write_gguf(
    path: str | os.PathLike,
    config: ModelConfig,
    arrays: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    dtype: Dtype,
    name: str,
    template: Template | None = None,
    metadata: Mapping[str, str | bool | int | float] | None = None,
) -> tuple[str, ...]:
    """Write one file; return the names of the matrices stored as f16 because q8_0 does not fit their rows.

    `arrays` are the float32 parameters by our dotted names, read one after the other. `dtype` is that of the matrices;
    norms, biases and learned positions are f32. With q8_0, a matrix whose row length is not a multiple of 32 is f16.
    Rows past `num_ids` are left out, and ids past the tokenizer's are unused tokens. `template` is as in
    `gguf_vocabulary`. `metadata`: further keys by their full names, such as general.license.

    Raises InputError that lists the fields that no architecture of llama.cpp combines, for a tokenizer that llama.cpp
    does not support (`gguf_vocabulary`), and for a value too large for the dtype; OSError if the file cannot be
    written.
    """
    import gguf

    architecture = gguf_architecture(config)
    num_rows = config.num_ids or config.vocab_size
    vocabulary = gguf_vocabulary(tokenizer, num_rows, template)
    tensors = list(_layout(architecture, arrays, num_rows))

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[dtype])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, architecture, config, num_rows)
    for method, setting in vocabulary.items():
        getattr(writer, f"add_{method}")(setting)
    for key, setting in (metadata or {}).items():
        writer.add_key_value(key, setting, gguf.GGUFValueType.get_type(setting))

    types = {tensor.name: _stored_type(tensor, dtype) for tensor in tensors}
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        block, num_bytes = gguf.GGML_QUANT_SIZES[types[tensor.name]]
        size = int(np.prod(tensor.shape)) // block * num_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, types[tensor.name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in tensors:
            found = _value(tensor, architecture, config, arrays)
            writer.write_tensor_data(_stored(tensor, found, types[tensor.name], dtype))
    finally:
        writer.close()
    if dtype != "q8_0":
        return ()
    return tuple(tensor.name for tensor in tensors if types[tensor.name] == gguf.GGMLQuantizationType.F16)


def gguf_architecture(config: ModelConfig) -> str:
    """llama.cpp's name for a model's architecture. Raises InputError that lists the fields that it does not support."""
    if config.pos_encoding == "learned":
        wanted = {"mlp_type": "gelu", "norm_type": "layernorm", "bias": True, "n_kv_head": config.n_head}
        return _checked("gpt2", config, wanted)
    wanted = {"mlp_type": "swiglu", "norm_type": "rmsnorm"}
    if config.qk_norm:
        return _checked("qwen3", config, wanted)
    if config.no_rope_every is not None:
        return _checked("smollm3", config, wanted | {"no_rope_every": 4})
    if config.qkv_bias and not config.bias:
        return _checked("qwen2", config, wanted)
    return _checked("llama", config, wanted)


def fields_for_transformers(config: ModelConfig) -> dict[str, int] | None:
    """What the config of transformers has to be given beside a model's file; None if transformers cannot read the file.

    Of gpt2 and qwen3 its reader takes these for those of the published models. It reads no scaling of rope, no biases
    of llama, and no smollm3.
    """
    architecture, config = gguf_architecture(config), shortest(config)
    if architecture == "smollm3" or config.rope_scaling is not None or (architecture == "llama" and config.bias):
        return None
    match architecture:
        case "gpt2":
            return {"n_positions": config.max_seq_len, "n_inner": config.d_ff}
        case "qwen3":
            return {"head_dim": config.head_width}
    return {}


def _checked(architecture: str, config: ModelConfig, wanted: dict[str, Any]) -> str:
    """`architecture`, if it computes the config's model; otherwise raises InputError.

    `wanted`: the fields that it fixes. Every other field that its file does not record must have its default.
    """
    config = shortest(config)
    wanted = config.defaults_beside((*ALWAYS_WRITTEN, *_WRITTEN_OF[architecture])) | wanted
    found = {field: getattr(config, field) for field in wanted}
    if config.sliding_window is not None and config.sliding_window >= config.max_seq_len:
        found["sliding_window"] = None  # it never cuts anything off
    unlike = {field: setting for field, setting in wanted.items() if found[field] != setting}
    problems = [
        f"model.{field}: got {shown(found[field])}, expected {shown(setting)} for {architecture}, llama.cpp's closest "
        "architecture"
        for field, setting in unlike.items()
    ]
    if architecture != "llama" and config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        problems.append(f"model.rope_scaling: got kind llama3, which llama.cpp's {architecture} does not have")
    if problems:
        raise InputError(*(f"{problem}; export it in another format" for problem in problems))
    return architecture


def _layout(architecture: str, arrays: Mapping[str, np.ndarray], num_rows: int) -> Iterator[_Tensor]:
    """The tensors of the file, in the order of `arrays`; gpt2 has query, key and value fused."""
    fused = architecture == "gpt2"
    for source in arrays:
        *module, leaf = source.split(".")
        layer = f"blk.{int(module[1])}." if module[0] == "blocks" else ""
        part = ".".join(module[2:] if layer else module)
        shape = arrays[source].shape
        shape = shape[::-1] if leaf == "kernel" else shape
        if part in ("embed", "head"):
            shape = (num_rows, *shape[1:])
        if fused and part in ("attention.key", "attention.value"):
            continue
        if fused and part == "attention.query":
            sources = tuple(source.replace("query", other) for other in ("query", "key", "value"))
            yield _Tensor(f"{layer}attn_qkv.{_LEAVES[leaf]}", (3 * shape[0], *shape[1:]), sources)
            continue
        yield _Tensor(f"{layer}{_PARTS[part]}.{_LEAVES[leaf]}", shape, (source,))


def _value(tensor: _Tensor, architecture: str, config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    found = []
    for source in tensor.sources:
        array = np.asarray(arrays[source], np.float32)
        array = array.T if source.endswith(".kernel") else array
        # Rope in these two rotates neighbouring pairs; ours pairs the first half of a head with its second.
        if architecture in ("llama", "smollm3") and ".attention.query." in source:
            array = _interleaved(array, config.n_head)
        if architecture in ("llama", "smollm3") and ".attention.key." in source:
            array = _interleaved(array, config.n_kv_head)
        found.append(array)
    whole = found[0] if len(found) == 1 else np.concatenate(found)
    return np.ascontiguousarray(whole[: tensor.shape[0]])  # without the rows that pad the vocabulary


def _interleaved(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head in the order 0, K/2, 1, K/2 + 1, ..."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _stored_type(tensor: _Tensor, dtype: Dtype) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType as Type

    if len(tensor.shape) == 1 or tensor.name == "position_embd.weight":
        return Type.F32
    if dtype == "q8_0" and tensor.shape[-1] % BLOCK:
        return Type.F16
    return Type[dtype.upper()]


def _stored(tensor: _Tensor, array: np.ndarray, stored_type: GGMLQuantizationType, dtype: Dtype) -> np.ndarray:
    import gguf

    with np.errstate(over="ignore", invalid="ignore"):
        stored = gguf.quantize(array, stored_type)
        back = gguf.dequantize(stored, stored_type).reshape(array.shape)
    check_rounded(tensor.name, array, back, dtype, _FILE_TYPES)
    return stored


def _rope_factors(config: ModelConfig) -> np.ndarray | None:
    """How many times longer rope scaling makes each wavelength, float32 [K / 2]; None for kinds other than llama3."""
    scaling = config.rope_scaling
    if config.pos_encoding != "rope" or scaling is None or scaling.kind != "llama3":
        return None
    kept_K = unscaled_share(config.head_width, config.rope_theta, scaling)
    return (1 / (kept_K + (1 - kept_K) / scaling.factor)).astype(np.float32)


def _add_shape(writer: GGUFWriter, architecture: str, config: ModelConfig, num_rows: int) -> None:
    from gguf import RopeScalingType

    writer.add_vocab_size(num_rows)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_head)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
