"""A decoder-only transformer: flax.nnx modules that describe it, pure functions over a plain dict that run it.

The modules are built once, abstractly, to learn the graph and the shapes. From then on the model is a nested dict
of float32 arrays, which goes through jit, optax and a checkpoint without any of them knowing flax.

Inside, the tokens are the rows of one matrix, `x_MD`: the gradient of a weight is then one plain product, where a
third axis would make XLA copy a transposed cotangent for each of them. How attention and layers are computed is chosen
by `curriculum.model.formulation`.

Shape suffixes: B rows, T positions, M = B*T tokens, D width, V vocabulary, H heads, K head width; H = J*G heads
in J groups that share keys and values, P = B*J such groups in a batch; S positions that are seen: the T of the batch
itself, or, where text goes on, all that the cache has room for.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from curriculum.errors import InputError
from curriculum.model.formulation import attention_of, backend, layers_of
from curriculum.model.lora import adapters_of
from curriculum.model.model import Model, Placement
from curriculum.model.presets import LoraConfig, ModelConfig, RopeScaling

_HERE = Placement()

# What is kept of a block from the way forward to the way back; the rest is computed again.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def transformer(config: ModelConfig, placement: Placement = _HERE) -> Model:
    """The transformer of a config, as the trainer takes it. Raises InputError where the backend cannot compute it."""
    if config.attention == "cudnn" and backend() != "gpu":
        expected = "expected an NVIDIA GPU for it, or auto"
        raise InputError(
            f"model.attention: got cudnn on a machine whose jax backend is {jax.default_backend()}, {expected}"
        )
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
    """Float32 arrays on the host, as a nested dict keyed by the names of the modules below.

    As in GPT-2: weights are normal with a deviation of 0.02, divided by sqrt(2 n_layer) where a product is added
    to the residual stream; biases 0, norm scales 1. An adapter's A is uniform up to 1 / sqrt(inputs), as with peft, and
    its B is 0. An array depends on the seed, its name and its shape alone.
    """
    return _drawn(config, seed, _blueprint(config)[2])


def init_adapters(config: ModelConfig, seed: int) -> dict[str, Any]:
    """The adapters of `init_params` alone: nothing is drawn of what they are trained beside."""
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

    Position t sees tokens 0..t of its row. With `segment_ids_BT`, neighbours of equal id being one document, it
    sees its own document only, whose positions count from 0. `keys_B`, a random key a row, draw the dropout; without
    them there is none. Raises ValueError where T is above max_seq_len.
    """
    num_positions = tokens_BT.shape[1]
    if num_positions > config.max_seq_len:
        raise ValueError(f"got {num_positions} positions, expected at most max_seq_len {config.max_seq_len}")
    return _run(config, params, placement, tokens_BT, segment_ids_BT, keys_B)[0]


Cache = dict[str, tuple[jax.Array, jax.Array]]  # by block: its keys and its values, [B, J, S, K] in compute_dtype


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
    """(features_BTD, the cache with these tokens): what `forward` gives for them after the tokens in the cache.

    Token t of row b stands at position starts_B[b] + t, which the cache has room for; what the cache holds from there
    on is overwritten. So a row may be filled up with anything: nothing before it sees it, and it is gone before what
    comes next would.
    """
    return _run(config, params, placement, tokens_BT, None, None, starts_B, cache)


def head(params: dict[str, Any]) -> jax.Array:
    """kernel_VD of the output layer: logits are features @ kernel.T. The embedding where the two are tied."""
    return params["head"]["kernel"].T if "head" in params else params["embed"]["embedding"]


def _without_blocks(params: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """Embeddings, last norm and head, as they are used."""
    return placement.gather({name: part for name, part in params.items() if name != "blocks"})


def _run(config: ModelConfig, params: dict[str, Any], placement: Placement, *inputs: Any) -> tuple[jax.Array, Any]:
    """The modules, run with these parameters; those of the blocks are still as they are placed."""
    graph, block_graph, _ = _blueprint(config)
    model = nnx.merge(graph, _without_blocks(params, placement))
    return model(block_graph, params["blocks"], placement, *inputs)


@lru_cache
def _blueprint(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.GraphDef, dict[str, Any]]:
    """The graph of the modules without the blocks, that of a block, and the shapes of all arrays; nothing is computed.

    Blocks are alike: one stands for all of them, and a deep model is known as quickly as a shallow one.
    """
    graph, shapes = _split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    block_graph, block_shapes = _split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
    return graph, block_graph, {**shapes, "blocks": {f"{layer:03}": block_shapes for layer in range(config.n_layer)}}


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any]]:
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


class Transformer(nnx.Module):
    """Embedding, then blocks that are alike and are not its own, and a norm; `head` is a matrix that `forward`'s caller
    multiplies by, where it is not tied.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        learned, tied = config.pos_encoding == "learned", config.tie_embeddings
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        self.positions = nnx.Embed(config.max_seq_len, config.d_model, rngs=rngs) if learned else None
        self.norm = _norm(config, rngs)
        self.head = None if tied else nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self,
        block_graph: nnx.GraphDef,
        blocks: dict[str, Any],
        placement: Placement,
        tokens_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        keys_B: jax.Array | None,
        starts_B: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        B, T = tokens_BT.shape
        if cache is None:
            rows = _rows(self.config, T, segment_ids_BT, keys_B if self.config.dropout else None)
        else:
            rows = _rows_after(self.config, T, starts_B, next(iter(cache.values()))[0].shape[2])
        # The tables are read in float32, so that their gradients are added up in it.
        x_MD = self.embed(tokens_BT.reshape(B * T))
        if self.positions is not None:
            apart = rows.positions_BT is not None
            table_TD = self.positions.embedding[: rows.visible_BTS.shape[2]]
            x_MD += table_TD[rows.positions_BT].reshape(B * T, -1) if apart else jnp.tile(table_TD, (B, 1))
        x_MD = _dropout(self.config, x_MD.astype(self.config.compute_dtype), rows, site=0)
        if cache is None and layers_of(self.config, backend()) == "scanned":
            return self.norm(self._scanned(block_graph, blocks, x_MD, rows, B, placement)).reshape(B, T, -1), None
        extended = {}
        for layer, name in enumerate(sorted(blocks)):
            run = partial(_run_block, block_graph, blocks[name], placement, rows, B, self.config.has_rope(layer))
            if self.config.remat != "none":
                run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat])
            x_MD, extended[name] = run(x_MD, None if cache is None else cache[name], layer)
        return self.norm(x_MD).reshape(B, T, -1), None if cache is None else extended

    def _scanned(
        self,
        block_graph: nnx.GraphDef,
        blocks: dict[str, Any],
        x_MD: jax.Array,
        rows: Rows,
        num_rows: int,
        placement: Placement,
    ) -> jax.Array:
        """All blocks, one after the other in a loop over their stacked arrays."""
        params = [blocks[name] for name in sorted(blocks)]
        has_rope = self.config.has_rope(0)

        def stacked(*arrays):
            # The matrices are used in compute_dtype alone: the copy that stacking makes is no larger than need be.
            dtype = self.config.compute_dtype if arrays[0].ndim > 1 else arrays[0].dtype
            return jnp.stack([array.astype(dtype) for array in arrays])

        def run(x_MD, params_and_layer):
            params, layer = params_and_layer
            return _run_block(block_graph, params, placement, rows, num_rows, has_rope, x_MD, None, layer)[0], None

        if self.config.remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat], prevent_cse=False)
        return jax.lax.scan(run, x_MD, (jax.tree.map(stacked, *params), jnp.arange(len(params))))[0]


@partial(jax.jit, static_argnames=("graph", "placement", "num_rows", "has_rope"), inline=True)
def _run_block(
    graph: nnx.GraphDef,
    params: dict[str, Any],
    placement: Placement,
    rows: Rows,
    num_rows: int,
    has_rope: bool,
    x_MD: jax.Array,
    cache: tuple | None,
    layer: int | jax.Array,
) -> tuple[jax.Array, tuple | None]:
    """A block on parameters that are gathered here: where it is computed again, so is what it gathered.

    Blocks are alike, and jax traces them once for all of them. Inlined, so that nothing else is changed: were it not,
    they would be differentiated and lowered once as well (for the update of 24 layers 42 % less work, not 26 %), but
    each would keep arrays for the way back that it now shares with the others.
    """
    block = nnx.merge(graph, placement.gather(params))
    split = placement.heads_split
    return block(x_MD, cache, layer, rows=rows, num_rows=num_rows, has_rope=has_rope, heads_split=split)


class Rows(NamedTuple):
    """What all blocks are told of the rows of a batch. A leading axis of 1 stands for all rows alike."""

    positions_BT: jax.Array | None  # None: 0..T-1 in every row
    visible_BTS: jax.Array  # bool: whether position t of the row sees position s
    rope_BTHK: tuple[Any, Any] | None  # cosine and sine, H being 1 and K half a head; None: learned positions
    keys_B: jax.Array | None  # None: no dropout


def _rows(config: ModelConfig, T: int, segment_ids_BT: jax.Array | None, keys_B: jax.Array | None) -> Rows:
    count_T, positions_BT = jnp.arange(T), None
    visible_BTS = (count_T[:, None] >= count_T)[None]
    if config.sliding_window is not None:
        visible_BTS &= count_T[:, None] - count_T < config.sliding_window
    if segment_ids_BT is not None:
        opens_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0
        first_BT = jax.lax.cummax(jnp.where(opens_BT, count_T, 0), axis=1)
        visible_BTS &= first_BT[..., None] <= count_T
        positions_BT = count_T - first_BT
    return Rows(positions_BT, visible_BTS, _rope(config, T, positions_BT), keys_B)


def _rows_after(config: ModelConfig, T: int, starts_B: jax.Array, S: int) -> Rows:
    """The rows of tokens that come after others: each row at a position of its own, of S."""
    positions_BT, count_S = starts_B[:, None] + jnp.arange(T), jnp.arange(S)
    visible_BTS = positions_BT[..., None] >= count_S
    if config.sliding_window is not None:
        visible_BTS &= positions_BT[..., None] - count_S < config.sliding_window
    return Rows(positions_BT, visible_BTS, _rope(config, S, positions_BT), None)


def _rope(config: ModelConfig, num_positions: int, positions_BT: jax.Array | None) -> tuple[Any, Any] | None:
    """`Rows.rope_BTHK` of positions below `num_positions`; None for positions: all of them, in every row."""
    if config.pos_encoding != "rope":
        return None
    angles_TK = rope_angles(num_positions, config.head_width, config.rope_theta, config.rope_scaling)
    cos_TK, sin_TK = np.cos(angles_TK).astype(np.float32), np.sin(angles_TK).astype(np.float32)
    if positions_BT is None:
        return cos_TK[None, :, None], sin_TK[None, :, None]
    return jnp.asarray(cos_TK)[positions_BT][:, :, None], jnp.asarray(sin_TK)[positions_BT][:, :, None]


class Block(nnx.Module):
    """Attention, then the feed-forward, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x_MD: jax.Array,
        cache: tuple | None,
        layer: int | jax.Array,
        *,
        rows: Rows,
        num_rows: int,
        has_rope: bool,
        heads_split: bool,
    ) -> tuple[jax.Array, tuple | None]:
        mixed_MD, cache = self.attention(self.attention_norm(x_MD), cache, rows, num_rows, has_rope, heads_split)
        x_MD += _dropout(self.config, mixed_MD, rows, site=2 * layer + 1)
        return x_MD + _dropout(self.config, self.mlp(self.mlp_norm(x_MD)), rows, site=2 * layer + 2), cache


class Attention(nnx.Module):
    """Causal self-attention; n_head / n_kv_head query heads in turn share a key and a value head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        qkv_bias = config.bias or config.qkv_bias
        self.query = _linear(config, "query", qkv_bias, rngs)
        self.key = _linear(config, "key", qkv_bias, rngs)
        self.value = _linear(config, "value", qkv_bias, rngs)
        self.query_norm = _rms_norm(config, config.head_width, rngs) if config.qk_norm else None
        self.key_norm = _rms_norm(config, config.head_width, rngs) if config.qk_norm else None
        self.out = _linear(config, "out", config.bias, rngs)

    def __call__(
        self, x_MD: jax.Array, cache: tuple | None, rows: Rows, num_rows: int, has_rope: bool, heads_split: bool
    ) -> tuple[jax.Array, tuple | None]:
        B, T, K = num_rows, x_MD.shape[0] // num_rows, self.config.head_width
        J, G = self.config.n_kv_head, self.config.n_head // self.config.n_kv_head
        query_BTHK = self.query(x_MD).reshape(B, T, J * G, K)
        key_BTJK = self.key(x_MD).reshape(B, T, J, K)
        value_BTJK = self.value(x_MD).reshape(B, T, J, K)
        if self.query_norm is not None:
            query_BTHK, key_BTJK = self.query_norm(query_BTHK), self.key_norm(key_BTJK)
        if has_rope:
            query_BTHK, key_BTJK = rotate(query_BTHK, *rows.rope_BTHK), rotate(key_BTJK, *rows.rope_BTHK)

        has_document_mask = rows.positions_BT is not None
        attention = attention_of(
            self.config, backend(), seq_len=T, has_document_mask=has_document_mask, heads_split=heads_split
        )
        if cache is None and attention != "plain":
            mixed_BTHK = self._library_attention(attention, query_BTHK, key_BTJK, value_BTJK, rows)
            return self.out(mixed_BTHK.reshape(B * T, -1)), None

        # The queries of a group stand below one another, so that no key or value is repeated, and both products
        # have the one batch axis in front that XLA's fast routine wants.
        query_PGTK = (query_BTHK * K**-0.5).transpose(0, 2, 1, 3).reshape(B * J, G * T, K)
        key_PSK = key_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        value_PSK = value_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        if cache is not None:
            new = (key_PSK.reshape(B, J, T, K), value_PSK.reshape(B, J, T, K))
            cache = tuple(_write(*pair, rows.positions_BT[:, 0]) for pair in zip(cache, new, strict=True))
            key_PSK, value_PSK = (array_BJSK.reshape(B * J, -1, K) for array_BJSK in cache)
        S = key_PSK.shape[1]
        scores_PGTS = jnp.einsum("pqk,ptk->pqt", query_PGTK, key_PSK, preferred_element_type=jnp.float32)
        scores_BJGTS = scores_PGTS.reshape(B, J, G, T, S)
        scores_BJGTS = jnp.where(rows.visible_BTS[:, None, None], scores_BJGTS, -jnp.inf)
        shares_PGTS = jax.nn.softmax(scores_BJGTS.reshape(scores_PGTS.shape), axis=-1).astype(value_PSK.dtype)
        mixed_PGTK = jnp.einsum("pqt,ptk->pqk", shares_PGTS, value_PSK)
        return self.out(mixed_PGTK.reshape(B, J * G, T, K).transpose(0, 2, 1, 3).reshape(B * T, -1)), cache

    def _library_attention(self, name: str, query_BTHK, key_BTJK, value_BTJK, rows: Rows) -> jax.Array:
        """mixed_BTHK by jax.nn.dot_product_attention."""
        attend = partial(jax.nn.dot_product_attention, query_BTHK, key_BTJK, value_BTJK, implementation=name)
        if rows.positions_BT is not None:  # documents: each row sees otherwise
            return attend(mask=rows.visible_BTS[:, None])
        window = self.config.sliding_window
        return attend(is_causal=True, local_window_size=None if window is None else (window - 1, 0))


def _write(cache_BJSK: jax.Array, new_BJTK: jax.Array, starts_B: jax.Array) -> jax.Array:
    """The cache with each row's new keys, or values, from its own start on."""
    return jax.vmap(lambda cache_JSK, new_JTK, start: jax.lax.dynamic_update_slice(cache_JSK, new_JTK, (0, start, 0)))(
        cache_BJSK, new_BJTK, starts_B
    )


class MLP(nnx.Module):
    """gelu in its tanh form, or swiglu (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = _linear(config, "gate", config.bias, rngs) if config.mlp_type == "swiglu" else None
        self.up = _linear(config, "up", config.bias, rngs)
        self.down = _linear(config, "down", config.bias, rngs)

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(nnx.gelu(self.up(x_MD), approximate=True))
        return self.down(nnx.silu(self.gate(x_MD)) * self.up(x_MD))


def rope_angles(num_positions: int, head_width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """angles_TK, K being half a head: position t times theta^(-2k / head_width) (arXiv:2104.09864), float64.

    Scaled, a frequency is divided by the factor. With kind llama3 (arXiv:2407.21783, as released with Llama 3.1) that
    holds for wavelengths above original_max_seq_len / low_freq_factor, those below original_max_seq_len /
    high_freq_factor stay, and between them it goes over linearly in 1 / wavelength.
    """
    frequencies_K = theta ** (-np.arange(0, head_width, 2) / head_width)
    if scaling is not None:
        kept_K = np.zeros_like(frequencies_K)
        if scaling.kind == "llama3":
            turns_K = scaling.original_max_seq_len * frequencies_K / (2 * np.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_K = np.clip((turns_K - low) / (high - low), 0, 1)
        frequencies_K = kept_K * frequencies_K + (1 - kept_K) * frequencies_K / scaling.factor
    return np.outer(np.arange(num_positions), frequencies_K)


def rotate(x_BTHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Each head turned by its position's angles, its first half paired with its second, as in Llama."""
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def _dropout(config: ModelConfig, x_MD: jax.Array, rows: Rows, site: int | jax.Array) -> jax.Array:
    """Dropout of what is added to the residual stream. `site` tells the draws of one row apart.

    A row's draws come from its own key, so that they do not depend on what else is in the batch.
    """
    if rows.keys_B is None:
        return x_MD
    shape_TD = (x_MD.shape[0] // len(rows.keys_B), x_MD.shape[1])
    keep = 1 - config.dropout
    kept_BTD = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), keep, shape_TD))(rows.keys_B)
    return jnp.where(kept_BTD.reshape(x_MD.shape), x_MD / keep, 0)


class AdaptedLinear(nnx.Linear):
    """x W + scale (x A) B: a linear layer whose matrix W stays and whose adapter A, B of low rank is trained.

    R is the rank. The two products with A and B are small; W + scale A B is never made.
    """

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig, rngs: nnx.Rngs, **settings: Any):
        super().__init__(inputs, outputs, rngs=rngs, **settings)
        self.lora_a = nnx.Param(jnp.zeros((inputs, lora.rank), jnp.float32))
        self.lora_b = nnx.Param(jnp.zeros((lora.rank, outputs), jnp.float32))
        self.scale = lora.scale

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        a_DR, b_RF = (array[...].astype(self.dtype) for array in (self.lora_a, self.lora_b))
        return super().__call__(x_MD) + self.scale * ((x_MD.astype(self.dtype) @ a_DR) @ b_RF)


def _linear(config: ModelConfig, name: str, bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """The matrix of a block that the config's `projections` names so, adapted where `lora` asks for it."""
    inputs, outputs = config.projections()[name]
    settings = {"use_bias": bias, "dtype": config.compute_dtype, "rngs": rngs}
    if config.lora is not None and name in config.lora.targets:
        return AdaptedLinear(inputs, outputs, config.lora, **settings)
    return nnx.Linear(inputs, outputs, **settings)


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> Norm:
    is_layernorm = config.norm_type == "layernorm"
    return Norm(config, config.d_model, centred=is_layernorm, bias=is_layernorm and config.bias, rngs=rngs)


def _rms_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> Norm:
    return Norm(config, width, centred=False, bias=False, rngs=rngs)


class Norm(nnx.Module):
    """Layernorm (`centred`) or rmsnorm of the last axis. In float32, whatever the type of what is normed."""

    def __init__(self, config: ModelConfig, width: int, *, centred: bool, bias: bool, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32)) if bias else None
        self.centred, self.eps, self.dtype = centred, config.norm_eps, config.compute_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = _normed(self.centred, self.eps, x, self.scale[...])
        return (normed if self.bias is None else normed + self.bias[...]).astype(self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(centred: bool, eps: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """x over its deviation, times the scale, in float32. Its own way back keeps one array and takes two sums a row:
    autodiff keeps three.
    """
    return _normed_forward(centred, eps, x, scale_D)[0]


def _normed_forward(centred, eps, x, scale_D):
    dtype, x = x.dtype, x.astype(jnp.float32)
    if centred:  # first: E[x^2] - E[x]^2 would cancel
        x -= x.mean(axis=-1, keepdims=True)
    rate = jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    unit = x * rate
    return unit * scale_D, (unit, rate, scale_D, jnp.zeros((), dtype))


def _normed_backward(centred, eps, kept, dnormed):
    unit, rate, scale_D, like = kept
    dunit = dnormed * scale_D
    dx = dunit - unit * (dunit * unit).mean(axis=-1, keepdims=True)
    if centred:
        dx -= dunit.mean(axis=-1, keepdims=True)
    return (rate * dx).astype(like.dtype), (dnormed * unit).sum(axis=tuple(range(unit.ndim - 1)))


_normed.defvjp(_normed_forward, _normed_backward)
