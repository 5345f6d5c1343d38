"""A decoder-only transformer as pure functions over a plain dict, which run the modules of `curriculum.model.modules`.

The modules are built once, abstractly, for the graph and the shapes. From then on the model is a nested dict of float32
arrays, which goes through jit, optax and checkpoints without any of them knowing flax.

Inside, the tokens are the rows of one matrix, `x_MD`: the gradient of a weight is then one plain product, while with a
third axis XLA would copy a transposed cotangent for each weight. `curriculum.model.formulation` chooses how attention
and layers are computed.

Shape suffixes: B rows, T positions, M = B*T tokens, D width, V vocabulary, H heads, K head width; H = J*G heads in J
groups that share keys and values, P = B*J such groups in a batch, Q = G*T queries of a group; S positions attended to:
those of the batch up to the end of a block of queries or, in generation, all that the cache has room for.
"""

import hashlib
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from curriculum.errors import InputError
from curriculum.model.formulation import backend
from curriculum.model.lora import adapters_of
from curriculum.model.model import Model, Placement
from curriculum.model.modules import Block, Cache, Transformer
from curriculum.model.presets import ModelConfig

_HERE = Placement()


def transformer(config: ModelConfig, placement: Placement = _HERE) -> Model:
    """The transformer of a config, as the trainer takes it. Raises InputError if the backend cannot compute it."""
    if config.attention == "cudnn" and backend() != "gpu":
        expected = "expected an NVIDIA GPU, or auto"
        raise InputError(f"model.attention: got cudnn with jax backend {jax.default_backend()}, {expected}")
    return Model(
        init=partial(init_params, config),
        forward=partial(forward, config, placement=placement),
        head=lambda params: head(_without_blocks(params, placement)),
        empty_cache=partial(empty_cache, config),
        extend=lambda params, cache, tokens_BT, starts_B, _: extend(
            config, params, cache, tokens_BT, starts_B, placement
        ),
        max_seq_len=config.max_seq_len,
        architecture=config.architecture,
        num_ids=config.num_ids,
        shapes=lambda: _blueprint(config)[2],
        placed=partial(transformer, config),
    )


def init_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Float32 arrays on the host, as a nested dict keyed by the names of the modules.

    As in GPT-2, weights are normal with a standard deviation of 0.02, divided by sqrt(2 n_layer) for projections into
    the residual stream; biases are 0, norm scales 1. As in peft, an adapter's A is uniform within 1 / sqrt(inputs) of
    0, and its B is 0. An array depends only on the seed, its name and its shape.
    """
    return _drawn(config, seed, _blueprint(config)[2])


def init_adapters(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Only the adapters of `init_params`; the parameters beside them are not drawn."""
    return _drawn(config, seed, adapters_of(_blueprint(config)[2]))


def _drawn(config: ModelConfig, seed: int, shapes: dict[str, Any]) -> dict[str, Any]:
    residual_std = 0.02 / (2 * config.n_layer) ** 0.5

    def draw(path: tuple, array: jax.ShapeDtypeStruct) -> np.ndarray:
        *_, module, name = names = [part.key for part in path]
        if name in ("scale", "bias", "lora_b"):
            return np.full(array.shape, name == "scale", np.float32)
        key = hashlib.blake2b(f"{seed}/{'/'.join(names)}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        if name == "lora_a":
            return (2 * random.random(array.shape, np.float32) - 1) / np.float32(array.shape[0] ** 0.5)
        std = residual_std if module in ("out", "down") else 0.02
        return random.standard_normal(array.shape, np.float32) * np.float32(std)

    return jax.tree.map_with_path(draw, shapes)


def forward(
    config: ModelConfig,
    params: dict[str, Any],
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    keys_B: jax.Array | None = None,
    *,
    placement: Placement = _HERE,
) -> jax.Array:
    """features_BTD in compute_dtype, to be multiplied by `head`; pure and jittable, `config` static.

    Position t attends to tokens 0..t of its row. With `segment_ids_BT` (neighbours of equal id are one document) it
    attends only to its own document, whose positions count from 0. `keys_B`, one random key per row, are for dropout;
    without them there is none. Raises ValueError if T is above max_seq_len.
    """
    num_positions = tokens_BT.shape[1]
    if num_positions > config.max_seq_len:
        raise ValueError(f"got {num_positions} positions, expected at most max_seq_len {config.max_seq_len}")
    return _run(config, params, placement, tokens_BT, segment_ids_BT, keys_B)[0]


def empty_cache(config: ModelConfig, num_rows: int, num_positions: int) -> Cache:
    """Room for the keys and values of `num_positions` tokens of each row."""
    shape = (num_rows, config.n_kv_head, num_positions, config.head_width)
    return {
        f"{layer:03}": (jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype))
        for layer in range(config.n_layer)
    }


def extend(
    config: ModelConfig,
    params: dict[str, Any],
    cache: Cache,
    tokens_BT: jax.Array,
    starts_B: jax.Array,
    placement: Placement = _HERE,
) -> tuple[jax.Array, Cache]:
    """(features_BTD, the cache with these tokens): the features are those of `forward` after the tokens in the cache.

    Token t of row b is at position starts_B[b] + t, for which the cache must have room; what the cache holds from there
    on is overwritten. So a row may end in any padding: no token before it sees it, and the next tokens overwrite it.
    """
    return _run(config, params, placement, tokens_BT, None, None, starts_B, cache)


def head(params: dict[str, Any]) -> jax.Array:
    """kernel_VD of the output layer: logits are features @ kernel.T. The embedding if the two are tied."""
    return params["head"]["kernel"].T if "head" in params else params["embed"]["embedding"]


def _without_blocks(params: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """Embeddings, last norm and head, gathered for use."""
    return placement.gather({name: part for name, part in params.items() if name != "blocks"})


def _run(config: ModelConfig, params: dict[str, Any], placement: Placement, *inputs: Any) -> tuple[jax.Array, Any]:
    """Run the modules with these parameters; each block gathers its own later."""
    graph, block_graph, _ = _blueprint(config)
    model = nnx.merge(graph, _without_blocks(params, placement))
    return model(block_graph, params["blocks"], placement, *inputs)


@lru_cache
def _blueprint(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.GraphDef, dict[str, Any]]:
    """(graph without blocks, graph of a block, as all are alike, shapes of all arrays); nothing is computed."""
    graph, shapes = _split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    block_graph, block_shapes = _split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
    return graph, block_graph, {**shapes, "blocks": {f"{layer:03}": block_shapes for layer in range(config.n_layer)}}


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any]]:
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)
