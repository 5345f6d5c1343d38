"""The guard against a plain loop in float64 that looks at all values there were, and in a whole update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curriculum.schema.sections import SkipUpdates
from curriculum.train.guard import guarded, new_guard, with_window

WINDOW, FROM, SIGMAS, AFTER = 12, 5, 4.0, 3


def compiled(skip_updates=SkipUpdates(SIGMAS, judge_from_steps=FROM)):  # noqa: B008
    """run(guard, rows of (step, loss, norm, has targets, judged from)) -> (taken of each, guard)."""

    def one(guard, row):
        step, loss, norm, has_targets, judged_from = row
        taken, guard = guarded(
            guard, step, loss, norm, has_targets, judged_from, skip_updates=skip_updates, diverged_after=AFTER
        )
        return guard, taken

    run = jax.jit(lambda guard, rows: jax.lax.scan(one, guard, rows))

    def called(guard, first, losses, norms, has_targets, judged_from):
        steps = np.arange(first, first + len(losses), dtype=np.int32)
        columns = (np.asarray(losses, np.float32), np.asarray(norms, np.float32), np.asarray(has_targets, bool))
        guard, taken = run(guard, (steps, *columns, np.asarray(judged_from, np.int32)))
        return np.asarray(taken), guard

    return called


def slowly(losses, norms, has_targets, judged_from, window=WINDOW, sigmas=SIGMAS, judge_from_steps=FROM):
    """(taken, non-finite, outliers, bad in a row, first bad one of the first row of AFTER) by a loop over the past."""
    taken, nonfinite, outliers, row, diverged_at = [], 0, 0, [], -1
    for step in range(len(losses)):
        past = [s for s in range(max(0, step - window), step) if s >= judged_from[step]]
        past = [s for s in past if math.isfinite(losses[s]) and math.isfinite(norms[s])]
        beyond = False
        for values in (losses, norms):
            held = np.array([values[s] for s in past], np.float64)
            if sigmas is not None and len(held) >= judge_from_steps and math.isfinite(values[step]):
                beyond |= values[step] > held.mean() + sigmas * max(held.std(), 1e-3 * abs(held.mean()))
        finite = math.isfinite(losses[step]) and math.isfinite(norms[step])
        nonfinite += has_targets[step] and not finite
        outliers += finite and beyond
        taken.append(finite and not beyond)
        if has_targets[step]:
            row = [] if taken[-1] else [*row, step]
        if len(row) >= AFTER and diverged_at < 0:
            diverged_at = row[0]
    return taken, nonfinite, outliers, len(row), diverged_at


def sequence(seed, num=160):
    """Losses and norms about 2 and 0.7, with spikes, rows of them, NaN, infinities and empty batches; where judged."""
    rng = np.random.default_rng(seed)
    losses, norms = (rng.normal(m, 0.05, num).astype(np.float32) for m in (2.0, 0.7))
    for values in (losses, norms):
        spikes = rng.integers(0, num, 8)
        values[spikes] *= rng.choice([1.3, 3.0, 1e4, 1e30], 8).astype(np.float32)
    for begin in rng.integers(0, num - 4, 2):
        losses[begin : begin + rng.integers(1, 5)] = rng.choice([np.nan, np.inf, 50.0])
    norms[rng.integers(0, num, 3)] = rng.choice([np.nan, np.inf, -np.inf], 3)
    has_targets = np.ones(num, bool)
    empty = rng.integers(0, num, 5)
    losses[empty], norms[empty], has_targets[empty] = np.nan, np.nan, False
    places = np.sort(rng.choice(num, 4, replace=False))
    judged_from = np.array([max([0, *places[places <= step]]) for step in range(num)])
    return losses, norms, has_targets, judged_from


def told(taken, guard):
    counts = (guard.num_nonfinite, guard.num_outliers, guard.bad_in_a_row, guard.diverged_at)
    return (taken.tolist(), *map(int, counts))


def test_the_guard_against_a_loop_over_the_past():
    run, seen = compiled(), np.zeros(4, int)
    for seed in range(40):
        values = sequence(seed)
        taken, guard = run(new_guard(WINDOW), 0, *values)
        expected = slowly(*values)
        assert told(taken, guard) == expected
        seen += [sum(expected[0]) < 150, expected[1] > 0, expected[2] > 0, expected[4] >= 0]
    assert (seen > 10).all()


def test_cut_anywhere_it_goes_on_as_if_it_had_not_been():
    run, values = compiled(), sequence(3)
    whole, end = run(new_guard(WINDOW), 0, *values)
    for cut in (1, 5, 12, 47, 100):
        first, guard = run(new_guard(WINDOW), 0, *(v[:cut] for v in values))
        second, guard = run(jax.device_get(guard), cut, *(v[cut:] for v in values))
        assert [*first, *second] == whole.tolist()
        for a, b in zip(guard, end, strict=True):
            np.testing.assert_array_equal(a, b)


def test_without_sigmas_only_what_is_not_finite_is_bad():
    values = sequence(5)
    taken, guard = compiled(skip_updates=None)(new_guard(WINDOW), 0, *values)
    assert told(taken, guard) == slowly(*values, sigmas=None)
    assert int(guard.num_outliers) == 0 < int(guard.num_nonfinite)


def run_of(losses, norms=None, judged_from=None):
    num = len(losses)
    norms = np.ones(num) if norms is None else norms
    judged_from = np.zeros(num) if judged_from is None else judged_from
    return compiled()(new_guard(WINDOW), 0, losses, norms, np.ones(num, bool), judged_from)


def test_a_loss_that_stands_still_makes_no_rounding_a_spike():
    still = np.full(30, 2.0)
    still[20:25] = np.nextafter(np.float32(2), np.float32(3))
    still[25] = 2.0 * 1.0039  # below 4 floors
    assert run_of(still)[0].all()
    still[26] = 2.0 * 1.0085  # above, also with the one before in the window
    assert run_of(still)[0].tolist() == [i != 26 for i in range(30)]


def test_numbers_whose_squares_float32_does_not_hold_are_judged_all_the_same():
    for size in (1e30, 1e-30):
        losses = np.where(np.arange(20) % 2, 1.0, 1.1) * size
        losses[15] = 3 * size
        assert run_of(losses)[0].tolist() == [i != 15 for i in range(20)]


def test_it_judges_once_it_holds_enough_and_forgets_what_lies_before():
    jump = np.array([1.0, 1.1] * 4 + [5.0, 5.1] * 8)
    assert not run_of(jump)[0][8] and run_of(jump)[0].sum() < len(jump)
    judged_from = np.where(np.arange(len(jump)) < 8, 0, 8)  # a phase begins at update 8
    assert run_of(jump, judged_from=judged_from)[0].all()
    early = np.array([1.0, 1.1, 1.0, 1.1, 9.0, 1.0])  # four values before the fifth
    assert run_of(early)[0].all()
    assert not run_of(np.array([1.0, 1.1, 1.0, 1.1, 1.0, 9.0]))[0][5]


def test_it_takes_in_what_it_skips():
    """A level that stays becomes the level; how long that takes follows from the window."""
    level = np.array([1.0, 1.1] * 6 + [2.0, 2.1] * 10)
    taken = run_of(level)[0]
    assert not taken[12] and taken[-1]
    assert taken.tolist() == slowly(level, np.ones(32), np.ones(32, bool), np.zeros(32))[0]


def test_another_window_keeps_the_newest_values():
    values = sequence(8)
    _, guard = compiled()(new_guard(WINDOW), 0, *(v[:31] for v in values))
    for size in (4, 12, 50):
        moved = with_window(guard, 31, size)
        kept = min(size, WINDOW)
        expected = values[0][31 - kept : 31].copy()
        expected[~np.isfinite(values[0][31 - kept : 31]) | ~np.isfinite(values[1][31 - kept : 31])] = np.inf
        found = [moved.losses_W[s % size] for s in range(31 - kept, 31)]
        np.testing.assert_array_equal(found, expected)
        assert len(moved.losses_W) == size and np.isfinite(moved.losses_W).sum() == np.isfinite(expected).sum()
        assert int(moved.num_nonfinite) == int(guard.num_nonfinite)


@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_an_update_that_is_not_taken_changes_nothing_but_the_counts(kind):
    from test_step import LR, MODEL, SOURCES, assert_trees_equal, initial_state, make_batch

    from curriculum.train.optimizer import OptimConfig, make_optimizer
    from curriculum.train.step import make_train_step

    optimizer = make_optimizer(OptimConfig())
    step = jax.jit(
        make_train_step(MODEL, optimizer, len(SOURCES), skip_updates=SkipUpdates(judge_from_steps=2), diverged_after=1)
    )
    state = initial_state(optimizer)
    for seed in range(4):
        state = step(state, make_batch(seed=seed), LR)
    assert int(state.skipped_updates) == 0
    before = state
    embedding = state.params["embed"]["embedding"]
    factor = jnp.nan if kind == "nan" else 300.0
    broken = {**state.params, "embed": {**state.params["embed"], "embedding": embedding * factor}}
    state = step(state._replace(params=broken), make_batch(seed=7), LR)
    assert_trees_equal((state.params, state.opt_state, state.window), (broken, before.opt_state, before.window))
    guard = state.guard
    assert (int(state.step), int(state.skipped_updates), int(guard.diverged_at)) == (5, 1, 4)
    assert (int(guard.num_nonfinite), int(guard.num_outliers)) == ((1, 0) if kind == "nan" else (0, 1))
    # The very same batch is taken where its values are the first that count.
    if kind == "spike":
        assert int(step(before._replace(params=broken), make_batch(seed=7), LR, np.int32(4)).skipped_updates) == 0
