"""Exact quotas: every draw is counted and compared with shares accumulated one position at a time."""

import numpy as np
import processor
import pytest

from phases.mixture import Quotas, _tree


def exact_shares(mixtures, spans, num_positions, sources):
    """Cumulative exact share before each position, by walking: the slow, independent way."""
    rows = np.array([[m.get(name, 0.0) for name in sources] for m in mixtures])
    rows /= rows.sum(1, keepdims=True)
    owner = np.minimum(np.repeat(np.arange(len(spans) + 1), [*spans, num_positions])[:num_positions], len(spans))
    return np.vstack([np.zeros(len(sources)), np.cumsum(rows[owner], 0)])


def walk(quotas, num_positions):
    """Counts before each position, from the draws themselves; checks that `locate` counts along."""
    source, before = quotas.locate(np.arange(num_positions))
    counts = np.zeros((num_positions + 1, len(quotas.sources)), np.int64)
    for i in range(len(quotas.sources)):
        counts[1:, i] = np.cumsum(source == i)
    assert np.array_equal(counts[np.arange(num_positions), source], before)
    return counts


def random_mixture(rng, names):
    weights = [rng.random, lambda n: rng.exponential(size=n) ** 3, lambda n: 0.7 ** rng.permutation(n), np.ones]
    drawn = weights[rng.integers(4)](len(names))
    if rng.random() < 0.5:
        drawn = drawn * (rng.random(len(names)) < 0.6)
    drawn[rng.integers(len(names))] += 0.05
    return dict(zip(names, drawn, strict=True))


def test_two_equal_sources_alternate():
    source, before = Quotas({"a": 1.0, "b": 1.0}).locate(np.arange(6))
    assert source.tolist() in ([0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0])
    assert before.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_sources", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("seed", range(4))
def test_constant_mixture_is_within_two_sequences_at_every_prefix(num_sources, seed):
    names = [f"s{i:02d}" for i in range(num_sources)]
    mixture = random_mixture(np.random.default_rng(seed), names)
    quotas = Quotas(mixture)
    counts = walk(quotas, 60_000)
    exact = exact_shares([mixture], [], 60_000, quotas.sources)
    error = np.abs(counts - exact).max()
    assert error < 2 and error <= quotas.error_bound + 1e-6
    assert (counts.sum(1) == np.arange(60_001)).all()


@pytest.mark.parametrize("num_sources, steps, batch", [(2, 1, 8), (3, 300, 8), (10, 50, 32), (50, 5, 64), (50, 300, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_ramp_is_within_two_sequences_at_every_prefix(num_sources, steps, batch, seed):
    rng = np.random.default_rng(seed)
    names = [f"s{i:02d}" for i in range(num_sources)]
    start, end = (random_mixture(rng, names) for _ in range(2))
    start, end = ({n: w / sum(m.values()) for n, w in m.items()} for m in (start, end))
    progress = np.arange(1, steps + 1) / steps
    quotas = Quotas(end, start, progress, batch)
    moving = [{n: (1 - x) * start[n] + x * end[n] for n in names} for x in progress]
    total = steps * batch + 4000
    counts = walk(quotas, total)
    exact = exact_shares([*moving, end], [batch] * steps, total, quotas.sources)
    assert np.abs(counts - exact).max() < 2


def test_a_million_draws_with_a_source_of_one_in_a_million():
    quotas = Quotas({"web": 1 - 1e-6, "rare": 1e-6})
    counts = walk(quotas, 3_000_000)
    rare = counts[:, quotas.sources.index("rare")]
    assert np.abs(rare - np.arange(3_000_001) * 1e-6).max() <= 0.51
    assert rare[-1] == 3


def test_counts_anywhere_equal_the_walk():
    quotas = Quotas({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 1.0}, np.arange(1, 41) / 40, 16)
    counts = walk(quotas, 5000)
    positions = np.random.default_rng(0).integers(0, 5001, 500)
    assert np.array_equal(quotas.counts(positions), counts[positions])
    assert quotas.counts(np.int64(4321)).tolist() == counts[4321].tolist()
    for i, name in enumerate(quotas.sources):
        assert np.array_equal(quotas.count(name, positions), counts[positions, i])
    assert quotas.count("b", np.int64(4321)) == counts[4321, 1] and not quotas.count("another", positions).any()


def test_far_positions_cost_nothing_and_stay_exact():
    quotas = Quotas({"a": 0.7, "b": 0.3})
    far = 3_000_000_000
    source, before = quotas.locate(np.arange(far, far + 1000))
    counts = quotas.counts(np.arange(far, far + 1001))
    assert np.array_equal(np.diff(counts, axis=0), np.eye(2, dtype=np.int64)[source])
    assert np.abs(counts[0] - far * np.array([0.7, 0.3])).max() < 1


def test_order_of_declaration_and_zero_weights_change_nothing():
    positions = np.arange(5000)
    mixture = {"web": 0.6, "code": 0.25, "law": 0.15}
    expected = Quotas(mixture).locate(positions)
    for other in (
        {"law": 0.15, "web": 0.6, "code": 0.25},
        {**mixture, "new": 0.0},
        {n: 2 * w for n, w in mixture.items()},
    ):
        source, before = Quotas(other).locate(positions)
        assert np.array_equal(source, expected[0]) and np.array_equal(before, expected[1])


def test_a_plan_of_fifty_sources_and_a_long_ramp_is_quick():
    rng = np.random.default_rng(0)
    names = [f"s{i:02d}" for i in range(50)]
    start, end = random_mixture(rng, names), random_mixture(rng, names)

    def plan():
        Quotas(end, start, np.arange(1, 75_001) / 75_000, 32).counts(np.int64(75_000 * 32))

    assert processor.seconds(plan) < processor.loop_seconds(10e6)  # takes as long as about 1e6 rounds; 3.75e6 quotas


def slow_tree(shares_XS):
    """The tree by its definition: the cost of every two nodes that are left, before every joining."""
    bound_XS = np.ones_like(shares_XS)
    nodes = {slot: (slot, [slot]) for slot in range(shares_XS.shape[1])}

    def bounds(leaves):
        whole_X1 = shares_XS[:, leaves].sum(1, keepdims=True)
        ratio_XL = np.divide(
            shares_XS[:, leaves], whole_X1, out=np.zeros((len(whole_X1), len(leaves))), where=whole_X1 > 0
        )
        return bound_XS[:, leaves] + ratio_XL, 2 * whole_X1.max()

    def cost(pair):
        (_, left), (_, right) = (nodes[slot] for slot in pair)
        bound_XL, weight = bounds(left + right)
        return bound_XL.max() + weight, pair  # ties go by the pair

    while len(nodes) > 1:
        _, (a, b) = min(cost((a, b)) for a in nodes for b in nodes if a < b)
        (left, in_left), (right, in_right) = nodes[a], nodes.pop(b)
        worst = bound_XS.max()
        nodes[a] = (left, right), in_left + in_right
        bound_XS[:, nodes[a][1]] = bounds(nodes[a][1])[0]
    return nodes[0][0], worst / 2


@pytest.mark.parametrize("num_sources", [2, 3, 5, 9, 20])
@pytest.mark.parametrize("seed", range(8))
def test_the_tree_joins_the_cheapest_two_each_time(num_sources, seed):
    rng = np.random.default_rng(seed)
    first_S, last_S = rng.integers(0, (2, 40)[seed % 2], (2, num_sources)) / 1024  # exact; every other time with ties
    first_S[0] = last_S[-1] = 1 / 1024
    for progress_X in ([0.0], [0.0, 0.5, 1.0]):
        shares_XS = first_S + np.array(progress_X)[:, None] * (last_S - first_S)
        assert _tree(shares_XS.tobytes(), len(progress_X)) == slow_tree(shares_XS)


def test_two_nodes_that_are_joined_may_come_nearer_to_a_third_than_its_nearest():
    shares_XS = np.array([[7, 1, 1, 1, 24, 112]]) / 1024
    assert _tree(shares_XS.tobytes(), 1) == slow_tree(shares_XS)
