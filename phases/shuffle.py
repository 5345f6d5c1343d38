"""A keyed permutation of 0..n-1, evaluated at any index in O(1) memory.

A balanced Feistel network permutes the 2**(2b) integers that cover n; an index that lands at n or above is sent
through again until it falls below n ("cycle walking", Black and Rogaway 2002), which keeps the map a bijection.
Every operation is an integer one, so the order never changes with numpy's random streams.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64


def stream_key(seed: int, source: str) -> int:
    """The 64-bit key of one source's order: from the seed and the source's *name*, never its place in a list."""
    digest = hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def permute(indices, sizes, keys, epochs) -> np.ndarray:
    """Where each index of 0..size-1 stands in the order of its epoch; a bijection for each (size, key, epoch).

    All four are integers or integer arrays that broadcast together, so that rows of many sources go in one call;
    sizes below 2**53. Returns int64. Raises ValueError for a size below 1.
    """
    if np.min(sizes) < 1:
        raise ValueError(f"a permutation needs at least 1 element, got size {np.min(sizes)}")
    values, sizes, keys, epochs = np.broadcast_arrays(
        *(np.asarray(a, np.uint64) for a in (indices, sizes, keys, epochs))
    )
    num_bits = np.frexp(np.maximum(sizes.astype(np.float64) - 1, 1))[1]  # of the largest index
    half_bits = np.maximum(1, (num_bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    epoch_keys = _mix(keys ^ _mix(epochs + np.uint64(_GOLDEN)))
    round_keys = [_mix(epoch_keys + np.uint64(_GOLDEN * (r + 1) % 2**64)) for r in range(_ROUNDS)]

    def walk(values, half_bits, mask, round_keys):
        left, right = values >> half_bits, values & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half_bits) | right

    values = walk(values, half_bits, mask, round_keys)
    while (outside := values >= sizes).any():
        again = (values[outside], half_bits[outside], mask[outside], [k[outside] for k in round_keys])
        values[outside] = walk(*again)
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
