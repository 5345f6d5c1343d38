"""Whether an eval set got worse by more than noise and tolerance, against three evals that are remembered.

A verdict compares the same windows under two checkpoints. Two things make the means of two equally good checkpoints
differ: which documents the set happens to hold (the item error) and where on its noisy path training was halted
(the jitter, seen in the scatter of the set's own evals about a line).

Pure numpy. Shapes: N windows, B baselines in the order of `BASELINES`, H evals of the history. Every function but
`transfer` takes leading axes (`...`: runs or sets with the same windows) and gives each what it would get alone, to
the bit. Losses, differences and errors are in nats per token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evalsets.metrics import clustered_ratio, clusters, paired_difference
from evalsets.student import student_quantile

BASELINES = ("start", "phase_start", "best")
START, PHASE_START, BEST = range(3)
OK, WARNED, REGRESSED = range(3)

NUM_HISTORY = 24
_WARN_T, _RECOVER_T = 1.645, 1.0
MIN_NU, _FALLBACK_NU = 3, 10
_UNMEASURED = 2.0  # jitter that is not measured, in item errors
_POWER, _CONFIDENCE = 0.8, 0.95  # of `detectable` and of the intervals


class Watched(NamedTuple):
    """What is remembered of one eval set, all that a later verdict depends on.

    baseline_steps_B: int64 [..., B], when each baseline was measured.
    baseline_nats_BN: float64 [..., B, N], nats of each window then.
    states_B: int8 [..., B], OK, WARNED or REGRESSED.
    first_steps_B: int64 [..., B], the first eval of the alarm that stands; -1 where none does.
    recovery_deltas_B: float64 [..., B], the rise above which that alarm stays; NaN where there is none.
    history_steps_H, history_phases_H: int64 [NUM_HISTORY], the last evals, oldest first; phase -1 where there was none,
        and of the eval before the first update.
    history_losses_H: float64 [..., NUM_HISTORY].
    """

    baseline_steps_B: np.ndarray
    baseline_nats_BN: np.ndarray
    states_B: np.ndarray
    first_steps_B: np.ndarray
    recovery_deltas_B: np.ndarray
    history_steps_H: np.ndarray
    history_phases_H: np.ndarray
    history_losses_H: np.ndarray


class Comparison(NamedTuple):
    """One eval of one set against its baselines, as they were before it.

    Of each baseline, [..., B]: its step and loss; `delta_B`, the rise since; `sem_item_B`, `jitter_B` and `sem_B`, the
    parts of its standard error and the whole; `t_B`, NaN where there is nothing to judge by; `low_B` and `high_B`, the
    95 % interval of delta; the state before and after; the first step of the alarm that stands, or -1.
    Of the set, [...]: `loss`; `nu` of the jitter (below 3 it is not measured but taken as twice the item error);
    `df` and `critical`, what t must pass; `detectable`, see `observe`; `spent`, what this eval used of the error.
    Of all: `clusters` ('documents' or 'blocks') and their number; `too_small`, [...], the item error alone makes the
    detectable rise more than twice the tolerance; `no_verdict`, why none can be given at all, else None.
    """

    baseline_steps_B: np.ndarray
    baseline_losses_B: np.ndarray
    delta_B: np.ndarray
    sem_item_B: np.ndarray
    jitter_B: np.ndarray
    sem_B: np.ndarray
    t_B: np.ndarray
    low_B: np.ndarray
    high_B: np.ndarray
    states_before_B: np.ndarray
    states_B: np.ndarray
    first_steps_B: np.ndarray
    loss: np.ndarray
    nu: np.ndarray
    df: np.ndarray
    critical: np.ndarray
    detectable: np.ndarray
    too_small: np.ndarray
    spent: np.ndarray
    clusters: str
    num_clusters: int
    no_verdict: str | None


def begin(step: int, phase_index: int, nats_N: np.ndarray, tokens_N: np.ndarray) -> Watched:
    """What is remembered of a set's first eval, which becomes every baseline.

    `phase_index`: 0 or more, by phase; -1 before the first update, as an eval is of the phase that it closes or stands
    in and this one closes none. From there to the next eval a loss often moves further than ever after.
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
    )
    return _remember(nothing, step, phase_index, _loss(nats_XN, tokens_N))


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
) -> tuple[Watched, Comparison]:
    """Compare an eval with the baselines, then remember it. `phase_index` is that of the phase it closes or stands in.

    SE^2 = SE_item^2 + 2 jitter^2 and t = (delta - tolerance) / SE, held against Student's quantile with
    min(nu, clusters - 1) degrees of freedom at `level`, the chance of a false alarm of one comparison. A set regresses
    where t is above that or its loss is not finite, and stays regressed until t is below 1 by the error of now, by that
    of the alarm, and by that of a set whose jitter is not measured: a large rise makes the scatter large too, and that
    nothing is known any more is no recovery. If only the baseline is not finite, no alarm is raised and a standing one
    ends. At a level of 0 or less a set regresses only by a loss that is not finite.

    `detectable` is the smallest rise above the best eval that the next eval would show with 80 % power if it had the
    errors of this one: tolerance + (critical + t_0.8) SE. It is told of the best eval for two reasons: a rise above
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
        measured, nu = checkpoint_jitter(watched)
        jitter_B, sem_B, df = _errors(sem_item_B, measured[..., None], nu[..., None], num_clusters)
        df = df[..., 0]
        t_B = (delta_B - tolerance) / sem_B
        t_B = np.where((sem_B == 0) & (delta_B == tolerance), 0.0, t_B)
        critical = student_quantile(level, df)
        half_B = student_quantile((1 - _CONFIDENCE) / 2, df)[..., None] * sem_B
        power_t = student_quantile(1 - _POWER, df)
        detectable = tolerance + (critical + power_t) * sem_B[..., BEST]
        of_items = student_quantile(level, num_clusters - 1) + student_quantile(1 - _POWER, num_clusters - 1)
        too_small = (of_items * sem_item_B[..., BEST] > tolerance) & (tolerance > 0) & (level > 0)

    before_B = watched.states_B
    worse_B = (t_B > critical[..., None]) | ~np.isfinite(loss)[..., None]
    at_most_B = np.minimum(watched.recovery_deltas_B, tolerance + _RECOVER_T * _unmeasured_sem(sem_item_B))
    stays_B = (before_B == REGRESSED) & ((t_B >= _RECOVER_T) | (delta_B > at_most_B))
    milder_B = np.where(t_B > _WARN_T, WARNED, OK)
    states_B = np.where(worse_B | stays_B, REGRESSED, milder_B).astype(np.int8)
    since_B = np.where(before_B == REGRESSED, watched.first_steps_B, step)
    first_steps_B = np.where(states_B == REGRESSED, since_B, -1)
    recovery_deltas_B = np.where(before_B == REGRESSED, watched.recovery_deltas_B, tolerance + _RECOVER_T * sem_B)
    recovery_deltas_B = np.where(states_B == REGRESSED, recovery_deltas_B, np.nan)
    comparison = Comparison(
        baseline_steps_B=watched.baseline_steps_B,
        baseline_losses_B=baseline_losses_B,
        delta_B=delta_B,
        sem_item_B=sem_item_B,
        jitter_B=jitter_B,
        sem_B=sem_B,
        t_B=t_B,
        low_B=delta_B - half_B,
        high_B=delta_B + half_B,
        states_before_B=before_B,
        states_B=states_B,
        first_steps_B=first_steps_B,
        loss=loss,
        nu=nu,
        df=df,
        critical=critical,
        detectable=detectable,
        too_small=too_small,
        spent=level * _num_distinct(watched.baseline_steps_B, ~np.isnan(t_B)),
        clusters=kind,
        num_clusters=num_clusters,
        no_verdict=_no_verdict(num_clusters, level),
    )

    best_loss = baseline_losses_B[..., BEST]
    better = (loss < best_loss) | (np.isnan(best_loss) & np.isfinite(loss))
    if better.any():
        watched = _replace_baseline(watched, BEST, step, now_XN, better)
    watched = watched._replace(states_B=states_B, first_steps_B=first_steps_B, recovery_deltas_B=recovery_deltas_B)
    return _remember(watched, step, phase_index, loss), comparison


def begin_phase(watched: Watched, step: int, nats_N: np.ndarray) -> Watched:
    """After `observe` at a boundary: its eval is the new baseline `phase_start`; an alarm against the old one ends."""
    states_B, first_steps_B = watched.states_B.copy(), watched.first_steps_B.copy()
    recovery_deltas_B = watched.recovery_deltas_B.copy()
    states_B[..., PHASE_START], first_steps_B[..., PHASE_START], recovery_deltas_B[..., PHASE_START] = OK, -1, np.nan
    watched = _replace_baseline(watched, PHASE_START, step, np.asarray(nats_N, np.float64), np.True_)
    return watched._replace(states_B=states_B, first_steps_B=first_steps_B, recovery_deltas_B=recovery_deltas_B)


def checkpoint_jitter(watched: Watched) -> tuple[np.ndarray, np.ndarray]:
    """(jitter, nu), [...] each: how much the means of neighbouring checkpoints scatter, and its degrees of freedom.

    A straight line against step is fitted to the evals of the history in each phase: jitter^2 = RSS / nu, both summed
    over the phases, nu = evals - 2 each. The eval before the first update is of no phase. Phases with fewer than 3
    finite losses are left out; jitter is NaN where all are. What is not a line (a steep start) counts as scatter too.
    """
    steps_H, phases_H, losses_XH = watched.history_steps_H, watched.history_phases_H, watched.history_losses_H
    rss, nu = np.zeros(losses_XH.shape[:-1]), np.zeros(losses_XH.shape[:-1], np.int64)
    ends = [*(1 + np.flatnonzero(np.diff(phases_H))), len(phases_H)]
    with np.errstate(invalid="ignore", divide="ignore"):
        for start, end in zip([0, *ends], ends, strict=False):
            used_XH = np.isfinite(losses_XH[..., start:end])  # those that were never measured are NaN
            num = np.count_nonzero(used_XH, axis=-1)
            x_XH = _centred(steps_H[start:end].astype(np.float64), used_XH, num)
            y_XH = _centred(losses_XH[..., start:end], used_XH, num)
            slope = np.sum(x_XH * y_XH, axis=-1) / np.sum(x_XH * x_XH, axis=-1)
            rest_XH = y_XH - slope[..., None] * x_XH
            rss += np.where(num >= 3, np.sum(rest_XH * rest_XH, axis=-1), 0.0)
            nu += np.maximum(num - 2, 0)
        return np.sqrt(rss / nu), nu


def error_level(confidence: float, spent: float, planned: int, left: int) -> float:
    """The level of each comparison of the next eval; 0: no error is left, and no verdict can be given any more.

    planned: comparisons in the whole run as it is planned now, one for each set, baseline and eval after the first.
    left: how many of them are still to come, those of the next eval included; 1 or more.
    Three quarters of the error, 1 - confidence, are divided evenly over the plan. Where a run was extended, some of it
    is `spent` under an older plan: then three quarters of the rest or less are divided over what is left. So the levels
    of a run sum to no more than the error, and it may be extended again and again: what a rise must exceed grows
    slowly, as a quantile does with the logarithm of its level.
    """
    error = 1 - confidence
    rest = error - spent
    if rest <= 1e-9 * error:  # what rounding leaves of all that is spent
        return 0.0
    return min(0.75 * error / planned, rest / (left + planned / 3))


class Change(NamedTuple):
    """A difference of losses and its 95 % interval; NaN where it is not known."""

    value: float
    low: float
    high: float


class Transfer(NamedTuple):
    """One set over the phases: its loss at the start and at each phase end (None where not measured).

    forgetting: last - best over the start and the phase ends, 0 or more: what a run begins with can be forgotten too.
    gain: start - last, positive where the set got better.
    best: where the loss was lowest, 0 at the start, i at the end of phase i - 1; None where no loss is finite.
    """

    start: float
    losses: list[float | None]
    forgetting: Change
    best: int | None
    gain: Change


def transfer(
    watched: Watched, ends: Sequence[np.ndarray | None], tokens_N: np.ndarray, document_N: np.ndarray
) -> Transfer:
    """How a set's loss changed over the phases, from its nats at the end of each; None where it was not measured.

    `watched` is the set's memory after the last eval, without leading axes: it holds the start and the scatter of the
    checkpoints. The set must be measured at the end of the last phase. A checkpoint differs from itself by 0, without
    error.
    """
    start_N, last_N = watched.baseline_nats_BN[START], ends[-1]
    measured = [start_N, *ends]
    losses = [None if nats_N is None else float(_loss(nats_N, tokens_N)) for nats_N in measured]
    finite = [i for i, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    best = min(finite, key=losses.__getitem__, default=None)

    def change(now_N: np.ndarray, before_N: np.ndarray) -> Change:
        delta, sem_item, num_clusters, _ = paired_difference(now_N, before_N, tokens_N, document_N)
        _, sem, df = _errors(sem_item, *checkpoint_jitter(watched), num_clusters)
        half = student_quantile((1 - _CONFIDENCE) / 2, df) * sem
        return Change(float(delta), float(delta - half), float(delta + half))

    if best == len(ends):
        forgetting = Change(0.0, 0.0, 0.0)
    elif best is None:
        forgetting = Change(math.nan, math.nan, math.nan)
    else:
        forgetting = change(last_N, measured[best])
    return Transfer(losses[0], losses[1:], forgetting, best, change(start_N, last_N))


def _errors(
    sem_item: np.ndarray, jitter: np.ndarray, nu: np.ndarray, num_clusters: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(jitter, standard error, degrees of freedom) of a difference between two checkpoints. Both of them jitter."""
    few = nu < MIN_NU
    jitter = np.where(few, _UNMEASURED * sem_item, jitter)
    sem = np.sqrt(sem_item * sem_item + 2 * jitter * jitter)
    return jitter, sem, np.minimum(np.where(few, _FALLBACK_NU, nu), num_clusters - 1)


def _unmeasured_sem(sem_item: np.ndarray) -> np.ndarray:
    """The standard error where the jitter is not measured."""
    return math.sqrt(1 + 2 * _UNMEASURED**2) * sem_item


def _no_verdict(num_clusters: int, level: float) -> str | None:
    if num_clusters < 2:
        return "all its windows are of one document, so nothing tells how much chance there is in a difference"
    if level > 0:
        return None
    return "what the run may err is used up by its comparisons; a lower evalsets.regression.confidence lets it err more"


def _loss(nats_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sum(np.ascontiguousarray(nats_N, np.float64), axis=-1) / np.sum(tokens_N, dtype=np.int64)


def _centred(values_XH: np.ndarray, used_XH: np.ndarray, num: np.ndarray) -> np.ndarray:
    """The used values less their mean, 0 elsewhere."""
    mean = np.sum(np.where(used_XH, values_XH, 0.0), axis=-1) / num
    return np.where(used_XH, values_XH - mean[..., None], 0.0)


def _num_distinct(steps_B: np.ndarray, compared_B: np.ndarray) -> np.ndarray:
    """Comparisons made, those with baselines of the same eval counted once: they are the same comparison."""
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


def _remember(watched: Watched, step: int, phase_index: int, loss: np.ndarray) -> Watched:
    return watched._replace(
        history_steps_H=np.append(watched.history_steps_H[1:], step),
        history_phases_H=np.append(watched.history_phases_H[1:], phase_index),
        history_losses_H=np.concatenate([watched.history_losses_H[..., 1:], loss[..., None]], axis=-1),
    )
