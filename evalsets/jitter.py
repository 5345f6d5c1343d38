"""The jitter: how much a set's mean loss scatters from one checkpoint to the next, measured from its own evals.

Pure numpy. Shapes: H evals of the history, X leading axes and H, M evals that have one before and one after. Leading
axes (`...`) are sets or runs, each with what it would get alone, bit for bit. Losses are in nats per token.
"""

import itertools
from typing import NamedTuple

import numpy as np

from evalsets.metrics import student_quantile

UNMEASURED = 2.0  # what jitter is taken to be beforehand, in typical item errors
_PRIOR_NU = 7  # and how firmly
MIN_NU = 3  # degrees of freedom from which a measure can stand alone
_CHANCE, _BENT = 1e-4, 2.0  # tail of the bounds by which two measures of the jitter are compared, and how


class History(NamedTuple):
    """The last evals of a set, oldest first.

    steps_H, phases_H: int64 [H], step and phase; the phase is -1 in empty places and for the eval before the first
        update.
    losses_H: float64 [..., H], NaN in empty places.
    items_H: float64 [..., H], the smallest positive item error that each eval had against a baseline, or NaN.
    """

    steps_H: np.ndarray
    phases_H: np.ndarray
    losses_H: np.ndarray
    items_H: np.ndarray


class Scatter(NamedTuple):
    """The jitter of neighbouring checkpoints, [...] each.

    nu: degrees of freedom with which it was measured, 0 if it was not. df: those of the quantiles to use with it.
    bound: the jitter times the quantile of `_CHANCE`, by which measures are compared; inf if nothing was measured.
    """

    jitter: np.ndarray
    nu: np.ndarray
    df: np.ndarray
    bound: np.ndarray


def checkpoint_jitter(history: History, best_step: np.ndarray, item: np.ndarray) -> Scatter:
    """The scatter of the mean losses of neighbouring checkpoints.

    best_step: [...], the step of the set's best eval.
    item: [...], what `items_H` will have of the eval at hand; NaN if there is none.

    It is measured within each phase (the eval before the first update is in none), about straight lines unless they
    are bent: if the bound of that scatter is more than twice the bound of the scatter about neighbours, the latter is
    taken. About lines a falling loss scatters by its curvature. About neighbours it hardly does, but they do not see
    slow noise either, which lines do, and leave half as many degrees of freedom. By the same rule each phase is cut at
    the set's best eval: where a falling loss turns, a line is bent, and so is the one between the neighbours of the
    turn. Likewise the fall that the run begins with is left out besides: it bends lines and neighbours alike, and in a
    run of few evals would count as scatter for most of it. Both take measures of 3 degrees of freedom or more.
    """
    typical = _typical_item(history, item)
    cut = best_step[..., None]
    whole = _measured(history, None, 0, typical)
    turned = _measured(history, cut, MIN_NU, typical)
    settled = _measured(_without_first_fall(history), cut, MIN_NU, typical)
    return _unless_bent(_unless_bent(whole, turned), settled)


def _measured(history: History, cut: np.ndarray | None, min_nu: int, typical_item: np.ndarray) -> Scatter:
    """The scatter about lines or, if they are bent, about neighbours; each counts from `min_nu` on."""

    def believed(jitter: np.ndarray, nu: np.ndarray) -> Scatter:
        scatter = _scatter(jitter, nu, typical_item)
        return scatter._replace(bound=np.where(scatter.nu < min_nu, np.inf, scatter.bound))

    return _unless_bent(believed(*_about_lines(history, cut)), believed(*_about_neighbours(history, cut)))


def _unless_bent(usual: Scatter, other: Scatter) -> Scatter:
    bent = usual.bound > _BENT * other.bound
    return Scatter(*(np.where(bent, b, a) for a, b in zip(usual, other, strict=True)))


def _without_first_fall(history: History) -> History:
    """The history without the first evals of the run's first phase, at most a third of those there, while losses fell.

    Scatter makes such a fall of several evals rarely. Of one that has begun before the history the rest is left out.
    """
    places = np.flatnonzero(history.phases_H == 0)
    if not len(places):
        return history
    start, end = places[0], places[0] + len(places) // 3
    losses_XH = history.losses_H.copy()
    falls_X = np.logical_and.accumulate(np.diff(losses_XH[..., start : end + 1]) < 0, axis=-1)
    losses_XH[..., start:end] = np.where(falls_X, np.nan, losses_XH[..., start:end])
    return history._replace(losses_H=losses_XH)


def _scatter(jitter: np.ndarray, nu: np.ndarray, typical_item: np.ndarray) -> Scatter:
    """What is believed of a jitter that was measured with `nu` degrees of freedom.

    Beforehand it is taken to be `UNMEASURED` typical item errors, with `_PRIOR_NU` degrees of freedom. A measure that
    is not above that is combined with it (the posterior of a normal variance under its conjugate prior: Gelman et al.,
    Bayesian Data Analysis, section 2.6) unless it has the smaller bound alone. One above it shows that the documents of
    the set are too many for its scatter to go by their error, and stands alone.
    """
    prior = UNMEASURED * typical_item
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


def _about_neighbours(history: History, best_step: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(jitter, nu) of each eval about the line between the evals before and after it, all three of one phase.

    With `best_step` [..., 1] the eval of that step is left out. jitter^2 is the mean of e^2, where e is the distance
    from that line divided by its standard deviation for a jitter of 1 (Gasser, Sroka and Jennen-Steinmetz, Biometrika
    73, 1986). Neighbouring e have evals in common: with A the quadratic form of their sum of squares, nu =
    (trace A)^2 / trace A^2 (Satterthwaite, Biometrics Bulletin 2, 1946), about half as many as evals.
    """
    steps_H, phases_H, losses_XH = history.steps_H, history.phases_H, history.losses_H
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


def _about_lines(history: History, best_step: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(jitter, nu) about a straight line against step in each phase: jitter^2 = RSS / nu.

    Both are summed over the phases, with nu = evals - 2 for each. Phases with fewer than 3 finite losses are left out;
    if all are, jitter is NaN. With `best_step` [..., 1] the evals of a phase up to that step and after it have a line
    each.
    """
    steps_H, phases_H, losses_XH = history.steps_H, history.phases_H, history.losses_H
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


def _typical_item(history: History, item: np.ndarray) -> np.ndarray:
    """The median of the item errors of the last evals and of the next, `item`; 0 if there is none.

    Unmeasured jitter is taken from it rather than from the item error at hand, which grows with a rise, as no rise is
    even over the documents: a large one would hide itself. A median, as two evals may be much closer than most.
    """
    items_XH = np.concatenate([history.items_H, item[..., None]], axis=-1)
    some_X = np.any(np.isfinite(items_XH), axis=-1)
    return np.nanmedian(np.where(some_X[..., None], items_XH, 0.0), axis=-1)


def _centred(values_XH: np.ndarray, used_XH: np.ndarray, num: np.ndarray) -> np.ndarray:
    """The used values less their mean, 0 elsewhere."""
    mean = np.sum(np.where(used_XH, values_XH, 0.0), axis=-1) / num
    return np.where(used_XH, values_XH - mean[..., None], 0.0)
