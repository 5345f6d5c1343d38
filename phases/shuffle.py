"""A keyed permutation of 0..n-1, evaluated at any index in O(1) memory.

A balanced Feistel network permutes the 2**(2b) integers that cover n; an index that lands at n or above is sent
through again until it falls below n ("cycle walking", Black and Rogaway 2002), which keeps the map a bijection.
With fewer than 8 elements some orders are somewhat likelier than others: an index of 3 bits has little to mix.
No random generator takes part, so the order cannot change with numpy's random streams.
"""

import hashlib

import numpy as np

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
_ROUND_INCREMENTS_R1 = np.array([_GOLDEN * (r + 1) % 2**64 for r in range(_ROUNDS)], np.uint64)[:, None]
_FACTOR_1, _FACTOR_2, _MASK_64 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1
_FEW = 16  # rows: so few walk faster as plain integers than in an array


def stream_key(seed: int, source: str) -> int:
    """The 64-bit key of one source's order: from the seed and the source's *name*, never its place in a list."""
    digest = hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def permute(indices, sizes, keys, epochs) -> np.ndarray:
    """The element at each index of 0..size-1 in the order of an epoch: a bijection for each (size, key, epoch).

    All four are integers or integer arrays that broadcast together, so that one call serves rows of many sources;
    sizes are below 2**53. Returns int64. Raises ValueError for a size below 1.
    """
    if np.min(sizes) < 1:
        raise ValueError(f"a permutation needs at least 1 element, got size {np.min(sizes)}")
    shape = np.broadcast_shapes(*(np.shape(a) for a in (indices, sizes, keys, epochs)))
    values, sizes, keys, epochs = (
        np.broadcast_to(np.asarray(a).astype(np.uint64), shape).reshape(-1) for a in (indices, sizes, keys, epochs)
    )
    num_bits = np.frexp(np.maximum(sizes.astype(np.float64) - 1, 1))[1]  # of the largest index
    half_bits = np.maximum(1, (num_bits + 1) // 2).astype(np.uint64)
    epoch_keys = _mix(keys ^ _mix(epochs + np.uint64(_GOLDEN)))
    keys_RN = _mix(epoch_keys + _ROUND_INCREMENTS_R1)

    walking, rows = values, np.arange(len(values))
    permuted = np.empty_like(values)
    while len(rows) > _FEW:
        walking = _encipher(walking, half_bits, keys_RN)
        permuted[rows] = walking  # final for those that are below their size
        outside = np.flatnonzero(walking >= sizes)
        if len(outside) < len(rows):
            rows, walking, sizes, half_bits = (a[outside] for a in (rows, walking, sizes, half_bits))
            keys_RN = keys_RN.take(outside, axis=1)
    columns = (a.tolist() for a in (rows, walking, sizes, half_bits, keys_RN.T))
    for row, value, size, bits, keys_R in zip(*columns, strict=True):
        permuted[row] = _walk_one(value, size, bits, keys_R)
    return permuted.astype(np.int64).reshape(shape)


def _walk_one(value: int, size: int, half_bits: int, keys_R: list[int]) -> int:
    """Apply `_encipher` to one value until it falls below `size`, in plain integers."""
    mask = (1 << half_bits) - 1
    while True:
        left, right = value >> half_bits, value & mask
        for key in keys_R:
            x = right ^ key
            x = (x ^ x >> 30) * _FACTOR_1 & _MASK_64
            x = (x ^ x >> 27) * _FACTOR_2 & _MASK_64
            left, right = right, left ^ (x ^ x >> 31) & mask
        value = left << half_bits | right
        if value < size:
            return value


def _encipher(values_N: np.ndarray, half_bits_N: np.ndarray, keys_RN: np.ndarray) -> np.ndarray:
    """One pass through the network: the left and right halves change places at each round."""
    mask_N = (np.uint64(1) << half_bits_N) - np.uint64(1)
    left_N, right_N = values_N >> half_bits_N, values_N & mask_N
    for key_N in keys_RN:
        left_N, right_N = right_N, left_N ^ (_mix(right_N ^ key_N) & mask_N)
    return left_N << half_bits_N | right_N


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit.

    Takes arrays, whose products overflow without a warning, as they should.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTOR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return x ^ (x >> np.uint64(31))
