"""Exact quotas: which source each sequence of a segment comes from, and how many came before it.

The sequences of a segment are split in two, and each part in two again, down a binary tree whose leaves are
the sources. A node that has been given m sequences passes to its left child

    L(m) = round(left child's share at the moment when the node's own share is exactly m)

which is a closed form in m, so any position is found without walking there. A split rounds by at most 1/2, and a
leaf inherits its ancestors' errors in proportion to its part of them: in a constant mixture it is never further
from its exact share than

    1/2 x sum over the nodes from the leaf up to the root's child of share(leaf) / share(node).

The tree is built from the leaves up so that this bound stays small for every source. Along a ramp the shares move,
and it is kept small at both ends and between them; `Quotas.error_bound` is its largest value.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

# Cumulative shares are integers in units of 2**-20 of a sequence: sums over a subtree are exact, monotone and
# never drift, and 2**33 sequences still fit a float64 product.
_UNIT_BITS = 20
_HALF = 1 << (_UNIT_BITS - 1)


def normalised(mixture: Mapping[str, float]) -> dict[str, float]:
    """A mixture of any scale as shares that add up to 1, without those that are 0 or too small for a float."""
    total = math.fsum(mixture.values())
    return {name: weight / total for name, weight in mixture.items() if weight > 0 and weight / total > 0}


class _Split:
    """An inner node: how many of its first m sequences go to its left child."""

    def __init__(self, left, right, own_K: np.ndarray, left_K: np.ndarray, tail_own: float, tail_left: float):
        self.left, self.right = left, right
        self._own_K, self._left_K = own_K, left_K  # cumulative shares at the knots, in units
        light = min(tail_left, tail_own - tail_left)
        self._tail_is_left = tail_left <= tail_own - tail_left
        self._tail_light = light / tail_own if tail_own > 0 else 0.0

    def to_left(self, counts: np.ndarray) -> np.ndarray:
        """L(m) for each m. Both L(m) and m - L(m) are monotone, so each sequence goes to exactly one child."""
        units = counts << _UNIT_BITS
        if len(self._own_K) == 1:  # without a ramp
            return (self._tail(units) + _HALF) >> _UNIT_BITS
        knot = self._own_K.searchsorted(units, side="right") - 1
        offset = units - self._own_K[knot]
        left = self._tail(offset)
        inside = knot < len(self._own_K) - 1
        if inside.any():
            k, part = knot[inside], offset[inside]
            own = self._own_K[k + 1] - self._own_K[k]
            to_left = self._left_K[k + 1] - self._left_K[k]
            to_right = own - to_left
            light = np.floor(part / own * np.minimum(to_left, to_right)).astype(np.int64)
            left[inside] = np.where(to_left <= to_right, light, part - light)
        return (self._left_K[knot] + left + _HALF) >> _UNIT_BITS

    def _tail(self, offset: np.ndarray) -> np.ndarray:
        """The left child's units among `offset` units after the last knot."""
        # The lighter child is computed and the heavier is what remains: a share of at most 1/2 cannot be
        # rounded up twice between neighbours, whatever float64 does.
        light = np.floor(offset * self._tail_light).astype(np.int64)
        return light if self._tail_is_left else offset - light


class Quotas:
    """The order of sources inside one segment, by position (sequences since its order of data began).

    Sequences are drawn by `mixture` (source to proportion, any positive scale). With a ramp they are first drawn by
    (1 - x) `ramp_from` + x `mixture`, for one step of `batch_size` sequences per x in `ramp_progress`, and then by
    `mixture`, without end. Nothing depends on where the segment ends or on the order in which sources are named.
    """

    def __init__(
        self,
        mixture: Mapping[str, float],
        ramp_from: Mapping[str, float] | None = None,
        ramp_progress: Sequence[float] | np.ndarray = (),
        batch_size: int = 1,
    ):
        ends = [mixture] if ramp_from is None else [ramp_from, mixture]
        self.sources = tuple(sorted({name for end in ends for name in end if end[name] > 0}))
        ends_S = [np.array([end.get(name, 0.0) for name in self.sources]) for end in ends]
        last_S, first_S = ends_S[-1] / ends_S[-1].sum(), ends_S[0] / ends_S[0].sum()
        moved_K = np.concatenate([[0.0], np.cumsum(ramp_progress)])
        steps_K = np.arange(len(moved_K))
        units_SK = np.empty((len(self.sources), len(moved_K)), np.int64)
        for units_K, first, last in zip(units_SK, first_S, last_S, strict=True):  # one by one: ramps may be long
            taken_K = first * (steps_K - moved_K) + last * moved_K
            units_K[:] = np.rint(taken_K * (batch_size << _UNIT_BITS))
        progress_X = np.linspace(0.0, 1.0, 1 if ramp_from is None else 5)[:, None]
        shares_XS = first_S + progress_X * (last_S - first_S)
        tree, self.error_bound = _tree(shares_XS.tobytes(), len(shares_XS))
        self._root = _splits(tree, units_SK, last_S)[0]

    def counts(self, positions) -> np.ndarray:
        """Sequences taken from each source before each position: shape `positions.shape + (num_sources,)`."""
        positions = np.asarray(positions, np.int64)
        out = np.zeros((positions.size, len(self.sources)), np.int64)

        def descend(node, counts):
            if isinstance(node, int):
                out[:, node] = counts
                return
            left = node.to_left(counts)
            descend(node.left, left)
            descend(node.right, counts - left)

        descend(self._root, positions.ravel())
        return out.reshape(*positions.shape, len(self.sources))

    def count(self, source: str, positions) -> np.ndarray:
        """`counts` of one source, without those of the others: shape `positions.shape`."""
        counts = np.asarray(positions, np.int64)
        if source not in self._paths:
            return np.zeros_like(counts)
        for node, is_left in self._paths[source]:
            left = node.to_left(counts)
            counts = left if is_left else counts - left
        return counts

    @functools.cached_property
    def _paths(self) -> dict[str, tuple[tuple[_Split, bool], ...]]:
        """The way from the root to each source: the nodes, and whether it goes on to their left child."""
        found = {}

        def descend(node, path):
            if isinstance(node, int):
                found[self.sources[node]] = path
                return
            descend(node.left, (*path, (node, True)))
            descend(node.right, (*path, (node, False)))

        descend(self._root, ())
        return found

    def locate(self, positions) -> tuple[np.ndarray, np.ndarray]:
        """(source index into `sources`, sequences of that source before it) for each position in a 1-D array."""
        positions = np.asarray(positions, np.int64)
        source, before = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)

        def descend(node, rows, counts):
            if isinstance(node, int):
                source[rows], before[rows] = node, counts
                return
            left, after = node.to_left(counts), node.to_left(counts + 1)
            goes_left = after > left
            descend(node.left, rows[goes_left], left[goes_left])
            descend(node.right, rows[~goes_left], (counts - left)[~goes_left])

        descend(self._root, np.arange(len(positions)), positions)
        return source, before


@functools.lru_cache(maxsize=512)
def _tree(shares: bytes, num_points: int):
    """(tree of nested pairs of source indices, its error bound in sequences) for shares at some points of a ramp.

    `shares` are the bytes of a float64 array [points, sources]. Each round joins the two nodes whose leaves would then
    have the smallest worst bound, with a penalty on heavy pairs. Ties go by name order, so the tree does not depend on
    the order of declaration. Cached, because segments are made again and again with the same shares.
    """
    shares_XS = np.frombuffer(shares).reshape(num_points, -1)
    num_sources = shares_XS.shape[1]
    if num_sources == 1:
        return 0, 0.0
    nodes = list(range(num_sources))  # slot -> subtree
    slot_S = np.arange(num_sources)  # leaf -> the slot of its subtree
    share_XN = shares_XS.copy()  # by slot
    bound_XS = np.ones((num_points, num_sources))  # sum so far, including the leaf's current subtree
    joined_N = np.zeros(num_sources, bool)  # slots that were merged into another

    def join_costs(slot):
        """Cost of joining `slot` with each other slot: worst bound of the leaves in both, plus the weight."""
        sum_XN = share_XN + share_XN[:, slot : slot + 1]
        whole_XN = _divisor(sum_XN)
        own = slot_S == slot
        own_XON = bound_XS[:, own, None] + shares_XS[:, own, None] / whole_XN[:, None]
        worst_N = own_XON.reshape(-1, num_sources).max(0)
        np.maximum.at(worst_N, slot_S, (bound_XS + shares_XS / whole_XN[:, slot_S]).max(0))
        worst_N += 2 * sum_XN.max(0)
        worst_N[joined_N], worst_N[slot] = np.inf, np.inf
        return worst_N

    cost_NN = np.stack([join_costs(slot) for slot in range(num_sources)])
    nearest_N = cost_NN.argmin(1)
    least_N = cost_NN.min(1)
    for _ in range(num_sources - 1):
        a = int(least_N.argmin())
        b = int(nearest_N[a])
        nodes[a] = nodes[a], nodes[b]
        joined_N[b] = True
        share_XN[:, a] += share_XN[:, b]
        slot_S[slot_S == b] = a
        worst = bound_XS.max()  # before the root is counted, which has no error of its own
        own = slot_S == a
        bound_XS[:, own] += shares_XS[:, own] / _divisor(share_XN[:, a : a + 1])
        cost_NN[b], cost_NN[:, b] = np.inf, np.inf
        cost_NN[a] = cost_NN[:, a] = join_costs(a)
        least_N[b] = np.inf
        moved = np.flatnonzero(((nearest_N == a) | (nearest_N == b) | (cost_NN[a] <= least_N)) & ~joined_N)
        nearest_N[moved] = cost_NN[moved].argmin(1)
        least_N[moved] = cost_NN[moved, nearest_N[moved]]
    return nodes[a], worst / 2


def _divisor(whole):
    """`whole` as the divisor of its parts, with 1 in place of 0: the parts of 0 are 0, and so is their ratio then."""
    return np.where(whole > 0, whole, 1.0)


def _splits(tree, units_SK: np.ndarray, last_S: np.ndarray):
    """(node, its cumulative units at the knots, its share after the last knot) of a tree of nested pairs."""
    if isinstance(tree, int):
        return tree, units_SK[tree], last_S[tree]
    (left, left_K, left_last), (right, right_K, right_last) = (_splits(t, units_SK, last_S) for t in tree)
    own_K, own_last = left_K + right_K, left_last + right_last
    return _Split(left, right, own_K, left_K, own_last, left_last), own_K, own_last
