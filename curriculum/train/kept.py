"""What makes functions, and gives them again to a later run of the process.

jax knows a function by its identity, and of one that it has seen it neither traces, lowers nor compiles anything again.
So a run of the same model, optimizer and shapes as one before (a sweep over mixtures or rates, a branch, a resume)
begins at once. Only the program's own functions are kept: what the user's call may have changed meanwhile.
"""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

# By all that a function is made from. Only the latest: each holds what was compiled of it in memory.
kept = lru_cache(maxsize=8)
_keeping = kept(kept)


def keeping(make: Callable, own: bool) -> Callable:
    """`make`; with `own`, if it makes all of the program's own functions, one that makes nothing twice of the same."""
    return _keeping(make) if own else make


def jitted_by_shapes(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of a tree of arrays, compiled.

    jax keeps all that it has compiled of one function. So trees of other shapes are given to another one, and only the
    latest stay in memory.
    """
    import jax  # not by `--help`, which knows the optimizers

    @kept
    def of(*_: Any) -> Callable[[Any], Any]:
        return jax.jit(partial(function))

    @wraps(function)
    def call(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return of(structure, *((leaf.shape, leaf.dtype) for leaf in leaves))(tree)

    return call
