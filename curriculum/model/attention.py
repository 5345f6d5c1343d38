"""Plain attention, two batched products with the softmax between them and their backward pass, and flash attention.

Shape suffixes as in `curriculum.model.transformer`: M positions of all rows, F the width of all heads; P is a key head
of a row, G the query heads that share it, Q a query of these; T and S positions of queries and keys, K the width of a
head.
"""

from functools import partial

import jax
import jax.numpy as jnp

from curriculum.model.formulation import LENGTH_STEPS, query_blocks
from curriculum.model.layers import after


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def causal_attention(
    num_rows: int,
    sliding_window: int | None,
    query_PGTK: jax.Array,
    key_PTK: jax.Array,
    value_PTK: jax.Array,
    visible_BTS: jax.Array,
) -> jax.Array:
    """mixed_MF of causal attention: each block of queries attends to the keys that any of it may see.

    Its own backward pass keeps the exponentials, their sums, query, key, value and the result. Autodiff also keeps the
    shares, zeros for what is not visible, and a copy of each block's keys and values.
    """
    return _forward(num_rows, sliding_window, query_PGTK, key_PTK, value_PTK, visible_BTS)[0]


def _forward(num_rows, sliding_window, query_PGTK, key_PTK, value_PTK, visible_BTS):
    mixed, kept = [], []
    for queries, keys in _blocks(query_PGTK.shape[2], sliding_window):
        seen = key_PTK[:, keys], value_PTK[:, keys], visible_BTS[:, queries, keys]
        mixed_PGTK, *exponentials = attend(query_PGTK[:, :, queries], *seen)
        mixed.append(mixed_PGTK)
        kept.append(exponentials)
    mixed_MF = flat(jnp.concatenate(mixed, axis=2), num_rows)
    return mixed_MF, (query_PGTK, key_PTK, value_PTK, kept, mixed_MF)


def _backward(num_rows, sliding_window, kept, dmixed_MF):
    """The scores' gradient is shares * (dshares - mixed . dmixed): FlashAttention, arXiv:2205.14135, appendix B.2.

    A share is an exponential over their sum; dmixed, a smaller array, is divided by the sum instead.
    """
    # Without the barrier XLA keeps what the forward pass had computed of these, such as exponentials in float32.
    query_PGTK, key_PTK, value_PTK, exponentials, mixed_MF = jax.lax.optimization_barrier(kept)
    P, G, T, K = query_PGTK.shape
    dmixed_PGTK = _by_head(dmixed_MF, num_rows, query_PGTK.shape)
    means_MH = (mixed_MF.astype(jnp.float32) * dmixed_MF).reshape(num_rows * T, -1, K).sum(axis=-1)
    mean_PGT1 = _by_head(means_MH, num_rows, (P, G, T, 1))
    key_PTK, value_PTK = after((key_PTK, value_PTK), dmixed_PGTK[:, 0, :, :1])
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    dquery, dkey_PTK, dvalue_PTK = [], 0, 0
    for (queries, keys), (exp_PQS, sum_PQ1) in zip(_blocks(T, sliding_window), exponentials, strict=True):
        query_PQK, dmixed_PQK, mean_PQ1 = (
            array[:, :, queries].reshape(P, -1, array.shape[3]) for array in (query_PGTK, dmixed_PGTK, mean_PGT1)
        )
        dsummed_PQK = (dmixed_PQK / sum_PQ1).astype(value_PTK.dtype)
        dexp_PQS = product("pqk,psk->pqs", dsummed_PQK, value_PTK[:, keys]) - mean_PQ1 / sum_PQ1
        dscores_PQS = (exp_PQS * dexp_PQS).astype(key_PTK.dtype)
        dquery.append(product("pqs,psk->pqk", dscores_PQS, key_PTK[:, keys]).reshape(P, G, -1, K))
        outside = ((0, 0), (keys.start, T - keys.stop), (0, 0))
        dkey_PTK += jnp.pad(product("pqs,pqk->psk", dscores_PQS, query_PQK), outside)
        dvalue_PTK += jnp.pad(product("pqs,pqk->psk", exp_PQS, dsummed_PQK), outside)
    gradients = (jnp.concatenate(dquery, axis=2), dkey_PTK, dvalue_PTK)
    return *(gradient.astype(key_PTK.dtype) for gradient in gradients), None


causal_attention.defvjp(_forward, _backward)


def _blocks(seq_len: int, sliding_window: int | None) -> list[tuple[slice, slice]]:
    """The positions of each block's queries, and those of its keys."""
    blocks = query_blocks(seq_len, sliding_window)
    return [(slice(first, end), slice(first_key, end)) for first_key, first, end in blocks]


def attend(
    query_PGTK: jax.Array, key_PSK: jax.Array, value_PSK: jax.Array, visible_BTS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """mixed_PGTK, for each query the mean of the values that it sees, weighted by the softmax of its scores; exp_PQS,
    the exponentials of the scores less the query's largest, 0 where it does not see; and sum_PQ1, their sums over S.

    The queries of a group are stacked along one axis, so that no key or value is repeated, and both products have the
    single leading batch axis that XLA's fast routine wants.
    """
    P, G, T, K = query_PGTK.shape
    S = key_PSK.shape[1]
    query_PQK = query_PGTK.reshape(P, G * T, K)
    scores_PQS = jnp.einsum("pqk,psk->pqs", query_PQK, key_PSK, preferred_element_type=jnp.float32)
    scores_BJGTS = scores_PQS.reshape(len(visible_BTS), -1, G, T, S)
    scores_PQS = jnp.where(visible_BTS[:, None, None], scores_BJGTS, -jnp.inf).reshape(scores_PQS.shape)
    exp_PQS = jnp.exp(scores_PQS - scores_PQS.max(axis=-1, keepdims=True))
    sum_PQ1 = exp_PQS.sum(axis=-1, keepdims=True)
    exp_PQS = exp_PQS.astype(value_PSK.dtype)
    mixed_PQK = jnp.einsum("pqs,psk->pqk", exp_PQS, value_PSK, preferred_element_type=jnp.float32) / sum_PQ1
    return mixed_PQK.astype(value_PSK.dtype).reshape(P, G, T, K), exp_PQS, sum_PQ1


def flat(x_PGTK: jax.Array, num_rows: int) -> jax.Array:
    """x_MF: all heads of a position side by side."""
    P, G, T, K = x_PGTK.shape
    return x_PGTK.reshape(num_rows, -1, T, K).transpose(0, 2, 1, 3).reshape(num_rows * T, -1)


def _by_head(x_MF: jax.Array, num_rows: int, shape_PGTK: tuple[int, ...]) -> jax.Array:
    """The opposite of `flat`."""
    _, _, T, K = shape_PGTK
    return x_MF.reshape(num_rows, T, -1, K).transpose(0, 2, 1, 3).reshape(shape_PGTK)


SPLASH_BLOCK = LENGTH_STEPS["splash"]  # the kernel takes blocks of a multiple of so many positions
LARGEST_SPLASH_BLOCK = 512


def splash_attention(
    sliding_window: int | None,
    query_BTHK: jax.Array,
    key_BTJK: jax.Array,
    value_BTJK: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    """mixed_BTHK of causal attention by jax's Pallas kernel for TPUs, without scores in the memory of the device.

    T is a multiple of SPLASH_BLOCK; the queries are scaled already. `documents_BT`: int32, alike for the tokens of a
    row that see each other. `interpret`: compute what the kernel does with jax's operations, on any backend and slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H = query_BTHK.shape[1:3]
    if sliding_window is None:
        mask = splash.CausalMask((T, T))
    else:
        mask = splash.LocalMask((T, T), window_size=(sliding_window - 1, 0), offset=0)
    block = next(size for size in range(LARGEST_SPLASH_BLOCK, 0, -SPLASH_BLOCK) if T % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    attend = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        interpret=interpret,
    )

    def attend_row(query_THK, key_TJK, value_TJK, documents_T):
        ids = None if documents_T is None else splash.SegmentIds(documents_T, documents_T)
        query_HTK, key_JTK, value_JTK = (array.swapaxes(0, 1) for array in (query_THK, key_TJK, value_TJK))
        return attend(query_HTK, key_JTK, value_JTK, segment_ids=ids).swapaxes(0, 1)

    return jax.vmap(attend_row)(query_BTHK, key_BTJK, value_BTJK, documents_BT)
