"""The guard of an update: are its loss and gradient norm what the updates before it lead to expect?

Shape suffix: W steps of the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curriculum.schema.sections import SkipUpdates

# The smallest standard deviation, relative to the mean. Rounding in float32 sums over a batch moves a loss by about
# 1e-6 of its value, so if the loss stood still, each rounding would look like a spike. The losses of batches that are
# learned from scatter by more than this, and a rise of 6 times as much, 0.6 %, is no divergence.
SIGMA_FLOOR = 1e-3


class Guard(NamedTuple):
    """What the updates so far were like. An update is bad if it is skipped although it has a scored target.

    The values of step s are at index s % W, as infinity if not finite. (NaN would end runs under jax_debug_nans.)
    """

    losses_W: jax.Array
    grad_norms_W: jax.Array
    num_nonfinite: jax.Array  # int32, bad updates since the run's start that were not finite
    num_outliers: jax.Array  # int32, bad updates since the run's start that were finite
    bad_in_a_row: jax.Array  # int32, up to now
    row_began: jax.Array  # int32, the first update of that row
    diverged_at: jax.Array  # int32, the first update of the first row that was too long; -1: none


def new_guard(window_steps: int) -> Guard:
    empty_W = np.full(window_steps, np.inf, np.float32)
    return Guard(empty_W, empty_W.copy(), *(np.int32(number) for number in (0, 0, 0, 0, -1)))


def guarded(
    guard: Guard,
    step: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    has_targets: jax.Array,
    judged_from: jax.Array,
    *,
    skip_updates: SkipUpdates | None,
    diverged_after: int,
) -> tuple[jax.Array, Guard]:
    """(whether update `step` is taken, the guard after it), inside a compiled function.

    An update is not taken if its loss or gradient norm is not finite, or is more than `skip_updates.sigmas` standard
    deviations above the mean of the window. The window is the finite values, taken or not, of the last W updates, from
    update `judged_from` on. While it holds fewer than `skip_updates.judge_from_steps`, or without `skip_updates`, every
    finite update is taken.
    `has_targets` is False for a batch without a scored target: its update is not taken, but does not count as bad.
    """
    num_steps = guard.losses_W.shape[0]
    slots_W = jnp.arange(num_steps)
    written_at_W = step - 1 - (step - 1 - slots_W) % num_steps
    counts_W = (written_at_W >= judged_from) & jnp.isfinite(guard.losses_W)
    num_counted = counts_W.sum()

    def is_beyond(value, values_W):
        # In units of the largest value, whose square may overflow float32.
        unit = jnp.maximum(jnp.where(counts_W, jnp.abs(values_W), 0).max(), np.finfo(np.float32).tiny)
        values_W = jnp.where(counts_W, values_W / unit, 0)
        mean = values_W.sum() / jnp.maximum(num_counted, 1)
        variance = jnp.where(counts_W, (values_W - mean) ** 2, 0).sum() / jnp.maximum(num_counted, 1)
        sigma = jnp.maximum(jnp.sqrt(variance), SIGMA_FLOOR * jnp.abs(mean))
        return value / unit > mean + skip_updates.sigmas * sigma

    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    is_outlier = jnp.bool_(False)
    if skip_updates is not None:
        is_outlier = is_beyond(loss, guard.losses_W) | is_beyond(grad_norm, guard.grad_norms_W)
        is_outlier &= is_finite & (num_counted >= skip_updates.judge_from_steps)
    is_nonfinite = has_targets & ~is_finite
    is_bad = is_nonfinite | is_outlier
    row = jnp.where(is_bad, guard.bad_in_a_row + 1, jnp.where(has_targets, 0, guard.bad_in_a_row))
    row_began = jnp.where(is_bad & (guard.bad_in_a_row == 0), step, guard.row_began)
    too_long = (guard.diverged_at < 0) & (row >= diverged_after)
    slot = step % num_steps
    return is_finite & ~is_outlier, Guard(
        losses_W=guard.losses_W.at[slot].set(jnp.where(is_finite, loss, jnp.inf)),
        grad_norms_W=guard.grad_norms_W.at[slot].set(jnp.where(is_finite, grad_norm, jnp.inf)),
        num_nonfinite=guard.num_nonfinite + is_nonfinite,
        num_outliers=guard.num_outliers + is_outlier,
        bad_in_a_row=row,
        row_began=row_began,
        diverged_at=jnp.where(too_long, row_began, guard.diverged_at),
    )


def with_window(guard: Guard, step: int, window_steps: int) -> Guard:
    """The guard before update `step` with a window of another length, the newest values kept; arrays on the host."""
    guard = jax.device_get(guard)
    before = len(guard.losses_W)
    kept = np.arange(max(0, step - min(before, window_steps)), step)

    def moved(values_W):
        out_W = np.full(window_steps, np.inf, np.float32)
        out_W[kept % window_steps] = values_W[kept % before]
        return out_W

    return guard._replace(losses_W=moved(guard.losses_W), grad_norms_W=moved(guard.grad_norms_W))
