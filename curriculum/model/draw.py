"""Sampling the next token from logits; temperature, top-k, top-p and min-p can change without compiling.

No sort is needed: each filter keeps all ids that are at least as likely as some id, so it is a threshold, which
bisection finds in 31 passes over the logits.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curriculum.sampling import Sampling


class DrawKnobs(NamedTuple):
    """`Sampling` as a compiled function takes it."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    min_p: np.float32

    @classmethod
    def of(cls, sampling: Sampling) -> DrawKnobs:
        temperature, top_p, min_p = map(np.float32, (sampling.temperature, sampling.top_p, sampling.min_p))
        return cls(temperature, np.int32(sampling.top_k), top_p, min_p)


def draw(logits_BV: jax.Array, keys_B2: jax.Array, positions_B: jax.Array, knobs: DrawKnobs) -> jax.Array:
    """tokens_B, int32. A row's draw depends only on its logits, its key (uint32) and the token's position."""

    def one_of_many() -> jax.Array:
        scaled_BV = scaled(logits_BV, knobs)
        return jax.vmap(_categorical)(keys_B2, positions_B, scaled_BV)

    return jax.lax.cond(knobs.temperature > 0, one_of_many, lambda: logits_BV.argmax(axis=-1).astype(jnp.int32))


def scaled(logits_BV: jax.Array, knobs: DrawKnobs) -> jax.Array:
    """The logits over the temperature, shifted so that the largest is 0, and -inf for ids that the filters remove."""
    temperature = jnp.where(knobs.temperature > 0, knobs.temperature, 1)
    scaled_BV = (logits_BV - logits_BV.max(axis=-1, keepdims=True)) / temperature
    filters = (knobs.top_k > 0) | (knobs.top_p < 1) | (knobs.min_p > 0)
    return jax.lax.cond(filters, lambda: jnp.where(_kept(scaled_BV, knobs), scaled_BV, -jnp.inf), lambda: scaled_BV)


def _kept(scaled_BV: jax.Array, knobs: DrawKnobs) -> jax.Array:
    order_BV, odds_BV = _order(scaled_BV), jnp.exp(scaled_BV)

    def holds_top_k(t_B1: jax.Array) -> jax.Array:
        return (order_BV >= t_B1).sum(axis=-1, keepdims=True) >= jnp.minimum(knobs.top_k, scaled_BV.shape[-1])

    in_top_k_BV = order_BV >= _largest(scaled_BV, holds_top_k, knobs.top_k > 0)
    odds_BV = jnp.where(in_top_k_BV, odds_BV, 0)
    mass_B1 = odds_BV.sum(axis=-1, keepdims=True) * knobs.top_p

    def holds_top_p(t_B1: jax.Array) -> jax.Array:
        return jnp.where(order_BV >= t_B1, odds_BV, 0).sum(axis=-1, keepdims=True) >= mass_B1

    in_top_p_BV = order_BV >= _largest(scaled_BV, holds_top_p, knobs.top_p < 1)
    return in_top_k_BV & in_top_p_BV & (odds_BV >= knobs.min_p)


def _order(x_BV: jax.Array) -> jax.Array:
    """int32 numbers in the same order as the float32 ones."""
    bits_BV = jax.lax.bitcast_convert_type(x_BV, jnp.int32)
    return jnp.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)


def _largest(scaled_BV: jax.Array, holds: Callable[[jax.Array], jax.Array], asked: jax.Array) -> jax.Array:
    """The largest threshold, in `_order` and at most that of 0, for which `holds` is true; it is true for that of -inf.

    If not `asked`, the threshold of -inf.
    """
    low_B1 = jnp.full((scaled_BV.shape[0], 1), _order(jnp.float32(-jnp.inf)))

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1 + 1) // 2
        fits_B1 = holds(middle_B1)
        return jnp.where(fits_B1, middle_B1, low_B1), jnp.where(fits_B1, high_B1, middle_B1 - 1)

    # A known number of rounds: on a GPU the host would otherwise ask before each of them whether it is the last.
    bounds = low_B1, jnp.zeros_like(low_B1)
    return jax.lax.cond(asked, lambda: jax.lax.fori_loop(0, 31, halve, bounds)[0], lambda: low_B1)


def _categorical(key_2: jax.Array, position: jax.Array, scaled_V: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
    return jax.random.categorical(jax.random.fold_in(key, position), scaled_V).astype(jnp.int32)
