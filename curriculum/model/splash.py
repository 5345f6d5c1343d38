"""Flash attention for TPUs: the Pallas kernel that jax brings, without a score in the memory of the device.

Shape suffixes as in `curriculum.model.transformer`.
"""

from __future__ import annotations

import jax

from curriculum.model.formulation import LENGTH_STEPS

BLOCK = LENGTH_STEPS["splash"]  # the kernel takes blocks of a multiple of so many positions
LARGEST_BLOCK = 512


def splash_attention(
    sliding_window: int | None,
    query_BTHK: jax.Array,
    key_BTJK: jax.Array,
    value_BTJK: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    """mixed_BTHK of causal attention over T positions, a multiple of BLOCK; the queries are scaled already.

    `documents_BT`: int32, alike for the tokens of a row that see each other. `interpret`: compute what the kernel
    does with jax's operations, on any backend and slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H = query_BTHK.shape[1:3]
    if sliding_window is None:
        mask = splash.CausalMask((T, T))
    else:
        mask = splash.LocalMask((T, T), window_size=(sliding_window - 1, 0), offset=0)
    block = next(size for size in range(LARGEST_BLOCK, 0, -BLOCK) if T % size == 0)
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
