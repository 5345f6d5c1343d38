"""A decoder-only transformer: flax.nnx modules that describe it, pure functions over a plain dict that run it.

The modules are built once, abstractly, to learn the graph and the shapes. From then on the model is a nested dict
of float32 arrays, which goes through jit, optax and a checkpoint without any of them knowing flax.

Inside, the tokens are the rows of one matrix, `x_MD`: the gradient of a weight is then one plain product, where a
third axis would make XLA copy a transposed cotangent for each of them. Layers are unrolled. Both were the faster
way on a CPU.

Shape suffixes: B rows, T positions, M = B*T tokens, D width, V vocabulary, H heads, K head width; H = J*G heads
in J groups that share keys and values, P = B*J such groups in a batch.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from curriculum.model.presets import ModelConfig


def init_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Float32 arrays on the host, as a nested dict keyed by the names of the modules below.

    As in GPT-2: weights are normal with a deviation of 0.02, divided by sqrt(2 n_layer) where a product is added
    to the residual stream; biases 0, norm scales 1. An array depends on the seed, its name and its shape alone.
    """
    residual_std = 0.02 / (2 * config.n_layer) ** 0.5

    def draw(path: tuple, array: jax.ShapeDtypeStruct) -> np.ndarray:
        *_, module, name = names = [part.key for part in path]
        if name in ("scale", "bias"):
            return np.full(array.shape, name == "scale", np.float32)
        key = hashlib.blake2b(f"{seed}/{'/'.join(names)}".encode(), digest_size=16).digest()
        normal = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        std = residual_std if module in ("out", "down") else 0.02
        return normal.standard_normal(array.shape, np.float32) * np.float32(std)

    _, shapes = _blueprint(config)
    return jax.tree.map_with_path(draw, shapes)


def forward(config: ModelConfig, params: dict[str, Any], tokens_BT: jax.Array) -> jax.Array:
    """logits_BTV, float32; pure and jittable, `config` static. Position t sees tokens 0..t of its row.

    Raises ValueError where T is above max_seq_len.
    """
    num_positions = tokens_BT.shape[1]
    if num_positions > config.max_seq_len:
        raise ValueError(f"got {num_positions} positions, expected at most max_seq_len {config.max_seq_len}")
    graph, _ = _blueprint(config)
    return nnx.merge(graph, params)(tokens_BT)


def nats_per_token(
    config: ModelConfig, params: dict[str, Any], inputs_BT: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(nats_BT, correct_BT): -ln p(target) in float32, and whether the target is the likeliest token."""
    logits_BTV = forward(config, params, inputs_BT).astype(jnp.float32)
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    return nats_BT, logits_BTV.argmax(axis=-1) == targets_BT


@lru_cache
def _blueprint(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The graph of the modules, and their arrays' shapes; nothing is computed."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


class Transformer(nnx.Module):
    """Embedding, blocks, norm, and a head that is the embedding's transpose where the two are tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        learned, tied = config.pos_encoding == "learned", config.tie_embeddings
        self.embed = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        self.positions = nnx.Embed(config.max_seq_len, config.d_model, rngs=rngs) if learned else None
        self.blocks = nnx.Dict({f"{layer:03}": Block(config, rngs) for layer in range(config.n_layer)})
        self.norm = _norm(config, rngs)
        self.head = None if tied else nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        B, T = tokens_BT.shape
        x_MD = self.embed(tokens_BT.reshape(B * T))
        if self.positions is not None:
            x_MD += jnp.tile(self.positions.embedding[:T], (B, 1))
        for layer in sorted(self.blocks):
            x_MD = self.blocks[layer](x_MD, B)
        x_MD = self.norm(x_MD)
        logits_MV = self.embed.attend(x_MD) if self.head is None else self.head(x_MD)
        return logits_MV.reshape(B, T, -1)


class Block(nnx.Module):
    """Attention, then the feed-forward, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_MD: jax.Array, num_rows: int) -> jax.Array:
        x_MD += self.attention(self.attention_norm(x_MD), num_rows)
        return x_MD + self.mlp(self.mlp_norm(x_MD))


class Attention(nnx.Module):
    """Causal self-attention; n_head / n_kv_head query heads in turn share a key and a value head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.query = _linear(config, config.d_model, config.d_model, rngs)
        self.key = _linear(config, config.d_model, config.n_kv_head * config.head_width, rngs)
        self.value = _linear(config, config.d_model, config.n_kv_head * config.head_width, rngs)
        self.out = _linear(config, config.d_model, config.d_model, rngs)

    def __call__(self, x_MD: jax.Array, num_rows: int) -> jax.Array:
        B, T, K = num_rows, x_MD.shape[0] // num_rows, self.config.head_width
        J, G = self.config.n_kv_head, self.config.n_head // self.config.n_kv_head
        query_BTHK = self.query(x_MD).reshape(B, T, J * G, K)
        key_BTJK = self.key(x_MD).reshape(B, T, J, K)
        value_BTJK = self.value(x_MD).reshape(B, T, J, K)
        if self.config.pos_encoding == "rope":
            angles_TK = rope_angles(T, K, self.config.rope_theta)
            query_BTHK, key_BTJK = rotate(query_BTHK, angles_TK), rotate(key_BTJK, angles_TK)

        # The queries of a group stand below one another, so that no key or value is repeated, and both products
        # have the one batch axis in front that XLA's fast routine wants.
        query_PGTK = (query_BTHK * K**-0.5).transpose(0, 2, 1, 3).reshape(B * J, G * T, K)
        key_PTK = key_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        value_PTK = value_BTJK.transpose(0, 2, 1, 3).reshape(B * J, T, K)
        scores_PGTT = jnp.einsum("pqk,ptk->pqt", query_PGTK, key_PTK)
        visible_GTT = jnp.tile(jnp.arange(T), G)[:, None] >= jnp.arange(T)
        shares_PGTT = jax.nn.softmax(jnp.where(visible_GTT, scores_PGTT, -jnp.inf), axis=-1)
        mixed_PGTK = jnp.einsum("pqt,ptk->pqk", shares_PGTT, value_PTK)
        return self.out(mixed_PGTK.reshape(B, J * G, T, K).transpose(0, 2, 1, 3).reshape(B * T, -1))


class MLP(nnx.Module):
    """gelu in its tanh form, or swiglu (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        gated = config.mlp_type == "swiglu"
        self.gate = _linear(config, config.d_model, config.d_ff, rngs) if gated else None
        self.up = _linear(config, config.d_model, config.d_ff, rngs)
        self.down = _linear(config, config.d_ff, config.d_model, rngs)

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(nnx.gelu(self.up(x_MD), approximate=True))
        return self.down(nnx.silu(self.gate(x_MD)) * self.up(x_MD))


def rope_angles(num_positions: int, head_width: int, theta: float) -> np.ndarray:
    """angles_TK, K being half a head: position t times theta^(-2k / head_width) (arXiv:2104.09864), float64."""
    return np.outer(np.arange(num_positions), theta ** (-np.arange(0, head_width, 2) / head_width))


def rotate(x_BTHK: jax.Array, angles_TK: np.ndarray) -> jax.Array:
    """Each head turned by its position's angles, its first half paired with its second, as in Llama."""
    cos, sin = np.cos(angles_TK)[:, None].astype(np.float32), np.sin(angles_TK)[:, None].astype(np.float32)
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _linear(config: ModelConfig, width_in: int, width_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(width_in, width_out, use_bias=config.bias, rngs=rngs)


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
    if config.norm_type == "rmsnorm":
        return nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
    # Fast variance is E[x^2] - E[x]^2, which cancels.
    return nnx.LayerNorm(
        config.d_model, epsilon=config.norm_eps, use_bias=config.bias, use_fast_variance=False, rngs=rngs
    )
