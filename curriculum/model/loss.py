"""Cross-entropy over a large vocabulary, a few positions at a time: no array of [B, T, V] is ever made.

In training the gradient is computed in the forward pass: while the logits of a chunk are at hand, their cotangent is
known up to one factor (the loss is a sum), so nothing has to be kept or recomputed for the backward pass.

Shape suffixes: B rows, t positions of a chunk, m = B*t, D width, V vocabulary, W with the rows that fill it up, as N
blocks of K ids; S shards of the rows, one per device.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curriculum.model.formulation import BY_BACKEND, backend, loss_positions
from curriculum.model.model import Model, Params


def score_targets(model: Model, params: Params, inputs_BT: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
    """For evals: {nats: -ln p(target) in float32, correct: whether the target is the likeliest token}, each [B, T].

    Another one is summed over each window if `WindowResults` has a field for it.
    """
    features_BTD = model.forward(params, inputs_BT, None, None)
    chosen = BY_BACKEND[backend()]
    # If the ids are split over devices, blocks would lie across them, and the logits be gathered.
    block_ids = chosen.block_ids if model.vocab_shards == 1 else None
    if model.head is None:
        return _scores(features_BTD.astype(jnp.float32), model.num_ids, targets_BT, block_ids)
    kernel_WD, num_ids = _head(model, params, max(block_ids or 1, chosen.head_rows))
    kernel_WD = kernel_WD.astype(features_BTD.dtype)

    def chunk_scores(chunk):
        features_BtD, targets_Bt = chunk
        logits_BtW = _logits(features_BtD, kernel_WD, None)
        if chosen.padding == "masked":
            return _scores(_without_padding(logits_BtW, num_ids), None, targets_Bt, block_ids)
        return _scores(logits_BtW, num_ids, targets_Bt, block_ids)

    return _by_chunk(chunk_scores, (features_BTD, targets_BT), kernel_WD, model.row_shards)


def sum_nats(
    model: Model,
    params: Params,
    inputs_BT: jax.Array,
    targets_BT: jax.Array,
    loss_mask_BT: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    keys_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(float32 sum of nats over the targets in the loss mask, the same by row); only the first has a gradient."""
    features_BTD = model.forward(params, inputs_BT, segment_ids_BT, keys_B)
    if model.head is None:
        nats_BT = _scores(features_BTD.astype(jnp.float32), model.num_ids, targets_BT)["nats"]
        nats_BT = jnp.where(loss_mask_BT, nats_BT, 0)
        return nats_BT.sum(), jax.lax.stop_gradient(nats_BT).sum(axis=1)
    kernel_VD, num_ids = _head(model, params, BY_BACKEND[backend()].head_rows)
    return _sum_nats(num_ids, model.row_shards, features_BTD, kernel_VD, targets_BT, loss_mask_BT)


def sample_targets(
    model: Model, params: Params, inputs_BT: jax.Array, segment_ids_BT: jax.Array | None, keys_B: jax.Array
) -> jax.Array:
    """targets_BT drawn from the model's own predictions, one key a row; no dropout."""
    features_BTD = model.forward(params, inputs_BT, segment_ids_BT, None)
    positions_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1]), inputs_BT.shape)

    @jax.vmap
    def draw(key, positions_T, logits_TV):
        return jax.vmap(lambda t, logits_V: jax.random.categorical(jax.random.fold_in(key, t), logits_V))(
            positions_T, logits_TV
        )

    if model.head is None:
        return draw(keys_B, positions_BT, _without_padding(features_BTD.astype(jnp.float32), model.num_ids))
    kernel_VD, num_ids = _head(model, params, BY_BACKEND[backend()].head_rows)
    kernel_VD = kernel_VD.astype(features_BTD.dtype)

    def chunk_draw(chunk):
        features_BtD, positions_Bt = chunk
        return draw(keys_B, positions_Bt, _logits(features_BtD, kernel_VD, num_ids))

    return _by_chunk(chunk_draw, (features_BTD, positions_BT), kernel_VD, model.row_shards)


def next_logits(model: Model, params: Params, features_BD: jax.Array) -> jax.Array:
    """logits_BV in float32 for the token that follows each of these positions."""
    if model.head is None:
        return _without_padding(features_BD.astype(jnp.float32), model.num_ids)
    kernel_VD = model.head(params).astype(features_BD.dtype)
    return _without_padding(_logits(features_BD[:, None], kernel_VD, None)[:, 0], model.num_ids)


def _head(model: Model, params: Params, multiple: int) -> tuple[jax.Array, int | None]:
    """(kernel_WD: filled up to a multiple of so many rows with zeros; how many rows are ids, None: all)."""
    kernel_VD = model.head(params)
    V = kernel_VD.shape[0]
    missing = -V % multiple
    if not missing:
        return kernel_VD, model.num_ids
    return jnp.pad(kernel_VD, ((0, missing), (0, 0))), model.num_ids or V


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_nats(num_ids, row_shards, features_BTD, kernel_VD, targets_BT, loss_mask_BT):
    return _sum_nats_forward(num_ids, row_shards, features_BTD, kernel_VD, targets_BT, loss_mask_BT)[0]


def _sum_nats_forward(num_ids, row_shards, features_BTD, kernel_VD, targets_BT, loss_mask_BT):
    dtype, V = features_BTD.dtype, kernel_VD.shape[0]
    masked = BY_BACKEND[backend()].padding == "masked"
    unmasked_ids = None if masked else num_ids
    low_VD, ids_V = kernel_VD.astype(dtype), jnp.arange(V)

    def chunk_step(dkernel_SVD, chunk):
        features_BtD, targets_Bt, mask_Bt = chunk
        logits_BtV = _logits(features_BtD, low_VD, None)
        if masked:
            logits_BtV = _without_padding(logits_BtV, num_ids)
        # One exponential for both the loss and its derivative, softmax - onehot. The derivative is as wide as the
        # logits: to pad it a GPU took twice the time.
        top_Bt1 = logits_BtV[..., :unmasked_ids].max(axis=-1, keepdims=True)
        exp_BtV = jnp.exp(logits_BtV - top_Bt1)
        total_Bt1 = exp_BtV[..., :unmasked_ids].sum(axis=-1, keepdims=True)
        target_Bt1 = targets_Bt[..., None]
        nats_Bt = (jnp.log(total_Bt1) + top_Bt1 - jnp.take_along_axis(logits_BtV, target_Bt1, axis=-1))[..., 0]
        kept_BtV = mask_Bt[..., None] if num_ids is None else mask_Bt[..., None] & (ids_V < num_ids)
        dlogits_BtV = jnp.where(kept_BtV, exp_BtV / total_Bt1 - (target_Bt1 == ids_V), 0).astype(dtype)
        dfeatures_BtD = (dlogits_BtV.reshape(-1, V) @ low_VD).reshape(features_BtD.shape)
        dlogits_SmV = dlogits_BtV.reshape(row_shards, -1, V)
        features_SmD = features_BtD.reshape(row_shards, -1, features_BtD.shape[-1])
        dkernel_SVD += jnp.einsum("smv,smd->svd", dlogits_SmV, features_SmD, preferred_element_type=jnp.float32)
        return dkernel_SVD, (jnp.where(mask_Bt, nats_Bt, 0).sum(axis=1), dfeatures_BtD)

    # Each chunk adds its part to the kernel's gradient, V x D numbers read and written: little beside its three
    # products if the chunk is long enough. If rows are split over S devices, each device sums its own part: with one
    # array of V x D the compiler would sum every chunk's part over all devices.
    chunks = _split((features_BTD, targets_BT, loss_mask_BT), low_VD, row_shards)
    zeros_SVD = jnp.zeros((row_shards, *kernel_VD.shape), jnp.float32)
    dkernel_SVD, (nats_CB, dfeatures_CBtD) = jax.lax.scan(chunk_step, zeros_SVD, chunks)
    dkernel_VD = dkernel_SVD.sum(axis=0)
    if masked and row_shards > 1 and num_ids is not None:
        # The compiler for TPUs fails to make one reduce-scatter of this sum and of the slice that takes padding off.
        dkernel_VD = jax.lax.optimization_barrier(dkernel_VD)
    nats_B = nats_CB.sum(axis=0)
    dfeatures_BTD = _join(dfeatures_CBtD, features_BTD.shape[1])
    return (nats_B.sum(), nats_B), (dfeatures_BTD, dkernel_VD.astype(kernel_VD.dtype))


def _sum_nats_backward(num_ids, row_shards, saved, cotangents):
    dfeatures_BTD, dkernel_VD = saved
    return (cotangents[0] * dfeatures_BTD).astype(dfeatures_BTD.dtype), cotangents[0] * dkernel_VD, None, None


_sum_nats.defvjp(_sum_nats_forward, _sum_nats_backward)


def _logits(features_BtD: jax.Array, kernel_VD: jax.Array, num_ids: int | None) -> jax.Array:
    B, t, D = features_BtD.shape
    logits_mV = jnp.einsum("md,vd->mv", features_BtD.reshape(B * t, D), kernel_VD, preferred_element_type=jnp.float32)
    # A slice is read in place; setting logits to -inf would write them once more.
    return logits_mV.reshape(B, t, -1)[..., :num_ids]


def _without_padding(logits_V: jax.Array, num_ids: int | None) -> jax.Array:
    """The logits with -inf for ids from `num_ids` on, along the last axis; None: there is no padding."""
    if num_ids is None:
        return logits_V
    return jnp.where(jnp.arange(logits_V.shape[-1]) < num_ids, logits_V, -jnp.inf)


def _scores(
    logits_BTW: jax.Array, num_ids: int | None, targets_BT: jax.Array, block_ids: int | None = None
) -> dict[str, jax.Array]:
    """`score_targets` of logits that are padding from `num_ids` on; None: none is.

    With `block_ids` that divide the logits, the sum of exponentials and the largest logit of each such block of ids
    come first, and then those of all. So a block is still in the cache when it is read again, and whether `argmax`
    would give the target, the first of equals, is asked of the blocks and of the target's own block alone.
    """
    W = logits_BTW.shape[-1]
    V = num_ids or W
    K = W if block_ids is None or W % block_ids else block_ids
    blocks_BTNK = logits_BTW.reshape(*targets_BT.shape, W // K, K)
    rest_BTK = logits_BTW[..., V // K * K : V]

    def by_block(reduce):
        of_whole_BTN = reduce(blocks_BTNK, axis=-1)[..., : V // K]
        if V % K == 0:
            return of_whole_BTN
        return jnp.concatenate([of_whole_BTN, reduce(rest_BTK, axis=-1, keepdims=True)], axis=-1)

    target_BT1 = targets_BT[..., None]
    target_logit_BT1 = jnp.take_along_axis(logits_BTW, target_BT1, axis=-1)

    def is_first_top(values_BTn, at_BT1):
        at_n = jnp.arange(values_BTn.shape[-1])
        tied_after_BTn = (values_BTn == target_logit_BT1) & (at_n >= at_BT1)
        return ((values_BTn < target_logit_BT1) | tied_after_BTn).all(axis=-1)

    nats_BT = jax.nn.logsumexp(by_block(jax.nn.logsumexp), axis=-1) - target_logit_BT1[..., 0]
    if K == W:
        return {"nats": nats_BT, "correct": is_first_top(logits_BTW[..., :V], target_BT1)}
    own_BTK = jnp.take_along_axis(blocks_BTNK, target_BT1[..., None] // K, axis=-2)[..., 0, :]
    own_BTK = jnp.where(target_BT1 // K * K + jnp.arange(K) < V, own_BTK, -jnp.inf)
    correct_BT = is_first_top(by_block(jnp.max), target_BT1 // K) & is_first_top(own_BTK, target_BT1 % K)
    return {"nats": nats_BT, "correct": correct_BT}


def _by_chunk(function, arrays, kernel_VD, row_shards):
    """Map a function over chunks of positions, and join the results to [B, T] again."""
    T = arrays[0].shape[1]
    return jax.tree.map(lambda array: _join(array, T), jax.lax.map(function, _split(arrays, kernel_VD, row_shards)))


def _split(arrays_BT: Any, kernel_VD: jax.Array, row_shards: int) -> Any:
    """[C, B, t, ...] of each [B, T, ...], zero-padded; cut along positions, so that rows stay on their devices."""
    B, T = arrays_BT[0].shape[:2]
    t = loss_positions(-(-B // row_shards), T, kernel_VD.shape[0], backend())
    num_chunks = -(-T // t)

    def split(array_BT):
        padding = [(0, 0)] * array_BT.ndim
        padding[1] = (0, num_chunks * t - T)
        padded = jnp.pad(array_BT, padding)
        return jnp.moveaxis(padded.reshape(B, num_chunks, t, *array_BT.shape[2:]), 1, 0)

    return jax.tree.map(split, arrays_BT)


def _join(array_CBt: jax.Array, T: int) -> jax.Array:
    joined = jnp.moveaxis(array_CBt, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :T]
