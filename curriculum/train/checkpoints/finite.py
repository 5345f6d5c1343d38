"""Whether a state is finite: one that is not is neither saved nor continued from."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curriculum.model.model import by_name
from curriculum.train.kept import jitted_by_shapes
from curriculum.train.mesh import on_host
from curriculum.train.step import TrainState


class NonFiniteState(ArithmeticError):
    """The state that was to be saved holds an infinity or NaN."""


_looked_at: list[weakref.ref] = []  # the leaves last found finite; arrays are never changed


def check_finite(state: TrainState) -> None:
    """Raise NonFiniteState if parameters, optimizer state or moving average hold an infinity or NaN, naming the first.

    A state that the last call found finite is not read again: several callers ask before a save.
    """
    global _looked_at
    parts = {"params": state.params, "opt_state": state.opt_state, "ema": state.ema}
    leaves = jax.tree.leaves(parts)
    if len(leaves) == len(_looked_at) and all(seen() is leaf for seen, leaf in zip(_looked_at, leaves, strict=True)):
        return
    finite = on_host(_finite(parts))
    if not finite.all():
        name = list(by_name(parts))[int(np.argmin(finite))]
        raise NonFiniteState(f"{name} is not finite after step {int(state.step)}")
    _looked_at = [weakref.ref(leaf) for leaf in leaves]


@jitted_by_shapes
def _finite(tree: Any) -> jax.Array:
    return jnp.stack([_finite_leaf(leaf) for leaf in jax.tree.leaves(tree)])


@jax.jit  # jitted by itself, so that the many leaves of one shape are traced and lowered once
def _finite_leaf(leaf: jax.Array) -> jax.Array:
    """Whether a leaf is finite everywhere: times 0 a number is 0, an infinity or NaN is NaN.

    XLA spreads the sums of rows over the cores of a CPU: 0.8 of the time of `isfinite(leaf).all()`. A maximum would
    not do: on CPUs the maximum of a matrix ignores NaN.
    """
    return ((jnp.atleast_1d(leaf) * 0).sum(axis=-1) == 0).all()
