"""GPT-2's update in plain jax, without curriculum's modules, written for speed: the baseline for curriculum's update.

For `tools/bench_step.py`. Made for speed on a CPU: tokens are the rows of one matrix; query, key and value are one
product; attention is two batched products for each block of queries, with the keys up to the block's end; norms have a
hand-written backward pass; the state is donated and updated in one pass over each array. On an NVIDIA GPU with
bfloat16, attention is cuDNN's.

Shape suffixes: B rows, T positions, t those of a block, S those up to its end, M = B*T, D width, H heads, K head width,
P = B*H, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    num_rows: int
    num_positions: int
    num_layers: int
    num_heads: int
    width: int
    vocab_size: int


def make_program(size: Size, dtype: str = "float32", *, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, clip=1.0):
    """(step, state): step(state, inputs_BT, targets_BT, lr) -> (state, loss), compiled, its state donated."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    B, T, L, H, D, V = size
    K, M = D // H, B * T
    block = max(64, -(-T // 8))
    ends = [(first, min(first + block, T)) for first in range(0, T, block)]
    causal_TT = np.tril(np.ones((T, T), bool))
    flash = dtype == "bfloat16" and jax.default_backend() == "gpu"

    def normed_forward(x_MD, scale_D):
        x_MD = x_MD.astype(jnp.float32)
        centred_MD = x_MD - x_MD.mean(-1, keepdims=True)
        rate_M1 = jax.lax.rsqrt((centred_MD * centred_MD).mean(-1, keepdims=True) + 1e-5)
        unit_MD = centred_MD * rate_M1
        return (unit_MD * scale_D).astype(dtype), (unit_MD, rate_M1, scale_D)

    def normed_backward(kept, dout_MD):
        unit_MD, rate_M1, scale_D = kept
        dout_MD = dout_MD.astype(jnp.float32)
        dunit_MD = dout_MD * scale_D
        along_M1 = (dunit_MD * unit_MD).mean(-1, keepdims=True)
        dx_MD = rate_M1 * (dunit_MD - dunit_MD.mean(-1, keepdims=True) - unit_MD * along_M1)
        return dx_MD.astype(dtype), (dout_MD * unit_MD).sum(0)

    normed = jax.custom_vjp(lambda x_MD, scale_D: normed_forward(x_MD, scale_D)[0])
    normed.defvjp(normed_forward, normed_backward)

    def attention(block, x_MD):
        qkv_M3D = x_MD @ block["qkv"].astype(dtype)
        if flash:
            query, key, value = (part.reshape(B, T, H, K) for part in jnp.split(qkv_M3D, 3, -1))
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
            return mixed.reshape(M, D) @ block["out"].astype(dtype)
        query_PTK, key_PTK, value_PTK = qkv_M3D.reshape(B, T, 3, H, K).transpose(2, 0, 3, 1, 4).reshape(3, B * H, T, K)
        query_PTK, mixed = query_PTK * K**-0.5, []
        for first, end in ends:
            query_PtK, key_PSK, value_PSK = query_PTK[:, first:end], key_PTK[:, :end], value_PTK[:, :end]
            scores_PtS = jnp.einsum("ptk,psk->pts", query_PtK, key_PSK, preferred_element_type=jnp.float32)
            shares_PtS = jax.nn.softmax(jnp.where(causal_TT[first:end, :end], scores_PtS, -jnp.inf)).astype(dtype)
            mixed.append(jnp.einsum("pts,psk->ptk", shares_PtS, value_PSK))
        mixed_PTK = jnp.concatenate(mixed, axis=1)
        return mixed_PTK.reshape(B, H, T, K).transpose(0, 2, 1, 3).reshape(M, D) @ block["out"].astype(dtype)

    def mean_nats(params, inputs_BT, targets_BT):
        x_MD = (params["embed"][inputs_BT.reshape(M)] + jnp.tile(params["positions"], (B, 1))).astype(dtype)
        for block in params["blocks"]:
            x_MD += attention(block, normed(x_MD, block["attention_norm"]))
            inner_MF = jax.nn.gelu(normed(x_MD, block["mlp_norm"]) @ block["up"].astype(dtype), approximate=True)
            x_MD += inner_MF @ block["down"].astype(dtype)
        features_MD = normed(x_MD, params["norm"])
        embed_VD = params["embed"].astype(dtype)
        logits_MV = jnp.einsum("md,vd->mv", features_MD, embed_VD, preferred_element_type=jnp.float32)
        target_M = jnp.take_along_axis(logits_MV, targets_BT.reshape(M, 1), axis=-1)[:, 0]
        return (jax.nn.logsumexp(logits_MV, axis=-1) - target_M).mean()

    def step(state, inputs_BT, targets_BT, lr):
        params, firsts, seconds, count = state
        loss, grads = jax.value_and_grad(mean_nats)(params, inputs_BT, targets_BT)
        norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
        shrink, count = clip / jnp.maximum(norm, clip), count + 1
        first_rate, second_rate = 1 / (1 - b1**count), 1 / (1 - b2**count)
        firsts = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * (g * shrink), firsts, grads)
        seconds = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * shrink) ** 2, seconds, grads)

        def moved(p, m, v):
            update = m * first_rate / (jnp.sqrt(v * second_rate) + eps)
            return p - lr * (update + decay * p if p.ndim > 1 else update)

        return (jax.tree.map(moved, params, firsts, seconds), firsts, seconds, count), loss

    random = np.random.default_rng(0)

    def normal(*shape, std=0.02):
        return jnp.asarray(random.standard_normal(shape, np.float32) * np.float32(std))

    def ones():
        return jnp.ones(D, jnp.float32)

    last = 0.02 / (2 * L) ** 0.5  # of the products that are added to the residual stream
    blocks = [
        {"attention_norm": ones(), "qkv": normal(D, 3 * D), "out": normal(D, D, std=last)}
        | {"mlp_norm": ones(), "up": normal(D, 4 * D), "down": normal(4 * D, D, std=last)}
        for _ in range(L)
    ]
    params = {"embed": normal(V, D), "positions": normal(T, D), "blocks": blocks, "norm": ones()}
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    return jax.jit(step, donate_argnums=0), (params, *zeros, jnp.float32(0))
