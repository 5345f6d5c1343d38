"""Parameters in Hugging Face folders: transformers' names and layout, and reading them onto a mesh.

Only `load_hf` imports jax: a folder can be checked without it.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from curriculum.errors import InputError
from curriculum.model.formats.hf_weights import FLOATS, StoredTensor, equal_bytes, stored_tensors
from curriculum.model.presets import ModelConfig

if TYPE_CHECKING:
    from curriculum.model.model import Params

# Buffers that older versions saved beside the weights: masks and rope frequencies, which follow from the config.
_BUFFERS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_OUT_WEIGHT, _OUT_BIAS = "self_attn.o_proj.weight", "self_attn.o_proj.bias"
_TILE = 256
_UNALIGNED_BYTES = 16


@dataclass(frozen=True)
class HfTensor:
    """One tensor of transformers: our parameters concatenated along the last axis, then `transposed` or not."""

    name: str
    shape: tuple[int, ...]
    parameters: tuple[str, ...]
    transposed: bool = False


def hf_layout(config: ModelConfig) -> list[HfTensor]:
    """The tensors of transformers' class for `config`, in its order, without the rows that pad the vocabulary."""
    num_ids, width = config.num_ids or config.vocab_size, config.d_model
    learned = config.pos_encoding == "learned"
    block = _gpt2_block if learned else _llama_block
    embed, norm = ("transformer.wte", "transformer.ln_f") if learned else ("model.embed_tokens", "model.norm")
    tensors = [HfTensor(f"{embed}.weight", (num_ids, width), ("embed.embedding",))]
    if learned:
        tensors.append(HfTensor("transformer.wpe.weight", (config.max_seq_len, width), ("positions.embedding",)))
    for layer in range(config.n_layer):
        tensors += block(config, layer)
    tensors += _norm(config, norm, "norm")
    if not config.tie_embeddings:
        tensors.append(HfTensor("lm_head.weight", (num_ids, width), ("head.kernel",), transposed=True))
    return tensors


def _llama_block(config: ModelConfig, layer: int) -> Iterator[HfTensor]:
    theirs, ours = f"model.layers.{layer}", f"blocks.{layer:03}"
    shapes = config.projections()

    def linear(their_name: str, part: str, our_name: str, bias: bool) -> Iterator[HfTensor]:
        names = f"{theirs}.{their_name}", f"{ours}.{part}.{our_name}"
        inputs, outputs = shapes[our_name]
        yield HfTensor(f"{names[0]}.weight", (outputs, inputs), (f"{names[1]}.kernel",), transposed=True)
        if bias:
            yield HfTensor(f"{names[0]}.bias", (outputs,), (f"{names[1]}.bias",))

    qkv_bias = config.bias or config.qkv_bias
    yield from _norm(config, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    yield from linear("self_attn.q_proj", "attention", "query", qkv_bias)
    yield from linear("self_attn.k_proj", "attention", "key", qkv_bias)
    yield from linear("self_attn.v_proj", "attention", "value", qkv_bias)
    yield from linear("self_attn.o_proj", "attention", "out", config.bias)
    if config.qk_norm:
        for their_name, our_name in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            scale = f"{ours}.attention.{our_name}.scale"
            yield HfTensor(f"{theirs}.self_attn.{their_name}.weight", (config.head_width,), (scale,))
    yield from _norm(config, f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
    yield from linear("mlp.gate_proj", "mlp", "gate", config.bias)
    yield from linear("mlp.up_proj", "mlp", "up", config.bias)
    yield from linear("mlp.down_proj", "mlp", "down", config.bias)


def _gpt2_block(config: ModelConfig, layer: int) -> Iterator[HfTensor]:
    """GPT-2's linear layers keep their weights as [in, out], as here; query, key and value are one tensor."""
    theirs, ours = f"transformer.h.{layer}", f"blocks.{layer:03}"
    shapes = config.projections()

    def linear(their_name: str, part: str, *our_names: str) -> Iterator[HfTensor]:
        inputs, outputs = shapes[our_names[0]][0], sum(shapes[name][1] for name in our_names)
        for what, leaf, shape in (("weight", "kernel", (inputs, outputs)), ("bias", "bias", (outputs,))):
            parameters = tuple(f"{ours}.{part}.{name}.{leaf}" for name in our_names)
            yield HfTensor(f"{theirs}.{their_name}.{what}", shape, parameters)

    yield from _norm(config, f"{theirs}.ln_1", f"{ours}.attention_norm")
    yield from linear("attn.c_attn", "attention", "query", "key", "value")
    yield from linear("attn.c_proj", "attention", "out")
    yield from _norm(config, f"{theirs}.ln_2", f"{ours}.mlp_norm")
    yield from linear("mlp.c_fc", "mlp", "up")
    yield from linear("mlp.c_proj", "mlp", "down")


def _norm(config: ModelConfig, theirs: str, ours: str) -> Iterator[HfTensor]:
    yield HfTensor(f"{theirs}.weight", (config.d_model,), (f"{ours}.scale",))
    if config.norm_type == "layernorm":
        yield HfTensor(f"{theirs}.bias", (config.d_model,), (f"{ours}.bias",))


def hf_tensors(
    config: ModelConfig, arrays: Mapping[str, np.ndarray], out_bias: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each tensor of transformers, from parameters by our names, in their own type.

    Rows that pad the vocabulary are cut off. `out_bias` adds a bias of 0 to each output projection of attention. A
    generator, so that a writer need not hold all tensors.
    """
    for tensor in hf_layout(config):
        parts = [np.asarray(arrays[name]) for name in tensor.parameters]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        array = array.T if tensor.transposed else array
        yield tensor.name, np.ascontiguousarray(array[: tensor.shape[0]])
        if out_bias and tensor.name.endswith(_OUT_WEIGHT):
            yield tensor.name.removesuffix("weight") + "bias", np.zeros(tensor.shape[0], array.dtype)


def checked_tensors(folder: str | os.PathLike, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a folder that `config` needs, by transformers' names.

    Only headers are read, and for a tied model its head, if it is stored. Raises InputError that lists missing tensors,
    extra ones, and those of another shape or type. Masks and rope frequencies that older versions saved are ignored,
    and so are the head of a tied model if it equals the embedding, and biases of attention's output that are 0 where
    query, key and value have one.
    """
    stored = _full_names(stored_tensors(folder), config)
    layout = {tensor.name: tensor for tensor in hf_layout(config)}
    problems = [problem for name in layout if (problem := _wrong(stored.get(name), layout[name]))]
    embedding = next(iter(layout))
    for name, found in stored.items():
        if name in layout or _BUFFERS.search(name):
            continue
        if name.endswith(_OUT_BIAS) and config.qkv_bias and found.dtype in FLOATS:
            if found.map().any():
                problems.append(f"{name}: is not 0; expected one only where feed-forward has biases too")
        elif name == "lm_head.weight":  # of a tied model
            if embedding not in stored or not equal_bytes(found, stored[embedding]):
                problems.append(f"{name}: differs from {embedding}, though config.json says tie_word_embeddings")
        else:
            problems.append(f"{name}: got {list(found.shape)}, expected no such tensor")
    if problems:
        raise InputError(*(f"{folder}: {problem}" for problem in problems))
    return {name: stored[name] for name in layout}


def _wrong(found: StoredTensor | None, wanted: HfTensor) -> str | None:
    """What is wrong with a tensor that a model needs, None if nothing is."""
    if found is None:
        return f"{wanted.name}: is missing, expected {list(wanted.shape)}"
    if found.shape != wanted.shape:
        return f"{wanted.name}: got {list(found.shape)}, expected {list(wanted.shape)}"
    if found.dtype not in FLOATS:
        return f"{wanted.name}: got {found.dtype}, expected {', '.join(FLOATS)}"
    return None


def _full_names(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors by their names in the class with a head; that without one leaves out a prefix, as early GPT-2 did."""
    prefix = hf_layout(config)[0].name.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in stored):
        return dict(stored)
    return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in stored.items()}


def load_hf(folder: str | os.PathLike, config: ModelConfig, like: Params) -> Params:
    """The parameters of a folder as float32, each with the sharding of its jax.ShapeDtypeStruct in `like`.

    Arrays are mapped, transposed and placed one at a time. Rows that pad the vocabulary (from `config.num_ids` on) are
    zeros. Raises InputError as `checked_tensors` does, and for a tensor that is not finite.
    """
    import jax

    from curriculum.model.model import parameter_name

    stored = checked_tensors(folder, config)
    places = {name: (tensor, part) for tensor in hf_layout(config) for part, name in enumerate(tensor.parameters)}

    def placed(path: tuple, array: jax.ShapeDtypeStruct) -> jax.Array:
        tensor, part = places[parameter_name(path)]
        source = stored[tensor.name].map()
        source = source.T if tensor.transposed else source
        first = part * (source.shape[-1] // len(tensor.parameters))
        sums: list[np.float64] = []

        def cut(index: tuple[slice, ...]) -> np.ndarray:
            found = _cut(source, first, array.shape, index)
            with np.errstate(invalid="ignore"):
                sums.append(found.sum(dtype=np.float64))
            return found

        whole = jax.block_until_ready(jax.make_array_from_callback(array.shape, array.sharding, cut))
        if not np.isfinite(sums).all():
            file = stored[tensor.name].file
            raise InputError(f"{file}: {tensor.name} holds infinities or NaN; copy the folder again, or use another")
        return whole

    return jax.tree.map_with_path(placed, like)


def _cut(source: np.ndarray, first: int, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """Part `index`, in float32, of an array that begins at `first` on the source's last axis; zeros beyond it."""
    spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    wanted: Any = [slice(start, stop) for start, stop in spans]
    wanted[-1] = slice(spans[-1][0] + first, spans[-1][1] + first)
    part = source[tuple(wanted)]
    cut = _zeros([stop - start for start, stop in spans])
    if part.ndim < 2:
        cut[: part.size] = part
        return cut
    for i in range(0, part.shape[0], _TILE):  # transposing is twice as fast in tiles that fit the cache
        for j in range(0, part.shape[1], _TILE):
            tile = part[i : i + _TILE, j : j + _TILE]
            cut[i : i + tile.shape[0], j : j + tile.shape[1]] = tile
    return cut


def _zeros(shape: Sequence[int]) -> np.ndarray:
    """Float32 zeros in memory that is freed to the system at once, whatever malloc was told to keep (train.device).

    Not aligned as XLA's own arrays are: XLA would use aligned memory as its array without a copy, and could not reuse
    it when donated.
    """
    memory = mmap.mmap(-1, _UNALIGNED_BYTES + 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.float32, offset=_UNALIGNED_BYTES).reshape(shape)
