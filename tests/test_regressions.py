"""The detector: the rule against a slow retelling of it, and its corners by hand; test_alarm_rates.py has its rates."""

import math

import numpy as np
import pytest

from evalsets.config import RegressionConfig
from evalsets.metrics import clustered_ratio, paired_difference, student_quantile
from evalsets.regressions import (
    BEST,
    OK,
    PHASE_START,
    REGRESSED,
    START,
    WARNED,
    begin,
    begin_phase,
    error_level,
    observe,
    transfer,
)

LEVEL = 1e-3
CRITICAL_7 = 4.785289628638334  # Student's quantile at LEVEL, 7 degrees of freedom (a table: 4.785)


def regular(num_documents=37, tokens=16):
    """tokens_N, document_N of a set with one window a document."""
    return np.full(num_documents, tokens), np.arange(num_documents)


TOKENS_N = regular()[0]


def through(evals, tolerance=0.0, level=LEVEL, *, phases=None, first_phase=-1, tokens_N=TOKENS_N):
    """(memory, comparisons) of evals at steps 0, 1, ...: the losses of all windows, or their nats; one is a document."""
    evals = [tokens_N * one if np.ndim(one) == 0 else one for one in evals]
    watched, comparisons = begin(0, first_phase, evals[0], tokens_N), []
    for step, nats_N in enumerate(evals[1:], 1):
        phase, document_N = 0 if phases is None else phases[step - 1], np.arange(len(tokens_N))
        watched, seen = observe(watched, step, phase, nats_N, tokens_N, document_N, tolerance=tolerance, level=level)
        comparisons.append(seen)
    return watched, comparisons


# The rule, told once more and slowly


def slow_difference(now_N, before_N, tokens_N, document_N):
    """(delta, item error, clusters) with loops over whole documents."""
    tokens = sum(map(int, tokens_N))
    delta = math.fsum(float(a) - float(b) for a, b in zip(now_N, before_N, strict=True)) / tokens
    u = {}
    for a, b, t, document in zip(now_N, before_N, tokens_N, document_N, strict=True):
        u.setdefault(int(document), []).append(float(a) - float(b) - delta * int(t))
    num = len(u)
    return delta, math.sqrt(num / (num - 1) * math.fsum(math.fsum(g) ** 2 for g in u.values())) / tokens, num


def slow_scatter(evals, typical_item, best_step):
    """(jitter, nu, df, which measure of the phases) from (step, phase, loss) triples; that of step 0 is of no phase.

    About lines by numpy's polynomial fit; about neighbours with the whole matrix of the quadratic form.
    """

    def about_lines(evals, cut):
        rss, nu = 0.0, 0
        pieces = {(p, cut is not None and s > cut) for s, p, _ in evals if p != -1}
        for piece in pieces:
            of_piece = [(s, y) for s, p, y in evals if (p, cut is not None and s > cut) == piece and math.isfinite(y)]
            if len(of_piece) >= 3:
                steps, losses = zip(*of_piece, strict=True)
                rss += math.fsum((np.polyval(np.polyfit(steps, losses, 1), steps) - losses) ** 2)
                nu += len(steps) - 2
        return (math.sqrt(rss / nu), nu) if nu else (math.nan, 0)

    def about_neighbours(evals, cut):
        rows = []
        for i in range(1, len(evals) - 1):
            (s0, p0, y0), (s1, p1, y1), (s2, p2, y2) = evals[i - 1 : i + 2]
            if p0 == p1 == p2 != -1 and math.isfinite(y0 + y1 + y2) and s1 != cut:
                row = np.zeros(len(evals))
                row[i - 1 : i + 2] = -np.interp(s1, [s0, s2], [1, 0]), 1, -np.interp(s1, [s0, s2], [0, 1])
                rows.append(row / np.linalg.norm(row))
        if not rows:
            return math.nan, 0
        form = np.array(rows).T @ np.array(rows)
        losses = np.array([y if math.isfinite(y) else 0 for _, _, y in evals])
        return math.sqrt(losses @ form @ losses / len(rows)), np.trace(form) ** 2 / np.trace(form @ form)

    def bound(jitter, nu, df):
        return jitter * float(student_quantile(1e-4, df)) if nu else math.inf

    def believed(jitter, nu):
        prior = 2 * typical_item
        if not nu:
            return prior, 0, 7
        if jitter > prior:
            return jitter, nu, nu if nu >= 3 else 7
        both = math.sqrt((7 * prior**2 + nu * jitter**2) / (7 + nu)), nu, 7 + nu
        return min([both] + [(jitter, nu, nu)] * bool(nu >= 3), key=lambda one: bound(*one))

    def unless_bent(evals, cut, min_nu):
        found = [believed(*about(evals, cut)) for about in (about_lines, about_neighbours)]
        found = [one for one in found if one[1] >= min_nu]
        return found[-1] if found and bound(*found[0]) > 2 * bound(*found[-1]) else found[0] if found else (0.0, 0, 7)

    first = [e for e in evals if e[1] == 0]
    fallen = len(first) // 3
    while any(first[i + 1][2] >= first[i][2] for i in range(fallen)):
        fallen -= 1
    late = [e for e in evals if e not in first[:fallen]]
    found, kind = unless_bent(evals, None, 0), "whole"
    for factor, other, its_kind in (
        (2, unless_bent(evals, best_step, 3), "cut"),
        (2, unless_bent(late, best_step, 3), "settled"),
    ):
        if bound(*found) > factor * bound(*other):
            found, kind = other, its_kind
    return (*found, kind)


@pytest.mark.parametrize(
    "curve, kinds",
    [
        (lambda k: 9 * 0.8**k - 0.3 * math.sqrt(k) + 0.02 * k, {"unmeasured", "alone", "combined"}),
        (
            lambda k: -0.05 * k + 0.15 * max(0, k - 21),
            {"unmeasured", "alone", "combined", "cut", "settled"},
        ),  # it turns amid a phase
        (
            lambda k: 0.6 * max(0, 2 - k) - 0.05 * k,
            {"unmeasured", "alone", "combined", "settled"},
        ),  # it begins with a steep fall
    ],
    ids=["bent", "turning", "steep"],
)
def test_every_number_of_a_run_agrees_with_loops_and_polyfit(curve, kinds):
    rng = np.random.default_rng(1)
    document_N = np.repeat(np.arange(25), rng.integers(1, 5, 25))
    tokens_N = rng.integers(1, 65, len(document_N))
    tolerance, boundaries = 0.01, {11: 1, 13: 2, 30: 3}  # index of the eval -> phase after it; one phase is of 2 evals
    evals, nats, phase, phase_start, seen_kinds, items = [], [], 0, 0, set(), []
    for k in range(60):
        step = 20 * k + (k % 3)  # not evenly spaced
        noise_N = rng.normal(0, 0.05, 25)[document_N] + rng.normal(0, 0.02, len(document_N))
        nats.append(tokens_N * (4 + curve(k) + rng.normal(0, 0.01) + noise_N))
        loss = math.fsum(nats[k]) / int(tokens_N.sum())
        if k == 0:
            watched = begin(step, -1, nats[k], tokens_N)
        else:
            best = min(range(k), key=lambda i: evals[i][2])
            watched, seen = observe(
                watched, step, phase, nats[k], tokens_N, document_N, tolerance=tolerance, level=LEVEL
            )
            assert (seen.num_clusters, seen.clusters) == (25, "documents")
            assert seen.loss == pytest.approx(loss, rel=1e-12)
            found = [slow_difference(nats[k], nats[b], tokens_N, document_N) for b in (0, phase_start, best)]
            items.append(min(item for _, item, _ in found))
            jitter, nu, df, kind = slow_scatter(evals[-24:], np.median(items[-25:]), evals[best][0])
            kind = kind if kind != "whole" else "alone" if df == nu else "combined"
            seen_kinds.add("unmeasured" if nu == 0 else kind)
            df = min(df, 24)
            assert (seen.jitter, seen.nu, seen.df) == pytest.approx((jitter, nu, df), rel=1e-9)
            for b, k_before in enumerate((0, phase_start, best)):
                delta, item, _ = found[b]
                sem = math.sqrt(item**2 + 2 * jitter**2)
                half = float(student_quantile(0.025, df)) * sem
                assert seen.baseline_steps_B[b] == evals[k_before][0]
                expected = [evals[k_before][2], delta, item, sem, (delta - tolerance) / sem]
                got = [seen.baseline_losses_B, seen.delta_B, seen.sem_item_B, seen.sem_B, seen.t_B]
                # Sums in another order; the differences of losses lose two digits, residuals of a fit three.
                assert [x[b] for x in got] == pytest.approx(expected, rel=1e-9)
                assert (seen.low_B[b], seen.high_B[b]) == pytest.approx((delta - half, delta + half), rel=1e-9)
            assert seen.detectable == pytest.approx(
                0.01 + float(student_quantile(LEVEL, df) + student_quantile(0.2, df)) * sem, rel=1e-9
            )  # `sem` is that of the best, the last of the three
        evals.append((step, phase if k else -1, loss))
        if k in boundaries:
            watched, phase, phase_start = begin_phase(watched, step, nats[k]), boundaries[k], k
    assert seen_kinds == kinds


def test_three_documents_by_hand():
    # Windows of 2, 2, 4, 4 tokens in 3 documents, 12 tokens; differences 1, 1, 4, 0: delta = 6/12.
    # u = (1 - 1) + (1 - 1), 4 - 2, 0 - 2: SE_item^2 = 3/2 * 8 / 12^2 = 1/12. Nothing is known of the jitter, so it is
    # twice that: SE^2 = 9/12. The degrees of freedom are those of 3 documents, and for 2 there is a closed form.
    tokens_N, document_N = np.array([2, 2, 4, 4]), np.array([5, 5, 6, 9])
    watched = begin(0, 0, np.array([3.0, 5.0, 10.0, 6.0]), tokens_N)
    _, seen = observe(watched, 7, 0, np.array([4.0, 6.0, 14.0, 6.0]), tokens_N, document_N, tolerance=0.25, level=0.005)
    sem = math.sqrt(9 / 12)
    assert seen.delta_B.tolist() == [0.5] * 3
    assert seen.sem_item_B == pytest.approx(math.sqrt(1 / 12), rel=1e-14)
    assert seen.jitter == pytest.approx(math.sqrt(4 / 12), rel=1e-14)
    assert seen.sem_B == pytest.approx(sem, rel=1e-14)
    assert seen.t_B == pytest.approx(0.25 / sem, rel=1e-14)
    assert (seen.nu, seen.df) == (0, 2)
    assert seen.critical == pytest.approx(9.924843200918296, rel=1e-12)  # (1 - 2p) / sqrt(2p(1 - p))
    assert seen.high_B == pytest.approx(0.5 + 4.302652729749464 * sem, rel=1e-12)
    assert seen.low_B == pytest.approx(0.5 - 4.302652729749464 * sem, rel=1e-12)
    assert seen.detectable == pytest.approx(0.25 + (9.924843200918296 + 1.0606601717798214) * sem, rel=1e-12)


# States


def alternating(loss, wave, tokens_N):
    """Nats of a set whose windows lie `wave` above and below `loss` in turn; with 2n + 1 windows the middle one is on it.

    Against a set without a wave the item error is wave * sqrt(2n / (2n + 1) / 2n) = wave / sqrt(2n + 1).
    """
    num = len(tokens_N)
    sign_N = np.where(np.arange(num) % 2, 1.0, -1.0)
    sign_N[-1] = 0
    return tokens_N * (loss + wave * sign_N)


class Story:
    """Evals of one set whose standard error is 0.03 against any earlier eval, on 7 degrees of freedom.

    The first eval is flat; later ones have an item error of 0.01 against it; and each is said to be of a phase of its
    own, so that there is never a line to fit and the jitter is twice the item error.
    """

    def __init__(self, tolerance=0.0):
        self.tokens_N, self.document_N = regular()
        self.step, self.tolerance = 0, tolerance
        self.watched = begin(0, 0, self.tokens_N * 2.0, self.tokens_N)

    def eval(self, t, level=LEVEL):
        """The eval whose t against the first is this; the comparison."""
        wave = 0.01 * math.sqrt(37)
        nats_N = alternating(2.0 + self.tolerance + 0.03 * t, wave, self.tokens_N)
        return self.measure(nats_N if math.isfinite(t) else self.tokens_N * t, level)

    def measure(self, nats_N, level=LEVEL):
        self.step += 10
        self.nats_N = nats_N
        self.watched, seen = observe(
            self.watched,
            self.step,
            self.step,
            nats_N,
            self.tokens_N,
            self.document_N,
            tolerance=self.tolerance,
            level=level,
        )
        return seen


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_ok_warned_regressed_recovered(tolerance):
    story = Story(tolerance)
    told = []
    for t in (0.5, 1.64, 1.65, 1.2, 4.7, 4.8, 4.7, 1.01, 0.99, 1.7, 6.0, 7.0):
        seen = story.eval(t)
        assert seen.t_B == pytest.approx(t, rel=1e-9) and seen.critical == pytest.approx(CRITICAL_7, rel=1e-12)
        assert seen.sem_B == pytest.approx(0.03, rel=1e-9) and seen.df == 7
        assert (
            len({(*pair,) for pair in zip(seen.states_before_B, seen.states_B, seen.first_steps_B, strict=True)}) == 1
        )
        told.append((int(seen.states_before_B[START]), int(seen.states_B[START]), int(seen.first_steps_B[START])))
    assert told == [
        (OK, OK, -1),
        (OK, OK, -1),
        (OK, WARNED, -1),
        (WARNED, OK, -1),
        (OK, WARNED, -1),
        (WARNED, REGRESSED, 60),
        (REGRESSED, REGRESSED, 60),  # below the critical value, and still not recovered
        (REGRESSED, REGRESSED, 60),
        (REGRESSED, OK, -1),
        (OK, WARNED, -1),
        (WARNED, REGRESSED, 110),
        (REGRESSED, REGRESSED, 110),
    ]
    assert story.watched.first_steps_B.tolist() == [110] * 3


def test_an_alarm_does_not_end_because_the_error_grew():
    """t falls below 1 with the scatter of later evals, while the rise is beyond the error that the alarm had, 0.005."""
    tokens_N = np.full(41, 10)
    evals = [(2.0, 0.0), (2.5, 0.01), (2.6, 6.0), (2.1, 6.0), (2.006, 6.0), (2.004, 6.0)]
    nats = [alternating(loss, wave, tokens_N) for loss, wave in evals]
    watched, found = through(nats, level=1e-4, first_phase=0, tokens_N=tokens_N)
    told = [(seen.t_B[START] < 1, int(seen.states_B[START]), int(seen.first_steps_B[START])) for seen in found]
    assert np.array_equal(watched.first_steps_B, found[-1].first_steps_B)
    assert told == [(False, REGRESSED, 1), *[(True, REGRESSED, 1)] * 3, (True, OK, -1)]


def test_an_alarm_does_not_end_because_nothing_is_known_any_more():
    """A loss of 147 and what follows scatter by more than the rise that is left, 2; the documents tell that it is one."""
    tokens_N = np.full(41, 10)
    evals = [(7.0, 0.0), *((loss, 12.0) for loss in (147, 326, 194, 215, 163)), (9, 0.5), (7.2, 0.5)]
    _, found = through([alternating(loss, wave, tokens_N) for loss, wave in evals], 0.01, 1e-4, tokens_N=tokens_N)
    told = [(seen.t_B[START] < 1, int(seen.states_B[START])) for seen in found]
    # Item errors are wave / sqrt(41): the alarm's error was 3 * 1.87, and 2 is below that; now it is 3 * 0.078.
    assert [state for _, state in told] == [REGRESSED] * 6 + [OK] and told[5][0]


@pytest.mark.parametrize(
    "before, steps, raised_before, raised",
    [
        ((OK, OK, OK), (0, 20, 30), (-1, -1, -1), (40, 40, 40)),
        ((OK, OK, REGRESSED), (0, 20, 30), (-1, -1, 35), (35, 35, 35)),  # the same rise, by now larger
        ((OK, WARNED, REGRESSED), (0, 30, 30), (-1, -1, 35), (35, 35, 35)),
        ((REGRESSED, OK, OK), (0, 20, 30), (10, -1, -1), (10, 40, 40)),  # another rise, from a lower loss since
        ((REGRESSED, OK, REGRESSED), (0, 20, 25), (10, -1, 35), (10, 35, 35)),
    ],
)
def test_an_alarm_against_an_older_baseline_than_one_that_stands_is_of_the_same_rise(
    before, steps, raised_before, raised
):
    tokens_N, document_N = regular()
    watched = begin(0, 0, tokens_N * np.linspace(2, 3, 37), tokens_N)
    watched = watched._replace(
        states_B=np.array(before, np.int8),
        baseline_steps_B=np.array(steps),
        first_steps_B=np.array(raised_before),
        recovery_deltas_B=np.where(np.array(before) == REGRESSED, 0.1, np.nan),
    )
    nats_N = alternating(9.0, 0.1, tokens_N)
    after, seen = observe(watched, 40, 0, nats_N, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert seen.states_B.tolist() == [REGRESSED] * 3
    assert tuple(seen.first_steps_B) == tuple(after.first_steps_B) == raised
    _, endless = observe(watched, 40, 0, np.inf * tokens_N, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert tuple(endless.first_steps_B) == tuple(40 if first == -1 else first for first in raised_before)
    one_and_two = watched._replace(
        **{
            key: np.stack([array, array])
            for key, array in watched._asdict().items()
            if key not in ("history_steps_H", "history_phases_H")
        }
    )
    nats_XN = np.stack([nats_N, tokens_N * np.linspace(1, 2, 37)])  # the second recovers
    _, both = observe(one_and_two, 40, 0, nats_XN, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert both.first_steps_B.tolist() == [list(raised), [-1] * 3]


def test_an_alarm_against_the_phase_start_ends_with_the_phase():
    story = Story()
    assert story.eval(5.0).states_B.tolist() == [REGRESSED] * 3
    story.watched = begin_phase(story.watched, story.step, story.nats_N)
    assert story.watched.states_B.tolist() == [REGRESSED, OK, REGRESSED]
    assert story.watched.first_steps_B.tolist() == [10, -1, 10]
    assert story.watched.baseline_steps_B.tolist() == [0, 10, 0]
    seen = story.eval(4.9)
    assert seen.states_before_B.tolist() == [REGRESSED, OK, REGRESSED]
    assert seen.states_B.tolist() == [REGRESSED, OK, REGRESSED] and seen.first_steps_B.tolist() == [10, -1, 10]
    assert seen.delta_B[PHASE_START] == pytest.approx(-0.003, rel=1e-9)  # against the eval at the boundary


def test_a_jump_amid_a_phase_is_not_forgotten_when_the_line_is_bent_by_it():
    # The evals after the jump are history to the later ones and swell the jitter; t must not fall below 1 for that.
    rng = np.random.default_rng(2)
    evals = [16 * rng.normal(3, 0.01, 37)]
    evals += [16 * (rng.normal(3, 0.01, 37) + rng.normal(0, 0.005) + 0.5 * (k >= 30)) for k in range(1, 70)]
    states = [seen.states_B.tolist() for seen in through(evals, 0.01, 1e-4, first_phase=0)[1]]
    assert max(states[:29]) < [REGRESSED] * 3 and all(state == [REGRESSED] * 3 for state in states[29:])


def test_the_best_is_compared_with_before_it_is_replaced():
    story = Story()
    story.eval(0.1)
    seen = story.eval(-4.0)
    assert seen.delta_B[BEST] == pytest.approx(-0.12, rel=1e-9) and seen.baseline_steps_B[BEST] == 0
    assert story.watched.baseline_steps_B.tolist() == [0, 0, 20]
    assert np.array_equal(story.watched.baseline_nats_BN[BEST], story.nats_N)
    equal = story.measure(story.nats_N)  # no lower: the earlier one stays
    assert equal.baseline_steps_B.tolist() == story.watched.baseline_steps_B.tolist() == [0, 0, 20]
    assert equal.delta_B[BEST] == 0.0 and equal.delta_B[START] == pytest.approx(-0.12, rel=1e-9)


def test_a_memory_is_not_changed_by_what_follows():
    story = Story()
    story.eval(5.0)
    before = story.watched
    assert before.states_B.tolist() == [REGRESSED] * 3
    kept = [np.copy(array) for array in before]
    story.eval(-9.0)
    begin_phase(before, 99, story.nats_N)
    assert len(kept) == 9 and all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, kept, strict=True))


# Equal, nearly equal and unmeasurable evals


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_equal_parameters_differ_by_exactly_nothing(tolerance):
    rng = np.random.default_rng(3)
    tokens_N = rng.integers(1, 65, 90)
    document_N, nats_N = np.repeat(np.arange(30), 3), rng.normal(3.3, 1, 90) * tokens_N
    watched = begin(0, 0, nats_N, tokens_N)
    for step in range(1, 9):
        watched, seen = observe(watched, step, 0, nats_N, tokens_N, document_N, tolerance=tolerance, level=LEVEL)
        assert seen.delta_B.tolist() == seen.sem_item_B.tolist() == [0.0] * 3
        assert np.all(seen.t_B <= 0) and seen.states_B.tolist() == [OK] * 3
        assert watched.baseline_steps_B.tolist() == [0] * 3
    assert paired_difference(nats_N, nats_N, tokens_N, document_N) == (0.0, 0.0, 30, "documents")


@pytest.mark.parametrize(
    "tolerance, t, state",
    [(0.25, math.inf, REGRESSED), (0.5, 0.0, OK), (0.75, -math.inf, OK)],
    ids=["above", "equal", "below"],
)
def test_a_rise_without_any_error(tolerance, t, state):
    tokens_N, document_N = regular(24)
    watched = begin(0, 0, tokens_N * 2.0, tokens_N)
    watched, seen = observe(watched, 1, 0, tokens_N * 2.5, tokens_N, document_N, tolerance=tolerance, level=LEVEL)
    assert seen.delta_B.tolist() == [0.5] * 3 and seen.sem_B.tolist() == [0.0] * 3
    assert seen.t_B.tolist() == [t] * 3 and seen.states_B.tolist() == [state] * 3
    watched, back = observe(watched, 2, 0, tokens_N * 2.0, tokens_N, document_N, tolerance=tolerance, level=LEVEL)
    assert back.states_B.tolist() == [OK] * 3


@pytest.mark.filterwarnings("error")
def test_one_document_has_no_verdict_and_says_so():
    tokens_N, document_N = np.full(19, 8), np.zeros(19, int)
    watched = begin(0, 0, tokens_N * 1.0, tokens_N)
    watched, seen = observe(watched, 1, 0, tokens_N * 9.0, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert seen.delta_B.tolist() == [8.0] * 3 and (seen.num_clusters, seen.clusters) == (1, "documents")
    assert np.isnan([*seen.t_B, *seen.sem_B, *seen.low_B, *seen.high_B, seen.detectable, seen.critical]).all()
    assert seen.states_B.tolist() == [OK] * 3 and seen.spent == 0 and not seen.too_small
    assert "all its windows are of one document" in seen.no_verdict
    watched, seen = observe(watched, 2, 0, tokens_N * math.nan, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert seen.states_B.tolist() == [REGRESSED] * 3  # that needs no error to be judged by
    watched, seen = observe(watched, 3, 0, tokens_N * 9.0, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    assert seen.states_B.tolist() == [OK] * 3


def test_few_documents_are_judged_by_blocks():
    rng = np.random.default_rng(4)
    tokens_N, document_N = np.full(40, 8), np.repeat([0, 1, 2], [20, 15, 5])
    now_N, before_N = rng.normal(20, 1, 40), rng.normal(20, 1, 40)
    _, seen = observe(begin(0, 0, before_N, tokens_N), 1, 0, now_N, tokens_N, document_N, tolerance=0.0, level=LEVEL)
    delta, item, num = slow_difference(now_N, before_N, tokens_N, np.arange(40) // 2)
    assert (seen.clusters, seen.num_clusters, num) == ("blocks", 20, 20) and seen.no_verdict is None
    assert (seen.delta_B[0], seen.sem_item_B[0]) == pytest.approx((delta, item), rel=1e-12)
    assert paired_difference(now_N, before_N, tokens_N, document_N) == pytest.approx((delta, item, 20, "blocks"))


def test_a_set_that_stands_twice_shows_what_it_shows_once():
    # Sums of 1,024ths and their doubles are exact, so that all is equal to the bit.
    rng = np.random.default_rng(5)
    tokens_N, document_N = np.full(30, 8), np.arange(30)
    evals = [rng.integers(15 * 1024, 25 * 1024, 30) / 1024 for _ in range(3)]
    twice = [np.tile(nats_N, 2) for nats_N in evals]
    tokens_M, document_M = np.tile(tokens_N, 2), np.concatenate([document_N, ~document_N])
    settings = {"tolerance": 0.01, "level": LEVEL}
    once, copied = begin(0, 0, evals[0], tokens_N), begin(0, 0, twice[0], tokens_M)
    for step in (1, 2):
        once, expected = observe(once, step, 0, evals[step], tokens_N, document_N, **settings)
        copied, seen = observe(copied, step, 0, twice[step], tokens_M, document_M, **settings)
        assert (seen.num_clusters, seen.clusters) == (30, "documents") and np.isfinite(seen.sem_B).all()
        for field, value in expected._asdict().items():
            assert np.array_equal(getattr(seen, field), value, equal_nan=isinstance(value, np.ndarray)), field
    expected = transfer(once, evals[1:], tokens_N, document_N)
    assert transfer(copied, twice[1:], tokens_M, document_M) == expected and expected.gain.high > expected.gain.low
    expected = paired_difference(evals[1], evals[0], tokens_N, document_N)
    assert paired_difference(twice[1], twice[0], tokens_M, document_M) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_eval_that_is_not_finite(loss):
    story = Story()
    for t in (0.1, 0.2):
        story.eval(t)
    seen = story.eval(loss)
    assert seen.states_B.tolist() == [REGRESSED] * 3 and seen.first_steps_B.tolist() == [30] * 3
    assert np.isnan(seen.t_B).all() and seen.spent == 0
    assert story.watched.baseline_steps_B.tolist() == [0, 0, 0]
    again = story.eval(loss)
    assert again.states_B.tolist() == [REGRESSED] * 3 and again.first_steps_B.tolist() == [30] * 3
    assert story.eval(2.0).states_B.tolist() == [REGRESSED] * 3  # finite, but not below 1
    assert story.eval(0.5).states_B.tolist() == [OK] * 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_window_that_is_not_finite_is_enough(loss):
    story = Story()
    nats_N = story.tokens_N * 2.0
    nats_N[5] = loss
    assert story.measure(nats_N).states_B.tolist() == [REGRESSED] * 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_baselines_that_are_not_finite(loss):
    story = Story()
    story.watched = begin(0, 0, story.tokens_N * loss, story.tokens_N)
    assert story.eval(loss).states_B.tolist() == [REGRESSED] * 3  # a run that cannot be measured is not well
    seen = story.eval(0.0)
    assert np.isnan(seen.t_B).all() and seen.states_B.tolist() == [OK] * 3 and seen.no_verdict is None
    assert story.watched.baseline_steps_B.tolist() == [0, 0, 20]
    seen = story.measure(alternating(3.0, 0.1, story.tokens_N))
    assert seen.states_B.tolist() == [OK, OK, REGRESSED] and seen.spent == LEVEL

    story = Story()
    story.eval(loss)
    story.watched = begin_phase(story.watched, story.step, story.nats_N)
    assert story.watched.states_B.tolist() == [REGRESSED, OK, REGRESSED]
    assert story.eval(5.0).states_B.tolist() == [REGRESSED, OK, REGRESSED]


# The error that a run may make


def test_a_comparison_made_twice_is_spent_once():
    story = Story()
    assert story.eval(1.0).spent == LEVEL  # start, phase_start and best are all step 0
    assert story.eval(-1.0).spent == LEVEL
    assert story.watched.baseline_steps_B.tolist() == [0, 0, 20]
    assert story.eval(0.0).spent == 2 * LEVEL
    story.watched = begin_phase(story.watched, story.step, story.nats_N)
    assert story.watched.baseline_steps_B.tolist() == [0, 30, 20]
    assert story.eval(-2.0).spent == 3 * LEVEL
    story.watched = begin_phase(story.watched, story.step, story.nats_N)
    assert story.watched.baseline_steps_B.tolist() == [0, 40, 40]
    assert story.eval(0.0).spent == 2 * LEVEL


def test_the_levels_of_a_run_sum_to_its_error():
    planned = 4 * 50 * 3
    assert error_level(0.95, 0.0, planned, planned) == pytest.approx(0.0375 / 600, rel=1e-12)
    # What was not needed is not spent in a hurry: it is there for a run that is extended.
    assert error_level(0.95, 0.02, planned, 12) == pytest.approx(0.0375 / 600, rel=1e-12)
    # Twice as long, with 3/5 of the error gone: 3/5 of what is left, over the 600 comparisons that are left.
    assert error_level(0.95, 0.03, 1200, 600) == pytest.approx(0.6 * 0.02 / 600, rel=1e-9)
    # With little gone, no more than a run of that length would have had.
    assert error_level(0.95, 0.001, 1200, 600) == pytest.approx(0.0375 / 1200, rel=1e-12)

    spent = 0.0
    for done in range(planned):
        spent += error_level(0.95, spent, planned, planned - done)
    assert spent == pytest.approx(0.0375, rel=1e-12)
    assert error_level(0.95, 0.06, 1200, 600) == 0.0  # of a run that had a lower confidence before
    assert error_level(0.95, math.fsum([0.05 / 60] * 60) - 1e-17, 80, 20) == 0.0  # all is spent, but for rounding


def test_extended_again_and_again_a_run_spends_no_more():
    spent, done, planned = 0.0, 0, 30
    for extension in (30, 300, 3, 3000):
        while done < planned:
            distinct = 1 + done % 3
            spent += distinct * error_level(0.9, spent, planned, planned - done)
            done += 3
        planned += extension
    assert 0.05 < spent < 0.1


def test_a_run_that_is_doubled_ten_times_still_has_verdicts():
    spent, done, planned, needed = 0.0, 0, 600, []
    for _ in range(11):
        needed.append(student_quantile(error_level(0.95, spent, planned, planned - done), 100))
        while done < planned:
            spent += error_level(0.95, spent, planned, planned - done)
            done += 1
        planned *= 2
    assert spent < 0.05 and 3.9 < needed[0] < needed[1] < 4.5 and needed[10] < 8


def test_without_error_left_there_are_no_verdicts():
    story = Story(tolerance=0.01)
    seen = story.eval(1e6, level=0.0)
    assert seen.critical == math.inf and seen.states_B.tolist() == [WARNED] * 3 and seen.spent == 0
    assert seen.detectable == math.inf and not seen.too_small
    assert "is used up; lower the confidence" in seen.no_verdict
    assert story.eval(1e6, level=-1e-9).states_B.tolist() == [WARNED] * 3
    assert story.eval(math.nan, level=0.0).states_B.tolist() == [REGRESSED] * 3


@pytest.mark.parametrize(
    "wave, too_small",
    [(0.01, False), (0.015, True)],
)
def test_a_set_may_be_too_small_for_its_tolerance(wave, too_small):
    # The item error alone, wave / sqrt(37), on 36 degrees of freedom: (3.3326 + 0.8517) * wave / sqrt(37) against 0.01.
    tokens_N, document_N = regular()
    watched = begin(0, 0, tokens_N * 2.0, tokens_N)
    nats_N = alternating(2.0, wave, tokens_N)
    for tolerance, expected in ((0.01, too_small), (0.0, False)):
        _, seen = observe(watched, 1, 0, nats_N, tokens_N, document_N, tolerance=tolerance, level=LEVEL)
        assert seen.too_small.tolist() is expected
    assert (3.3326 + 0.8517) * 0.015 / math.sqrt(37) > 0.01 > (3.3326 + 0.8517) * 0.01 / math.sqrt(37)


# Leading axes


def test_leading_axes_equal_single_runs_bit_for_bit():
    rng = np.random.default_rng(5)
    lead, num_evals = (3, 2), 30
    document_N = np.sort(rng.integers(0, 26, 70))
    tokens_N = rng.integers(1, 200, 70)
    nats_EXN = tokens_N * (rng.normal(3, 0.01, (num_evals, *lead, 1)) + rng.normal(0, 0.1, (num_evals, *lead, 70)))
    nats_EXN[20:, 0] += tokens_N
    nats_EXN[4, 1, 1, 3], nats_EXN[7, 2, 0, 0] = math.nan, math.inf

    def run(nats_E):
        watched, seen = begin(0, 0, nats_E[0], tokens_N), []
        for k in range(1, num_evals):
            watched, comparison = observe(
                watched, 10 * k, k // 11, nats_E[k], tokens_N, document_N, tolerance=0.01, level=LEVEL
            )
            seen.append(comparison)
            if k in (10, 21):
                watched = begin_phase(watched, 10 * k, nats_E[k])
        return watched, seen

    watched, together = run([np.asfortranarray(nats) for nats in nats_EXN])
    states = set()
    for one in np.ndindex(lead):
        watched_alone, alone = run(nats_EXN[(slice(None), *one)])
        for got, expected in zip([*together, watched], [*alone, watched_alone], strict=True):
            for name in got._fields:
                a, b = getattr(got, name), getattr(expected, name)
                if name not in ("clusters", "num_clusters", "no_verdict", "history_steps_H", "history_phases_H"):
                    a = a[one]
                assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(b).dtype.kind == "f"), name
        states.update(int(state) for comparison in alone for state in comparison.states_B)
    assert states == {OK, WARNED, REGRESSED}
    cluster_N = np.unique(document_N, return_inverse=True)[1]
    ratio_X, sem_X = clustered_ratio(np.asfortranarray(nats_EXN[9]), tokens_N, cluster_N)
    for one in np.ndindex(lead):
        assert sem_X[one] == clustered_ratio(nats_EXN[9][one], tokens_N, cluster_N)[1]
        assert ratio_X[one] == np.sum(nats_EXN[9][one]) / tokens_N.sum()


def test_a_set_that_nothing_was_taught_of_is_no_worse_until_it_has_been_better():
    tokens_N, document_N = regular()

    def observed(*losses, start=0):
        """The states against the three baselines, with each loss `untaught`; what the last comparison found."""
        watched = begin(start, -1 if start == 0 else 0, alternating(3.0, 0.01, tokens_N), tokens_N)
        for step, loss in enumerate(losses, start + 1):
            nats_N = alternating(loss, 0.02, tokens_N)
            watched, seen = observe(
                watched, step, 0, nats_N, tokens_N, document_N, tolerance=0.01, level=LEVEL, untaught=True
            )
        return watched.states_B.tolist(), seen

    states, seen = observed(4.0, 5.0)
    assert states == [OK] * 3 and seen.unlearned and seen.spent == 0 and (seen.t_B > seen.critical).all()
    states, seen = observed(2.9, 4.0)  # it has been better
    assert states == [REGRESSED] * 3 and not seen.unlearned and seen.spent > 0
    states, seen = observed(math.inf)
    assert states == [REGRESSED] * 3
    states, seen = observed(4.0, start=5)  # it was added then: what it is compared with is trained
    assert states == [REGRESSED] * 3 and not seen.unlearned


@pytest.mark.parametrize("rise", [0.0, 0.25])
def test_an_uneven_rise_in_the_first_evals_does_not_hide_itself(rise):
    """The item error of a rise grows with it; the scatter of checkpoints, taken from item errors until known, less."""
    rng = np.random.default_rng(4)
    share_N = rng.gamma(4.0, 0.25, 36)  # of the rise by document: mean 1, standard deviation 0.5
    start_N = rng.normal(3, 0.3, 36)
    later = (start_N + rng.normal(0, 0.03, 36) + rise * k / 6 * share_N for k in range(7))
    _, found = through([16 * loss_N for loss_N in (start_N, *later)], 0.01, 1e-4, tokens_N=np.full(36, 16))
    alarmed = [bool(np.any(seen.states_B == REGRESSED)) for seen in found]
    assert alarmed[4:] == [rise > 0] * 3 and not any(alarmed[:2])


# Transfer


def test_transfer_by_hand():
    # Losses 4, 3, 2, (not measured), 2.5 of 37 documents of 16 tokens; each end has its own wave about the mean.
    tokens_N, document_N = regular()
    waves = [0.0, 0.02, 0.05, 0.01]
    evals = [alternating(loss, wave, tokens_N) for loss, wave in zip((4.0, 3.0, 2.0, 2.5), waves, strict=True)]
    watched, _ = through(evals, phases=[0, 1, 3], first_phase=0)
    got = transfer(watched, [*evals[1:3], None, evals[3]], tokens_N, document_N)
    assert got.start == 4.0 and got.best == 2
    assert got.losses == [pytest.approx(3.0), pytest.approx(2.0), None, pytest.approx(2.5)]
    # No phase has 3 evals: the jitter is twice the median of the evals' smallest item errors, (wave of the difference) /
    # sqrt(37) with waves of 0.02, 0.03 and 0.01. There are 7 degrees of freedom.
    half = 2.364624251592785 * math.sqrt(0.04**2 + 2 * (2 * 0.02) ** 2) / math.sqrt(37)
    assert got.forgetting == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-9)
    half = 2.364624251592785 * math.sqrt(0.01**2 + 2 * (2 * 0.02) ** 2) / math.sqrt(37)
    assert got.gain == pytest.approx((1.5, 1.5 - half, 1.5 + half), rel=1e-9)


def test_transfer_counts_the_scatter_of_the_checkpoints():
    tokens_N, document_N = regular()
    losses = [3.2, 3.1, 3.0, 2.9, 2.75, 2.6, 2.52, 2.4, 2.6]
    evals = [alternating(loss, 0.01 * k, tokens_N) for k, loss in enumerate(losses)]
    watched, _ = through(evals, first_phase=0)
    got = transfer(watched, [evals[7], evals[8]], tokens_N, document_N)
    typical = 0.01 / math.sqrt(37)  # the wave by which each eval differs from the one before, which was the best
    jitter, nu, df, _ = slow_scatter([(k, 0, loss) for k, loss in enumerate(losses)], typical, 7)  # the last eval too
    half = float(student_quantile(0.025, df)) * math.sqrt(0.01**2 / 37 + 2 * jitter**2)
    assert nu > 3 and half > 3 * typical  # more than the documents alone say
    assert got.forgetting == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-9)
    # The last is the best: nothing lies between a checkpoint and itself.
    assert transfer(watched, [evals[8], evals[7]], tokens_N, document_N).forgetting == (0.0, 0.0, 0.0)


def test_transfer_without_a_loss_or_without_a_doubt():
    tokens_N, document_N = regular()
    watched = begin(0, 0, tokens_N * 4.0, tokens_N)
    lowest_last = transfer(watched, [tokens_N * 3.0, tokens_N * 2.0], tokens_N, document_N)
    assert lowest_last.best == 2 and lowest_last.gain == (2.0, 2.0, 2.0)
    known = transfer(
        watched, [tokens_N * 5.0, tokens_N * 4.5], tokens_N, document_N
    )  # the start was never reached again
    assert known.best == 0 and known.forgetting == (0.5, 0.5, 0.5) and known.gain == (-0.5, -0.5, -0.5)
    # Random parameters know nothing; what a set that is added later begins with is known.
    ends = [tokens_N * 4.25, tokens_N * 4.5]
    random = transfer(watched, ends, tokens_N, document_N, from_scratch=True)
    assert random.best == 1 and random.forgetting == (0.25, 0.25, 0.25) and random.gain == (-0.5, -0.5, -0.5)
    added = transfer(begin(9, 0, tokens_N * 4.0, tokens_N), ends, tokens_N, document_N, from_scratch=True)
    assert added.best == 0 and added.forgetting == (0.5, 0.5, 0.5)
    unmeasured = begin(0, 0, tokens_N * math.nan, tokens_N)
    dead = transfer(unmeasured, [tokens_N * math.nan], tokens_N, document_N)
    assert dead.best is None and np.isnan([*dead.forgetting, *dead.gain, *dead.losses]).all()
    died = transfer(watched, [tokens_N * 3.0, tokens_N * math.inf], tokens_N, document_N)
    assert died.best == 1 and died.losses == [3.0, math.inf] and died.forgetting.value == math.inf
    one = transfer(watched, [tokens_N * 2.0, tokens_N * 3.0], tokens_N, np.zeros(37, int) + 5)
    assert one.forgetting.value == 1.0  # blocks: 37 windows of one document
    tokens_N = tokens_N[:5]
    single = transfer(
        begin(0, 0, tokens_N * 4.0, tokens_N), [tokens_N * 2.0, tokens_N * 3.0], tokens_N, np.zeros(5, int)
    )
    assert single.forgetting.value == 1.0 and np.isnan(single.forgetting[1:]).all()


# The section of the config


def test_settings_out_of_range_are_told():
    assert RegressionConfig().problems() == []
    assert RegressionConfig(tolerance=0, confidence=0.51, replay_factor=10, replay_max_share=0.99).problems() == []
    assert RegressionConfig(-0.01, 0.5, "log", 1.0, 1.0).problems() == [
        ("tolerance", "got -0.01, expected a finite number, 0 or more"),
        ("confidence", "got 0.5, expected above 0.5 and below 1"),
        ("replay_factor", "got 1.0, expected above 1, at most 10"),
        ("replay_max_share", "got 1.0, expected above 0 and below 1"),
    ]
    wrong = RegressionConfig(math.inf, 1.0, "log", 10.5, 0.0)
    assert [field for field, _ in wrong.problems()] == ["tolerance", "confidence", "replay_factor", "replay_max_share"]
    assert len(RegressionConfig(math.nan, math.nan, "log", math.nan, math.nan).problems()) == 4
