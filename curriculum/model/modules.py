"""The modules of a decoder-only transformer: the whole, a block, its attention, and the batch data that blocks share.

Shape suffixes as in `curriculum.model.transformer`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from curriculum.model.attention import attend, causal_attention, flat, splash_attention
from curriculum.model.formulation import attention_of, backend, layers_of, qkv_of
from curriculum.model.layers import MLP, head_norm, linear, norm, side_by_side
from curriculum.model.model import Placement
from curriculum.model.presets import ModelConfig
from curriculum.model.rope import rope_angles

Cache = dict[str, tuple[jax.Array, jax.Array]]  # by block: its keys and its values, [B, J, S, K] in compute_dtype

# What is kept of a block for the backward pass; the rest is recomputed.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Transformer(nnx.Module):
    """Embedding, last norm and `head` (None if tied), which `forward` does not apply; the blocks are passed in."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        learned, tied = config.pos_encoding == "learned", config.tie_embeddings
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        self.positions = nnx.Embed(config.max_seq_len, config.d_model, rngs=rngs) if learned else None
        self.norm = norm(config)
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
        # The tables are read in float32, so that their gradients are summed in float32.
        x_MD = self.embed(tokens_BT.reshape(B * T))
        if self.positions is not None:
            apart = rows.positions_BT is not None
            table_TD = self.positions.embedding[: rows.visible_BTS.shape[2]]
            x_MD += table_TD[rows.positions_BT].reshape(B * T, -1) if apart else jnp.tile(table_TD, (B, 1))
        x_MD = _dropout(self.config, x_MD.astype(self.config.compute_dtype), rows, site=0)
        if cache is None and layers_of(self.config, backend()) == "scanned":
            return self.norm(self._scanned(block_graph, blocks, x_MD, rows, placement)).reshape(B, T, -1), None
        extended = {}
        for layer, name in enumerate(sorted(blocks)):
            run = partial(_run_block, block_graph, blocks[name], placement, rows, self.config.has_rope(layer))
            if self.config.remat != "none":
                run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat])
            x_MD, extended[name] = run(x_MD, None if cache is None else cache[name], layer)
        return self.norm(x_MD).reshape(B, T, -1), None if cache is None else extended

    def _scanned(
        self, block_graph: nnx.GraphDef, blocks: dict[str, Any], x_MD: jax.Array, rows: Rows, placement: Placement
    ) -> jax.Array:
        params = [blocks[name] for name in sorted(blocks)]
        has_rope = self.config.has_rope(0)

        def stacked(*arrays):
            # Matrices are used in compute_dtype only, so they are cast before stacking: the copy is no larger than
            # needed.
            dtype = self.config.compute_dtype if arrays[0].ndim > 1 else arrays[0].dtype
            return jnp.stack([array.astype(dtype) for array in arrays])

        def run(x_MD, params_and_layer):
            params, layer = params_and_layer
            return _run_block(block_graph, params, placement, rows, has_rope, x_MD, None, layer)[0], None

        if self.config.remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat], prevent_cse=False)
        return jax.lax.scan(run, x_MD, (jax.tree.map(stacked, *params), jnp.arange(len(params))))[0]


@partial(jax.jit, static_argnames=("graph", "placement", "has_rope"))
def _run_block(
    graph: nnx.GraphDef,
    params: dict[str, Any],
    placement: Placement,
    rows: Rows,
    has_rope: bool,
    x_MD: jax.Array,
    cache: tuple | None,
    layer: int | jax.Array,
) -> tuple[jax.Array, tuple | None]:
    """Run a block on parameters that are gathered here: a block that is recomputed gathers them again.

    Blocks are alike, so that jax traces, differentiates and lowers one for all of them. The compiler inlines the calls
    first, so that it makes the same program of them as of blocks that are written out.
    """
    block = nnx.merge(graph, placement.gather(params))
    return block(x_MD, cache, layer, rows=rows, has_rope=has_rope, placement=placement)


class Rows(NamedTuple):
    """What all blocks need to know of the rows of a batch. A leading axis of 1 means that all rows are alike."""

    positions_BT: jax.Array | None  # None: 0..T-1 in every row
    visible_BTS: jax.Array  # bool: whether position t of the row attends to position s
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
    """`Rows` for tokens that follow those in a cache of S positions: each row starts at a position of its own."""
    positions_BT, count_S = starts_B[:, None] + jnp.arange(T), jnp.arange(S)
    visible_BTS = positions_BT[..., None] >= count_S
    if config.sliding_window is not None:
        visible_BTS &= positions_BT[..., None] - count_S < config.sliding_window
    return Rows(positions_BT, visible_BTS, _rope(config, S, positions_BT), None)


def _rope(config: ModelConfig, num_positions: int, positions_BT: jax.Array | None) -> tuple[Any, Any] | None:
    """`Rows.rope_BTHK` for positions below `num_positions`; positions_BT None: all of them, in every row."""
    if config.pos_encoding != "rope":
        return None
    angles_TK = rope_angles(num_positions, config.head_width, config.rope_theta, config.rope_scaling)
    cos_TK, sin_TK = np.cos(angles_TK).astype(np.float32), np.sin(angles_TK).astype(np.float32)
    if positions_BT is None:
        return cos_TK[None, :, None], sin_TK[None, :, None]
    return jnp.asarray(cos_TK)[positions_BT][:, :, None], jnp.asarray(sin_TK)[positions_BT][:, :, None]


class Block(nnx.Module):
    """Attention, then the feed-forward, each with a norm before it and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x_MD: jax.Array,
        cache: tuple | None,
        layer: int | jax.Array,
        *,
        rows: Rows,
        has_rope: bool,
        placement: Placement,
    ) -> tuple[jax.Array, tuple | None]:
        mixed_MD, cache = self.attention(self.attention_norm(x_MD), cache, rows, has_rope, placement)
        x_MD += _dropout(self.config, mixed_MD, rows, site=2 * layer + 1)
        return x_MD + _dropout(self.config, self.mlp(self.mlp_norm(x_MD)), rows, site=2 * layer + 2), cache


class Attention(nnx.Module):
    """Causal self-attention; every n_head / n_kv_head consecutive query heads share a key and a value head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        qkv_bias = config.bias or config.qkv_bias
        self.query = linear(config, "query", qkv_bias, rngs)
        self.key = linear(config, "key", qkv_bias, rngs)
        self.value = linear(config, "value", qkv_bias, rngs)
        self.query_norm = head_norm(config) if config.qk_norm else None
        self.key_norm = head_norm(config) if config.qk_norm else None
        self.out = linear(config, "out", config.bias, rngs)

    def __call__(
        self, x_MD: jax.Array, cache: tuple | None, rows: Rows, has_rope: bool, placement: Placement
    ) -> tuple[jax.Array, tuple | None]:
        T, K = rows.visible_BTS.shape[1], self.config.head_width
        B = x_MD.shape[0] // T
        J, G = self.config.n_kv_head, self.config.n_head // self.config.n_kv_head
        linears = (self.query, self.key, self.value)
        joined = cache is None and qkv_of(self.config, backend(), heads_split=placement.heads_split) == "joined"
        query_MF, key_MF, value_MF = side_by_side(x_MD, linears) if joined else (layer(x_MD) for layer in linears)
        query_BTHK = query_MF.reshape(B, T, J * G, K)
        key_BTJK = key_MF.reshape(B, T, J, K)
        value_BTJK = value_MF.reshape(B, T, J, K)
        if self.query_norm is not None:
            query_BTHK, key_BTJK = self.query_norm(query_BTHK), self.key_norm(key_BTJK)
        if has_rope:
            query_BTHK, key_BTJK = rotate(query_BTHK, *rows.rope_BTHK), rotate(key_BTJK, *rows.rope_BTHK)

        attention = attention_of(self.config, backend(), seq_len=T, heads_split=placement.heads_split)
        if cache is None and attention != "plain":
            mixed_BTHK = _library_attention(self.config, attention, query_BTHK, key_BTJK, value_BTJK, rows, placement)
            return self.out(mixed_BTHK.reshape(B * T, -1)), None

        query_PGTK = (query_BTHK * K**-0.5).transpose(0, 2, 1, 3).reshape(B * J, G, T, K)
        key_PSK = key_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        value_PSK = value_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        if cache is None:
            seen = key_PSK, value_PSK, rows.visible_BTS
            return self.out(causal_attention(B, self.config.sliding_window, query_PGTK, *seen)), None
        new = (key_PSK.reshape(B, J, T, K), value_PSK.reshape(B, J, T, K))
        cache = tuple(_write(*pair, rows.positions_BT[:, 0]) for pair in zip(cache, new, strict=True))
        key_PSK, value_PSK = (array_BJSK.reshape(B * J, -1, K) for array_BJSK in cache)
        mixed_PGTK, *_ = attend(query_PGTK, key_PSK, value_PSK, rows.visible_BTS)
        return self.out(flat(mixed_PGTK, B)), cache


def _library_attention(
    config: ModelConfig,
    name: str,
    query_BTHK: jax.Array,
    key_BTJK: jax.Array,
    value_BTJK: jax.Array,
    rows: Rows,
    placement: Placement,
) -> jax.Array:
    """mixed_BTHK by jax.nn.dot_product_attention (`xla` and `cudnn`), or by `splash_attention`.

    Of several devices each calls a flash attention for itself. Left to the compiler, cuDNN's call holds the address of
    a function of the process, so that no later process finds the program in its cache; it needs heads that split
    evenly; and a kernel for TPUs is not split at all.
    """
    apart, window = rows.positions_BT is not None, config.sliding_window
    masks = []

    if name == "splash":
        if apart:  # where a token's document begins in its row
            masks = [jnp.arange(query_BTHK.shape[1], dtype=jnp.int32) - rows.positions_BT]

        def attend(query_BTHK, *others):
            scaled_BTHK = query_BTHK * config.head_width**-0.5
            return splash_attention(window, scaled_BTHK, *others, interpret=backend() != "tpu")

    else:
        if apart:  # documents: it differs from row to row
            masks = [rows.visible_BTS[:, None]]

        def attend(query_BTHK, key_BTJK, value_BTJK, mask_B1TS=None):
            # Causal beside a mask as well: cuDNN then passes over what lies above the diagonal.
            sliding = None if window is None or apart else (window - 1, 0)
            return jax.nn.dot_product_attention(
                query_BTHK,
                key_BTJK,
                value_BTJK,
                mask=mask_B1TS,
                is_causal=True,
                local_window_size=sliding,
                implementation=name,
            )

    if name in ("cudnn", "splash"):
        attend = placement.on_each(attend, config.n_kv_head)
    return attend(query_BTHK, key_BTJK, value_BTJK, *masks)


def _write(cache_BJSK: jax.Array, new_BJTK: jax.Array, starts_B: jax.Array) -> jax.Array:
    """The cache with each row's new keys (or values) written from the row's own start on."""
    return jax.vmap(lambda cache_JSK, new_JTK, start: jax.lax.dynamic_update_slice(cache_JSK, new_JTK, (0, start, 0)))(
        cache_BJSK, new_BJTK, starts_B
    )


def rotate(x_BTHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Each head rotated by its position's angles, its first half paired with its second, as in Llama."""
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def _dropout(config: ModelConfig, x_MD: jax.Array, rows: Rows, site: int | jax.Array) -> jax.Array:
    """Dropout of what enters the residual stream, by each row's own key; `site` tells a row's draws apart."""
    if rows.keys_B is None:
        return x_MD
    shape_TD = (x_MD.shape[0] // len(rows.keys_B), x_MD.shape[1])
    keep = 1 - config.dropout
    kept_BTD = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), keep, shape_TD))(rows.keys_B)
    return jnp.where(kept_BTD.reshape(x_MD.shape), x_MD / keep, 0)
