"""Whether an eval set got worse by more than noise and tolerance, compared with three remembered evals.

A verdict compares the same windows under two checkpoints. Two things make the means of two equally good checkpoints
differ: which documents the set happens to hold (the item error) and where on its noisy path training was halted
(the jitter, seen in the scatter of the set's own evals).

Pure numpy. Shapes: N windows, B baselines in the order of `BASELINES`, H evals of the history. Every function but
`transfer` takes leading axes (`...`: runs or sets with the same windows) and gives each what it would get alone, bit
for bit. Losses, differences and errors are in nats per token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evalsets.jitter import UNMEASURED, History, checkpoint_jitter
from evalsets.metrics import clustered_ratio, clusters, paired_difference, student_quantile

BASELINES = ("start", "phase_start", "best")
START, PHASE_START, BEST = range(3)
OK, WARNED, REGRESSED = range(3)

NUM_HISTORY = 24  # evals from which the scatter of a set is measured
_WARN_T, _RECOVER_T = 1.645, 1.0
_POWER, _CONFIDENCE = 0.8, 0.95  # power of `detectable`, confidence of the intervals


class Watched(NamedTuple):
    """The memory of one eval set: all that a later verdict depends on.

    baseline_steps_B: int64 [..., B], the step at which each baseline was measured.
    baseline_nats_BN: float64 [..., B, N], nats of each window then.
    states_B: int8 [..., B], OK, WARNED or REGRESSED.
    first_steps_B: int64 [..., B], the step at which the standing alarm was raised, see `observe`; -1 if none stands.
    recovery_deltas_B: float64 [..., B], the rise above which that alarm stays; NaN if none stands.
    history_steps_H, history_phases_H: int64 [NUM_HISTORY], step and phase of the last evals, oldest first; the phase is
        -1 in empty places and for the eval before the first update.
    history_losses_H: float64 [..., NUM_HISTORY], NaN in empty places.
    history_items_H: float64 [..., NUM_HISTORY], the smallest positive item error that each eval had against a baseline;
        NaN in empty places, for the first eval, and where an older version wrote the memory.
    """

    baseline_steps_B: np.ndarray
    baseline_nats_BN: np.ndarray
    states_B: np.ndarray
    first_steps_B: np.ndarray
    recovery_deltas_B: np.ndarray
    history_steps_H: np.ndarray
    history_phases_H: np.ndarray
    history_losses_H: np.ndarray
    history_items_H: np.ndarray = np.full(NUM_HISTORY, np.nan)

    @property
    def history(self) -> History:
        return History(self.history_steps_H, self.history_phases_H, self.history_losses_H, self.history_items_H)


class Comparison(NamedTuple):
    """One eval of one set, compared with the baselines as they were before it.

    Of each baseline, [..., B]: its step and loss; `delta_B`, the rise since; `sem_B`, the standard error of that rise,
    and its part `sem_item_B`; `t_B`, NaN if it cannot be computed; `low_B` and `high_B`, the 95 %
    interval of delta; the state before and after; the step at which the standing alarm was raised, or -1.
    Of the set, [...]: `loss`; `jitter`, see `checkpoint_jitter`, and `nu`, the degrees of freedom with which it was
    measured; `df`, those of the quantiles, and `critical`, which t must exceed for an alarm;
    `detectable`, see `observe`; `too_small`, whether the item error alone makes the detectable rise more than twice the
    tolerance; `unlearned`, see `observe`; `spent`, how much of the run's false-alarm probability this eval used.
    For all: `clusters` ('documents' or 'blocks') and their number; `no_verdict`, why no verdict is possible, or None.
    """

    baseline_steps_B: np.ndarray
    baseline_losses_B: np.ndarray
    delta_B: np.ndarray
    sem_item_B: np.ndarray
    sem_B: np.ndarray
    t_B: np.ndarray
    low_B: np.ndarray
    high_B: np.ndarray
    states_before_B: np.ndarray
    states_B: np.ndarray
    first_steps_B: np.ndarray
    loss: np.ndarray
    jitter: np.ndarray
    nu: np.ndarray
    df: np.ndarray
    critical: np.ndarray
    detectable: np.ndarray
    too_small: np.ndarray
    unlearned: np.ndarray
    spent: np.ndarray
    clusters: str
    num_clusters: int
    no_verdict: str | None


def begin(step: int, phase_index: int, nats_N: np.ndarray, tokens_N: np.ndarray) -> Watched:
    """The memory after a set's first eval, which becomes every baseline.

    `phase_index`: the phase that the eval is in or closes, from 0. It is -1 before the first update, so that this eval
    is in no phase: from it to the next one the loss often moves further than ever after.
    """
    nats_XN = np.array(nats_N, np.float64)
    lead = nats_XN.shape[:-1]
    num_baselines = len(BASELINES)
    nothing = Watched(
        baseline_steps_B=np.full((*lead, num_baselines), step, np.int64),
        baseline_nats_BN=np.repeat(nats_XN[..., None, :], num_baselines, axis=-2),
        states_B=np.full((*lead, num_baselines), OK, np.int8),
        first_steps_B=np.full((*lead, num_baselines), -1, np.int64),
        recovery_deltas_B=np.full((*lead, num_baselines), np.nan),
        history_steps_H=np.zeros(NUM_HISTORY, np.int64),
        history_phases_H=np.full(NUM_HISTORY, -1, np.int64),
        history_losses_H=np.full((*lead, NUM_HISTORY), np.nan),
        history_items_H=np.full((*lead, NUM_HISTORY), np.nan),
    )
    return _remember(nothing, step, phase_index, _loss(nats_XN, tokens_N), np.full(lead, np.nan))


def observe(
    watched: Watched,
    step: int,
    phase_index: int,
    nats_N: np.ndarray,
    tokens_N: np.ndarray,
    document_N: np.ndarray,
    *,
    tolerance: float,
    level: float,
    untaught: bool = False,
) -> tuple[Watched, Comparison]:
    """Compare an eval with the baselines, then remember it. `phase_index` is as in `begin`.

    SE^2 = SE_item^2 + 2 jitter^2, and t = (delta - tolerance) / SE is compared with Student's quantile at `level`, the
    false-alarm probability of one comparison, with min(nu, clusters - 1) degrees of freedom (10 for nu below 3). A set
    regresses if t exceeds the quantile or its loss is not finite. It stays regressed until t is below 1 by each of
    three errors: the present one, that of the alarm, and that of unmeasured jitter. A large rise inflates the scatter
    too, and more noise is no recovery. If only the baseline is not finite, no alarm is raised and a standing one ends.
    At a level of 0 or less a set regresses only if its loss is not finite. An alarm against a baseline that is no newer
    than the newest one with a standing alarm is of the same rise: it counts as raised when that one was. A loss that is
    not finite is a rise of its own.

    `untaught`: the eval at step 0 was of random parameters, and nothing like the set's text was trained on since. If
    the set has never been below that eval either, it is `unlearned`: there is nothing that could be lost, and it
    regresses only if its loss is not finite.

    `detectable` is the smallest rise above the best eval that the next eval would show with 80 % power if it had the
    errors of this one: tolerance + (critical + t_0.8) SE. It refers to the best eval for two reasons: a rise above
    another baseline is at least as large above the best; and the best is usually recent, so that less training lies in
    between and the item error is smaller.
    """
    now_XN = np.asarray(nats_N, np.float64)
    cluster_N, kind = clusters(document_N)
    num_clusters = int(cluster_N.max()) + 1
    level = max(level, 0.0)
    loss, baseline_losses_B = _loss(now_XN, tokens_N), _loss(watched.baseline_nats_BN, tokens_N)

    with np.errstate(invalid="ignore", divide="ignore"):
        delta_B, sem_item_B = clustered_ratio(now_XN[..., None, :] - watched.baseline_nats_BN, tokens_N, cluster_N)
        item = np.fmin.reduce(np.where(sem_item_B > 0, sem_item_B, np.nan), axis=-1)
        scatter = checkpoint_jitter(watched.history, watched.baseline_steps_B[..., BEST], item)
        sem_B = _sem(sem_item_B, scatter.jitter[..., None])
        df = np.minimum(scatter.df, num_clusters - 1)
        t_B = (delta_B - tolerance) / sem_B
        t_B = np.where((sem_B == 0) & (delta_B == tolerance), 0.0, t_B)
        critical = student_quantile(level, df)
        half_B = student_quantile((1 - _CONFIDENCE) / 2, df)[..., None] * sem_B
        power_t = student_quantile(1 - _POWER, df)
        detectable = tolerance + (critical + power_t) * sem_B[..., BEST]
        of_items = student_quantile(level, num_clusters - 1) + student_quantile(1 - _POWER, num_clusters - 1)
        too_small = (of_items * sem_item_B[..., BEST] > tolerance) & (tolerance > 0) & (level > 0)

    unlearned = np.asarray(untaught & (watched.baseline_steps_B[..., BEST] == 0))
    learned_B = ~unlearned[..., None]
    is_finite_B = np.isfinite(loss)[..., None]
    stood_B = watched.states_B == REGRESSED
    worse_B = (learned_B & (t_B > critical[..., None])) | ~is_finite_B
    unmeasured_B = _sem(sem_item_B, UNMEASURED * sem_item_B)  # the standard error if the jitter is not measured
    at_most_B = np.minimum(watched.recovery_deltas_B, tolerance + _RECOVER_T * unmeasured_B)
    stays_B = stood_B & ((t_B >= _RECOVER_T) | (delta_B > at_most_B))
    milder_B = np.where(learned_B & (t_B > _WARN_T), WARNED, OK)
    states_B = np.where(worse_B | stays_B, REGRESSED, milder_B).astype(np.int8)
    is_regressed_B = states_B == REGRESSED
    first_steps_B = np.where(is_regressed_B, _raised_at(watched, step, is_finite_B), -1)
    recovery_deltas_B = np.where(stood_B, watched.recovery_deltas_B, tolerance + _RECOVER_T * sem_B)
    recovery_deltas_B = np.where(is_regressed_B, recovery_deltas_B, np.nan)
    comparison = Comparison(
        baseline_steps_B=watched.baseline_steps_B,
        baseline_losses_B=baseline_losses_B,
        delta_B=delta_B,
        sem_item_B=sem_item_B,
        sem_B=sem_B,
        t_B=t_B,
        low_B=delta_B - half_B,
        high_B=delta_B + half_B,
        states_before_B=watched.states_B,
        states_B=states_B,
        first_steps_B=first_steps_B,
        loss=loss,
        jitter=scatter.jitter,
        nu=scatter.nu,
        df=df,
        critical=critical,
        detectable=detectable,
        too_small=too_small,
        unlearned=unlearned,
        spent=level * _num_distinct(watched.baseline_steps_B, learned_B & ~np.isnan(t_B)),
        clusters=kind,
        num_clusters=num_clusters,
        no_verdict=_no_verdict(num_clusters, level),
    )

    best_loss = baseline_losses_B[..., BEST]
    better = (loss < best_loss) | (np.isnan(best_loss) & np.isfinite(loss))
    if better.any():
        watched = _replace_baseline(watched, BEST, step, now_XN, better)
    watched = watched._replace(states_B=states_B, first_steps_B=first_steps_B, recovery_deltas_B=recovery_deltas_B)
    return _remember(watched, step, phase_index, loss, item), comparison


def _raised_at(watched: Watched, step: int, is_finite_B: np.ndarray) -> np.ndarray:
    """The step at which the alarm against each baseline was raised, if it stands or is raised now: [..., B].

    See `observe` for alarms of the same rise.
    """
    stood_B = watched.states_B == REGRESSED
    stood_steps_B = np.where(stood_B, watched.baseline_steps_B, -1)
    newest = np.argmax(stood_steps_B, axis=-1, keepdims=True)
    same_rise_B = is_finite_B & (watched.baseline_steps_B <= np.max(stood_steps_B, axis=-1, keepdims=True))
    now_B = np.where(same_rise_B, np.take_along_axis(watched.first_steps_B, newest, axis=-1), step)
    return np.where(stood_B, watched.first_steps_B, now_B)


def begin_phase(watched: Watched, step: int, nats_N: np.ndarray) -> Watched:
    """Make the eval at `step` the new baseline `phase_start`; an alarm against the old one ends.

    Call it after `observe` at a phase boundary; for a set that was not measured there, before its next `observe`.
    """
    states_B, first_steps_B = watched.states_B.copy(), watched.first_steps_B.copy()
    recovery_deltas_B = watched.recovery_deltas_B.copy()
    states_B[..., PHASE_START], first_steps_B[..., PHASE_START], recovery_deltas_B[..., PHASE_START] = OK, -1, np.nan
    watched = _replace_baseline(watched, PHASE_START, step, np.asarray(nats_N, np.float64), np.True_)
    return watched._replace(states_B=states_B, first_steps_B=first_steps_B, recovery_deltas_B=recovery_deltas_B)


def error_level(confidence: float, spent: float, planned: int, left: int) -> float:
    """The false-alarm probability for each comparison of the next eval; 0 if none is left, so no verdict is possible.

    spent: what earlier comparisons used of the run's false-alarm probability, 1 - confidence.
    planned: comparisons in the whole run as planned now, one for each set, baseline and eval after the first.
    left: how many of them are still to come, including those of the next eval; 1 or more.
    Three quarters of the run's probability are divided evenly over the plan. After an extension, some of it was `spent`
    under an older plan: then at most three quarters of the rest are divided over what is left. So the levels of a run
    never sum to more than its probability, however often it is extended. The rise needed for an alarm grows slowly, as
    a quantile does with the logarithm of its level.
    """
    error = 1 - confidence
    rest = error - spent
    if rest <= 1e-9 * error:  # all of it is spent, up to rounding
        return 0.0
    return min(0.75 * error / planned, rest / (left + planned / 3))


class Change(NamedTuple):
    """A difference of losses and its 95 % interval; NaN for what is not known."""

    value: float
    low: float
    high: float


class Transfer(NamedTuple):
    """One set over the phases: its loss at the start and at each phase end (None if not measured).

    forgetting: last - best over the phase ends and the start, if it knew anything: 0 or more.
    gain: start - last, positive if the set got better.
    best: where the loss was lowest, 0 at the start, i at the end of phase i - 1; None if no loss is finite.
    """

    start: float
    losses: list[float | None]
    forgetting: Change
    best: int | None
    gain: Change


def transfer(
    watched: Watched,
    ends: Sequence[np.ndarray | None],
    tokens_N: np.ndarray,
    document_N: np.ndarray,
    *,
    from_scratch: bool = False,
) -> Transfer:
    """How a set's loss changed over the phases, from its nats at the end of each (None if not measured).

    `watched` is the set's memory after the last eval, without leading axes: it has the start and the scatter of the
    checkpoints. The set must be measured at the end of the last phase. The difference of a checkpoint from itself is 0,
    without error. `from_scratch`: an eval at step 0 was of random parameters, which know nothing that could be
    forgotten.
    """
    start_N, last_N = watched.baseline_nats_BN[START], ends[-1]
    measured = [start_N, *ends]
    losses = [None if nats_N is None else float(_loss(nats_N, tokens_N)) for nats_N in measured]
    first = int(from_scratch and watched.baseline_steps_B[START] == 0)
    finite = [i for i, loss in enumerate(losses) if i >= first and loss is not None and math.isfinite(loss)]
    best = min(finite, key=losses.__getitem__, default=None)

    scatter = checkpoint_jitter(watched.history, watched.baseline_steps_B[BEST], np.asarray(np.nan))

    def change(now_N: np.ndarray, before_N: np.ndarray) -> Change:
        delta, sem_item, num_clusters, _ = paired_difference(now_N, before_N, tokens_N, document_N)
        df = np.minimum(scatter.df, num_clusters - 1)
        half = student_quantile((1 - _CONFIDENCE) / 2, df) * _sem(sem_item, scatter.jitter)
        return Change(float(delta), float(delta - half), float(delta + half))

    if best == len(ends):
        forgetting = Change(0.0, 0.0, 0.0)
    elif best is None:
        forgetting = Change(math.nan, math.nan, math.nan)
    else:
        forgetting = change(last_N, measured[best])
    return Transfer(losses[0], losses[1:], forgetting, best, change(start_N, last_N))


def _sem(sem_item: np.ndarray, jitter: np.ndarray) -> np.ndarray:
    """The standard error of a difference between two checkpoints, both of which jitter."""
    return np.sqrt(sem_item * sem_item + 2 * jitter * jitter)


def _no_verdict(num_clusters: int, level: float) -> str | None:
    if num_clusters < 2:
        return "all its windows are of one document: too little to estimate the error of a difference"
    if level > 0:
        return None
    return (
        "the run's false-alarm probability (1 - evalsets.regression.confidence) is used up; lower the confidence to "
        "allow more comparisons"
    )


def _loss(nats_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sum(np.ascontiguousarray(nats_N, np.float64), axis=-1) / np.sum(tokens_N, dtype=np.int64)


def _num_distinct(steps_B: np.ndarray, compared_B: np.ndarray) -> np.ndarray:
    """How many comparisons were made; baselines that are the same eval count once, as the comparison is the same."""
    distinct = np.zeros(steps_B.shape[:-1], np.int64)
    for b in range(steps_B.shape[-1]):
        repeated = np.any(steps_B[..., :b] == steps_B[..., b : b + 1], axis=-1)
        distinct += compared_B[..., b] & ~repeated
    return distinct


def _replace_baseline(watched: Watched, baseline: int, step: int, nats_N: np.ndarray, where: np.ndarray) -> Watched:
    steps_B, nats_BN = watched.baseline_steps_B.copy(), watched.baseline_nats_BN.copy()
    steps_B[..., baseline] = np.where(where, step, steps_B[..., baseline])
    nats_BN[..., baseline, :] = np.where(where[..., None], nats_N, nats_BN[..., baseline, :])
    return watched._replace(baseline_steps_B=steps_B, baseline_nats_BN=nats_BN)


def _remember(watched: Watched, step: int, phase_index: int, loss: np.ndarray, item: np.ndarray) -> Watched:
    return watched._replace(
        history_steps_H=np.append(watched.history_steps_H[1:], step),
        history_phases_H=np.append(watched.history_phases_H[1:], phase_index),
        history_losses_H=np.concatenate([watched.history_losses_H[..., 1:], loss[..., None]], axis=-1),
        history_items_H=np.concatenate([watched.history_items_H[..., 1:], item[..., None]], axis=-1),
    )
