"""Sophia's update direction: momentum over a running estimate of the Hessian's diagonal, clipped at 1."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SophiaState(NamedTuple):
    """`momentum` and `hessian` are trees like the parameters."""

    count: jax.Array  # int32, updates so far
    momentum: Any
    hessian: Any


def scale_by_sophia(
    b1: float, b2: float, gamma: float, eps: float, every: int
) -> optax.GradientTransformationExtraArgs:
    """clip(m / max(gamma h, eps), 1): Algorithm 3 of arXiv:2305.14342, without weight decay, sign and learning rate.

    m is a moving average of the gradients with decay `b1`, h one of the Hessian estimates with decay `b2`; neither is
    bias-corrected. `update` takes `hessian_diagonal`, a function without arguments that returns a tree like the
    parameters: an estimate on the current batch. It is called inside the compiled step, at updates 0, `every`, 2
    `every` and so on. An estimate that is not finite everywhere leaves h unchanged, as it would stay in the average
    for good.
    """

    def init(params):
        return SophiaState(
            count=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(jnp.zeros_like, params),
            hessian=jax.tree.map(jnp.zeros_like, params),
        )

    def update(grads, state, params=None, *, hessian_diagonal, **_):
        def refreshed(hessian):
            estimate = hessian_diagonal()
            is_finite = jnp.stack([jnp.isfinite(e).all() for e in jax.tree.leaves(estimate)]).all()
            return jax.tree.map(lambda h, e: jnp.where(is_finite, b2 * h + (1 - b2) * e, h), hessian, estimate)

        momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.momentum, grads)
        hessian = jax.lax.cond(state.count % every == 0, refreshed, lambda h: h, state.hessian)
        updates = jax.tree.map(lambda m, h: jnp.clip(m / jnp.maximum(gamma * h, eps), -1, 1), momentum, hessian)
        return updates, SophiaState(state.count + 1, momentum, hessian)

    return optax.GradientTransformationExtraArgs(init, update)
