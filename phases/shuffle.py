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


def permute(indices: np.ndarray, size: int, key: int, epochs: np.ndarray) -> np.ndarray:
    """Where each index of 0..size-1 stands in the order of its epoch; a bijection for each (key, epoch).

    `indices` and `epochs` are integer arrays of one shape; the result is int64 of that shape.
    """
    if size < 1:
        raise ValueError(f"a permutation needs at least 1 element, got size {size}")
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    values = np.asarray(indices).astype(np.uint64)
    epoch_keys = _mix(np.uint64(key) ^ _mix(np.asarray(epochs).astype(np.uint64) + np.uint64(_GOLDEN)))
    round_keys = [_mix(epoch_keys + np.uint64(_GOLDEN * (r + 1) % 2**64)) for r in range(_ROUNDS)]

    def walk(values, round_keys):
        left, right = values >> half_bits, values & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half_bits) | right

    values = walk(values, round_keys)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = walk(values[outside], [k[outside] for k in round_keys])
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
