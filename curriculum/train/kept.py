"""What makes functions, and gives them again to a later run of the process.

jax knows a function by its identity, and of one that it has seen it neither traces, lowers nor compiles anything again.
So a run of the same model, optimizer and shapes as one before (a sweep over mixtures or rates, a branch, a resume)
begins at once. Only the program's own functions are kept: what the user's call may have changed meanwhile.
"""

from functools import lru_cache

kept = lru_cache(maxsize=16)  # by all that a function is made from; the latest ones, as each holds its programs
