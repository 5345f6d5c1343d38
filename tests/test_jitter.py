"""The scatter of neighbouring checkpoints; test_regressions.py has the whole rule, with this part of it told slowly."""

import math

import numpy as np
import pytest
from test_regressions import slow_scatter, through

from evalsets.jitter import Scatter, checkpoint_jitter
from evalsets.regressions import BEST, REGRESSED, Watched


def scatter_of(watched: Watched) -> Scatter:
    """Where no document differs from another."""
    return checkpoint_jitter(watched.history, watched.baseline_steps_B[..., BEST], np.asarray(math.nan))


def test_the_steep_way_from_an_untrained_model_to_the_first_eval_is_no_scatter():
    # 4, 3.9, 3.8, 3.76 are 0.012, -0.006, -0.024, 0.018 from their line, which falls by 0.082 an eval: their squares sum
    # to 0.00108, with 2 degrees of freedom. No document differs from another, so nothing else is known of the jitter.
    watched, _ = through([11.0, 4.0, 3.9, 3.8, 3.76])
    scatter = scatter_of(watched)
    assert (scatter.jitter, scatter.nu, scatter.df) == pytest.approx((math.sqrt(0.00054), 2, 7), rel=1e-9)


def test_the_fall_that_a_run_begins_with_is_no_scatter():
    # After three evals the losses are 0.01 (+-, --, ++) off a line, 0.04 an eval. Nothing else is known of the jitter.
    settled = [3.0 - 0.04 * k + 0.01 * sign for k, sign in enumerate([1, -1, -1, 1, 1, -1])]
    watched, _ = through([11.0, 9.0, 5.0, 3.2, *settled])
    scatter = scatter_of(watched)
    (rss,) = np.polyfit(np.arange(6), settled, 1, full=True)[1]
    assert 0.0005 < rss < 0.0006 and (scatter.jitter, scatter.nu) == pytest.approx((math.sqrt(rss / 4), 4), rel=1e-9)


def test_what_does_not_only_fall_at_first_is_scatter():
    """A rise amid it, and a later phase; but not the rest of a fall whose beginning is beyond the memory."""
    settled = [3.0 - 0.04 * k + 0.01 * sign for k, sign in enumerate([1, -1, -1, 1, 1, -1])]

    def jitter(losses, phase=0, before=()):
        watched, _ = through([11.0, *before, *losses], phases=[0] * len(before) + [phase] * len(losses))
        return float(scatter_of(watched).jitter)

    assert jitter([9.0, 5.0, 3.2, *settled]) < 0.02
    assert jitter([5.0, 9.0, 3.2, *settled]) > 0.5
    assert jitter([9.0, 5.0, 3.2, *settled], 1, before=[9.5]) > 0.3
    long = [3.0 - 0.04 * k for k in range(6, 21)]
    assert jitter([9.0, 5.0, 3.2, *settled, *long[:14]]) < 0.02  # 23 evals, which the memory holds with the one before
    assert jitter([9.0, 5.0, 3.2, *settled, *long]) < 0.02
    assert jitter([9.0, 5.0, 3.2, *settled, *long, 2.16]) < 0.02


@pytest.mark.parametrize("fall", [lambda k: 3 * 0.9**k, lambda k: 2 / (1 + k / 5)])
def test_the_curvature_of_a_falling_loss_is_hardly_scatter(fall):
    rng = np.random.default_rng(3)
    losses = [11.0, *(3 + fall(k) + rng.normal(0, 0.01) for k in range(1, 25))]
    watched, (*_, seen) = through(losses, 0.01)
    _, line = np.polyfit(np.arange(1, 25), watched.history_losses_H, 1, full=True)[:2]
    assert math.sqrt(line[0] / 22) > 0.08  # what a line leaves
    assert 0.005 < seen.jitter < 0.03 and seen.detectable < 0.3
    _, (*_, jumped) = through([*losses, 3.4 + fall(24)], 0.01)
    assert jumped.states_B[BEST] == REGRESSED


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("every", [0, 3])
def test_a_loss_that_is_not_finite_takes_no_part_in_the_jitter(loss, every):
    losses = [3.0, 2.9, loss, 2.75, 2.6, 2.52, loss]
    if every:  # no three are left in a row, but lines are
        noise = np.random.default_rng(0).normal(0, 0.01, 20)
        losses = [loss if k % every == 1 else 3 - 0.01 * k + x for k, x in enumerate(noise.tolist())]
    watched, _ = through(losses, first_phase=0)
    best = min(range(len(losses)), key=lambda k: losses[k] if math.isfinite(losses[k]) else 9)
    expected = slow_scatter([(k, 0, one) for k, one in enumerate(losses)], 0.0, best)[:3]
    assert scatter_of(watched)[:3] == pytest.approx(expected, rel=1e-9)
    assert expected[0] > 0 and (expected[1] > 10) == bool(every)
