"""Whether an eval set got worse by more than noise and tolerance, compared with three remembered evals.

A verdict compares the same windows under two checkpoints. Two things make the means of two equally good checkpoints
differ: which documents the set happens to hold (the item error) and where on its noisy path training was halted
(the jitter, seen in the scatter of the set's own evals).

Pure numpy. Shapes: N windows, B baselines in the order of `BASELINES`, H evals of the history. Every function but
`transfer` takes leading axes (`...`: runs or sets with the same windows) and gives each what it would get alone, bit
for bit. Losses, differences and errors are in nats per token.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evalsets.metrics import clustered_ratio, clusters, paired_difference, student_quantile

BASELINES = ("start", "phase_start", "best")
START, PHASE_START, BEST = range(3)
OK, WARNED, REGRESSED = range(3)

NUM_HISTORY = 24  # evals from which the scatter of a set is measured
_WARN_T, _RECOVER_T = 1.645, 1.0
MIN_NU = 3
_UNMEASURED, _PRIOR_NU = 2.0, 7  # what jitter is taken to be beforehand, in typical item errors, and how firmly
_CHANCE, _BENT = 1e-4, 2.0  # tail of the bounds by which two measures of the jitter are compared, and how
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
        scatter = checkpoint_jitter(watched, item)
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
    at_most_B = np.minimum(watched.recovery_deltas_B, tolerance + _RECOVER_T * _unmeasured_sem(sem_item_B))
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


class Scatter(NamedTuple):
    """The jitter of neighbouring checkpoints, [...] each.

    nu: degrees of freedom with which it was measured, 0 if it was not. df: those of the quantiles to use with it.
    bound: the jitter times the quantile of `_CHANCE`, by which measures are compared; inf if nothing was measured.
    """

    jitter: np.ndarray
    nu: np.ndarray
    df: np.ndarray
    bound: np.ndarray


def checkpoint_jitter(watched: Watched, item: np.ndarray) -> Scatter:
    """The scatter of the mean losses of neighbouring checkpoints. item: [...], what `history_items_H` has of each eval.

    It is measured within each phase (the eval before the first update is in none), about straight lines unless they
    are bent: if the bound of that scatter is more than twice the bound of the scatter about neighbours, the latter is
    taken. About lines a falling loss scatters by its curvature. About neighbours it hardly does, but they do not see
    slow noise either, which lines do, and leave half as many degrees of freedom. By the same rule each phase is cut at
    the set's best eval: where a falling loss turns, a line is bent, and so is the one between the neighbours of the
    turn. Likewise the fall that the run begins with is left out besides: it bends lines and neighbours alike, and in a
    run of few evals would count as scatter for most of it. Both take measures of 3 degrees of freedom or more.
    """
    typical = _typical_item(watched, item)
    best_step = watched.baseline_steps_B[..., BEST, None]

    def measured(history: Watched, cut: np.ndarray | None, min_nu: int) -> Scatter:
        found = (_scatter(*about(history, cut), typical) for about in (_about_lines, _about_neighbours))
        return _unless_bent(*(s._replace(bound=np.where(s.nu < min_nu, np.inf, s.bound)) for s in found))

    whole, turned = measured(watched, None, 0), measured(watched, best_step, MIN_NU)
    settled = measured(_without_first_fall(watched), best_step, MIN_NU)
    return _unless_bent(_unless_bent(whole, turned), settled)


def _unless_bent(usual: Scatter, other: Scatter) -> Scatter:
    bent = usual.bound > _BENT * other.bound
    return Scatter(*(np.where(bent, b, a) for a, b in zip(usual, other, strict=True)))


def _without_first_fall(watched: Watched) -> Watched:
    """The memory without the evals, at most a third of its first phase, from which the loss only fell at first.

    As long as it reaches back to the start of that phase. Scatter makes such a fall of several evals rarely.
    """
    places = np.flatnonzero(watched.history_phases_H == 0)
    if not len(places) or places[0] == 0:
        return watched
    start, end = places[0], places[0] + len(places) // 3
    losses_XH = watched.history_losses_H.copy()
    falls_X = np.logical_and.accumulate(np.diff(losses_XH[..., start : end + 1]) < 0, axis=-1)
    losses_XH[..., start:end] = np.where(falls_X, np.nan, losses_XH[..., start:end])
    return watched._replace(history_losses_H=losses_XH)


def _scatter(jitter: np.ndarray, nu: np.ndarray, typical_item: np.ndarray) -> Scatter:
    """What is believed of a jitter that was measured with `nu` degrees of freedom.

    Beforehand it is taken to be `_UNMEASURED` typical item errors, with `_PRIOR_NU` degrees of freedom. A measure that
    is not above that is combined with it (the posterior of a normal variance under its conjugate prior: Gelman et al.,
    Bayesian Data Analysis, section 2.6) unless it has the smaller bound alone. One above it shows that the documents of
    the set are too many for its scatter to go by their error, and stands alone.
    """
    prior = _UNMEASURED * typical_item
    nu = np.where(np.isfinite(jitter), nu, 0.0)
    with np.errstate(invalid="ignore"):
        measured = np.where(nu > 0, jitter, 0.0)
        within = measured <= prior
        combined = np.sqrt((_PRIOR_NU * prior**2 + nu * measured**2) / (_PRIOR_NU + nu))
        believed = np.where(within, combined, measured)
        df = np.where(within, _PRIOR_NU + nu, np.where(nu < MIN_NU, _PRIOR_NU, nu))
        bound = believed * student_quantile(_CHANCE, df)
        bound_alone = measured * student_quantile(_CHANCE, np.maximum(nu, 1))
        alone = (nu >= MIN_NU) & (bound_alone < bound)
    bound = np.where(nu > 0, np.where(alone, bound_alone, bound), np.inf)
    return Scatter(np.where(alone, measured, believed), nu, np.where(alone, nu, df), bound)


def _about_neighbours(watched: Watched, best_step: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(jitter, nu) of each eval about the line between the evals before and after it, all three of one phase.

    With `best_step` [..., 1] the eval of that step is left out. jitter^2 is the mean of e^2, where e is the distance
    from that line divided by its standard deviation for a jitter of 1 (Gasser, Sroka and Jennen-Steinmetz, Biometrika
    73, 1986). Neighbouring e have evals in common: with A the quadratic form of their sum of squares, nu =
    (trace A)^2 / trace A^2 (Satterthwaite, Biometrics Bulletin 2, 1946), about half as many as evals.
    """
    steps_H, phases_H, losses_XH = watched.history_steps_H, watched.history_phases_H, watched.history_losses_H
    steps_H = steps_H.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        before_M = (steps_H[2:] - steps_H[1:-1]) / (steps_H[2:] - steps_H[:-2])  # weight of the eval before
        after_M = 1 - before_M
        scale_M = np.sqrt(1 + before_M**2 + after_M**2)
        line_XM = before_M * losses_XH[..., :-2] + after_M * losses_XH[..., 2:]
        e_XM = (losses_XH[..., 1:-1] - line_XM) / scale_M
        within_M = (phases_H[:-2] == phases_H[1:-1]) & (phases_H[1:-1] == phases_H[2:])
        used_XM = within_M & np.isfinite(e_XM)  # empty places of the history are NaN
        if best_step is not None:
            used_XM &= steps_H[1:-1] != best_step
        next_M = (before_M[1:] + after_M[:-1]) / (scale_M[1:] * scale_M[:-1])  # correlation of e with the next one
        second_M = after_M[:-2] * before_M[2:] / (scale_M[:-2] * scale_M[2:])  # and with the one after that
        num = np.count_nonzero(used_XM, axis=-1)
        trace = num + 2 * np.sum(np.where(used_XM[..., 1:] & used_XM[..., :-1], next_M**2, 0.0), axis=-1)
        trace += 2 * np.sum(np.where(used_XM[..., 2:] & used_XM[..., :-2], second_M**2, 0.0), axis=-1)
        jitter = np.sqrt(np.sum(np.where(used_XM, e_XM * e_XM, 0.0), axis=-1) / num)
        return jitter, np.where(num > 0, num * num / trace, 0.0)


def _about_lines(watched: Watched, best_step: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(jitter, nu) about a straight line against step in each phase: jitter^2 = RSS / nu.

    Both are summed over the phases, with nu = evals - 2 for each. Phases with fewer than 3 finite losses are left out;
    if all are, jitter is NaN. With `best_step` [..., 1] the evals of a phase up to that step and after it have a line
    each.
    """
    steps_H, phases_H, losses_XH = watched.history_steps_H, watched.history_phases_H, watched.history_losses_H
    rss, nu = np.zeros(losses_XH.shape[:-1]), np.zeros(losses_XH.shape[:-1], np.int64)
    finite_XH = np.isfinite(losses_XH)  # empty places of the history are NaN
    sides = [finite_XH]
    if best_step is not None:
        sides = [finite_XH & (steps_H <= best_step), finite_XH & (steps_H > best_step)]
    ends = [*(1 + np.flatnonzero(np.diff(phases_H))), len(phases_H)]
    with np.errstate(invalid="ignore", divide="ignore"):
        for (start, end), side_XH in itertools.product(zip([0, *ends], ends, strict=False), sides):
            used_XH = side_XH[..., start:end]
            num = np.count_nonzero(used_XH, axis=-1)
            x_XH = _centred(steps_H[start:end].astype(np.float64), used_XH, num)
            y_XH = _centred(losses_XH[..., start:end], used_XH, num)
            slope = np.sum(x_XH * y_XH, axis=-1) / np.sum(x_XH * x_XH, axis=-1)
            rest_XH = y_XH - slope[..., None] * x_XH
            rss += np.where(num >= 3, np.sum(rest_XH * rest_XH, axis=-1), 0.0)
            nu += np.maximum(num - 2, 0)
        return np.sqrt(rss / nu), nu


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

    scatter = checkpoint_jitter(watched, np.asarray(np.nan))

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


def _typical_item(watched: Watched, item: np.ndarray) -> np.ndarray:
    """The median of the item errors of the last evals and of the next, `item`; 0 if there is none.

    Unmeasured jitter is taken from it rather than from the item error at hand, which grows with a rise, as no rise is
    even over the documents: a large one would hide itself. A median, as two evals may be much closer than most.
    """
    items_XH = np.concatenate([watched.history_items_H, item[..., None]], axis=-1)
    some_X = np.any(np.isfinite(items_XH), axis=-1)
    return np.nanmedian(np.where(some_X[..., None], items_XH, 0.0), axis=-1)


def _unmeasured_sem(sem_item: np.ndarray) -> np.ndarray:
    """The standard error if the jitter is not measured."""
    return _sem(sem_item, _UNMEASURED * sem_item)


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


def _centred(values_XH: np.ndarray, used_XH: np.ndarray, num: np.ndarray) -> np.ndarray:
    """The used values less their mean, 0 elsewhere."""
    mean = np.sum(np.where(used_XH, values_XH, 0.0), axis=-1) / num
    return np.where(used_XH, values_XH - mean[..., None], 0.0)


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
