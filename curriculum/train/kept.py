"""What makes functions, and gives them again to a later run of the process.

jax knows a function by its identity, and of one that it has seen it neither traces, lowers nor compiles anything again.
So a run of the same model, optimizer and shapes as one before (a sweep over mixtures or rates, a branch, a resume)
begins at once. Only the program's own functions are kept: what the user's call may have changed meanwhile.
"""

from collections.abc import Callable
from functools import lru_cache

# By all that a function is made from. Only the latest: each holds what was compiled of it in memory.
kept = lru_cache(maxsize=8)
_keeping = kept(kept)


def keeping(make: Callable, own: bool) -> Callable:
    """`make`; with `own`, if it makes all of the program's own functions, one that makes nothing twice of the same."""
    return _keeping(make) if own else make
