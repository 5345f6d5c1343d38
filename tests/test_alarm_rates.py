"""The detector's error rates and power, by simulation: the functions that the trainer calls, many runs at a time."""

import math

import numpy as np
import pytest
from test_regressions import regular

from evalsets.regressions import PHASE_START, REGRESSED, START, begin, begin_phase, error_level, observe

NUM_DOCUMENTS, ITEM_ERROR, JITTER = 40, 0.0105, 0.009
NUM_SETS, NUM_EVALS, PHASE_ENDS = 4, 50, (17, 34)
BLOCK = 100  # runs at a time: what fits a cache


class Simulation:
    """Runs of sets whose true loss stays what it is, with leading axes `lead`, measured at step 0 and NUM_EVALS times.

    Or it falls by `fall` of the number of evals so far. A checkpoint's mean moves by an AR(1) of standard deviation
    `jitter`; each document adds noise of its own, which gives the difference of two evals a standard error of
    `item_error`. The level is that of `num_evals` of `num_sets` sets.
    """

    def __init__(
        self, rng, lead, rho, tolerance, fall=lambda k: 0.0, item_error=ITEM_ERROR, jitter=JITTER,
        *, num_evals=NUM_EVALS, num_sets=NUM_SETS, phase_ends=PHASE_ENDS,
    ):  # fmt: skip
        self.rng, self.lead, self.rho, self.tolerance, self.fall, self.sd = rng, lead, rho, tolerance, fall, jitter
        self.per_document = item_error * math.sqrt(NUM_DOCUMENTS / 2)
        self.tokens_N, self.document_N = regular(NUM_DOCUMENTS, 512)
        self.jitter, self.rise, self.k, self.phase = rng.normal(0, jitter, lead), np.zeros(lead), 0, 0
        self.watched = begin(0, -1, self.nats(), self.tokens_N)
        self.phase_ends, planned = phase_ends, num_sets * num_evals * 3
        self.level = error_level(0.95, 0.0, planned, planned)

    def nats(self):
        own = self.rng.normal(0, self.per_document, (*self.lead, NUM_DOCUMENTS))
        return self.tokens_N * ((3 + self.jitter + self.rise - self.fall(self.k))[..., None] + own)

    def eval(self):
        self.k += 1
        fresh = self.rng.normal(0, self.sd, self.lead)
        self.jitter = self.rho * self.jitter + math.sqrt(1 - self.rho**2) * fresh
        nats = self.nats()
        self.watched, seen = observe(
            self.watched,
            100 * self.k,
            self.phase,
            nats,
            self.tokens_N,
            self.document_N,
            tolerance=self.tolerance,
            level=self.level,
        )
        if self.k in self.phase_ends:
            self.watched = begin_phase(self.watched, 100 * self.k, nats)
            self.phase += 1
        return seen


def alarmed_share(rng, num_runs, *settings, num_evals=NUM_EVALS, note=lambda seen: None, **more):
    alarmed = 0
    for _ in range(num_runs // BLOCK):
        simulation = Simulation(rng, (BLOCK, NUM_SETS), *settings, num_evals=num_evals, **more)
        any_alarm = np.zeros(BLOCK, bool)
        for _ in range(num_evals):
            seen = simulation.eval()
            any_alarm |= np.any(seen.states_B == REGRESSED, axis=(1, 2))
            note(seen)
        alarmed += int(np.count_nonzero(any_alarm))
    print(f"{settings} {more}: any alarm in {alarmed} of {num_runs} runs")
    return alarmed / num_runs


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_runs_in_which_all_get_better_at_first(rho):
    rng = np.random.default_rng([8, int(10 * rho)])
    assert alarmed_share(rng, 500, rho, 0.0, fall=lambda k: 2.5 * (1 - 0.9**k)) <= 0.05


@pytest.mark.parametrize(
    ("rho", "item_error", "tolerance", "at_most"),
    [
        (0.0, 0.01, 0.0, 0.05),
        (0.5, 0.01, 0.0, 0.11),
        (0.5, 0.01, 0.02, 0.02),
        (0.0, 0.007, 0.0, 0.06),
        (0.0, 0.007, 0.01, 0.02),
    ],
)
def test_runs_in_which_checkpoints_scatter_more_than_documents(rho, item_error, tolerance, at_most):
    """What docs/evals.md says of them: where neighbours are alike, or few are known, scatter is seen too small."""
    rng = np.random.default_rng([10, int(10 * rho)])
    assert alarmed_share(rng, 1000, rho, tolerance, item_error=item_error, jitter=0.02) <= at_most


@pytest.mark.parametrize(("tolerance", "at_most"), [(0.01, 0.2), (0.02, 0.04), (0.03, 0.02)])
def test_sets_so_large_that_their_scatter_is_not_known_at_first(tolerance, at_most):
    """What docs/evals.md says of them: a document error of 0.001 beside a scatter of 0.009."""
    rng = np.random.default_rng([9, int(100 * tolerance)])
    assert 0.001 < alarmed_share(rng, 1000, 0.0, tolerance, item_error=0.001) <= at_most


@pytest.mark.parametrize("close", [1, 3])
@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_two_evals_that_are_much_alike_make_no_false_alarms(close, tolerance):
    """A phase ends right after an eval, or the first eval is within a warm-up: their difference is a tenth of others."""
    num_runs, num_evals, item_error, jitter = 1000, 12, 0.01, 0.02
    rng = np.random.default_rng([11, close, int(100 * tolerance)])
    tokens_N, document_N = regular(NUM_DOCUMENTS, 512)
    level = error_level(0.95, 0.0, 3 * num_evals, 3 * num_evals)

    def losses():
        own = rng.normal(0, item_error * math.sqrt(NUM_DOCUMENTS / 2), (num_runs, NUM_DOCUMENTS))
        return 3 + rng.normal(0, jitter, (num_runs, 1)) + own

    before = losses()
    watched, any_alarm = begin(0, -1, tokens_N * before, tokens_N), np.zeros(num_runs, bool)
    for k in range(1, num_evals + 1):
        now = losses()
        now = before + 0.1 * (now - before) if k == close else now
        watched, seen = observe(
            watched, 10 * k, int(k > close), tokens_N * now, tokens_N, document_N, tolerance=tolerance, level=level
        )
        watched = begin_phase(watched, 10 * k, tokens_N * now) if k == close else watched
        any_alarm |= np.any(seen.states_B == REGRESSED, axis=-1)
        before = now
    print(f"close {close}, tolerance {tolerance}: any alarm in {np.count_nonzero(any_alarm)} of {num_runs} runs")
    assert np.mean(any_alarm) <= 0.05


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_runs_in_which_nothing_gets_worse(rho, tolerance):
    rng = np.random.default_rng([6, int(10 * rho), int(100 * tolerance)])
    item_errors, spent = [], []

    def note(seen):
        item_errors.append(np.mean(seen.sem_item_B[..., START]))
        spent.append(np.sum(seen.spent) / 2000)

    assert alarmed_share(rng, 2000, rho, tolerance, note=note) <= 0.05
    assert np.mean(item_errors) == pytest.approx(ITEM_ERROR, rel=0.02)  # the noise is what the test says it is
    assert 0.0225 < sum(spent) <= 0.0375


@pytest.mark.parametrize(
    ("jitter", "fall", "at_least"),
    [(0.005, 0.0, 0.75), (0.01, 0.0, 0.63), (0.005, 0.5, 0.4), (0.01, 0.5, 0.4)],  # after a fall by 0.5 it turns
)
def test_a_steep_rise_amid_the_phase_of_a_run_of_twenty_evals_is_found_by_the_fourth(jitter, fall, at_least):
    """It bends the curve that the scatter is measured about, of which few evals are known."""
    fallen = lambda k: fall * (1 - 0.8 ** min(k, 6))  # noqa: E731
    simulation = Simulation(np.random.default_rng(12), (500,), 0.0, 0.01, fallen, 0.01, jitter, num_evals=20)
    for _ in range(6):
        assert np.mean(simulation.eval().states_B == REGRESSED) == 0
    found = np.zeros(500, bool)
    for k in range(1, 5):
        simulation.rise = np.full(500, 0.2 * (1 - math.exp(-k / 3)))
        found |= np.any(simulation.eval().states_B == REGRESSED, axis=-1)
    print(f"jitter {jitter}, fall {fall}: found in {np.mean(found):.3f}")
    assert np.mean(found) >= at_least


@pytest.mark.parametrize("phase_ends", [(10,), ()])
@pytest.mark.parametrize(
    ("item_error", "jitter", "at_least"), [(0.03, 0.02, 0.95), (0.02, 0.01, 0.98), (0.03, 0.05, 0.5)]
)
def test_a_steep_start_of_a_run_of_twenty_evals_does_not_hide_a_rise(item_error, jitter, at_least, phase_ends):
    """A run from random parameters, whose loss falls by 0.65 in each of two evals, by 0.06 in each later one."""
    fall = lambda k: 0.59 * min(k, 2) + 0.06 * min(k, 10)  # noqa: E731
    planned = {"num_evals": 20, "num_sets": 2, "phase_ends": phase_ends}
    simulation = Simulation(np.random.default_rng(13), (500,), 0.0, 0.05, fall, item_error, jitter, **planned)
    for _ in range(10):
        assert np.mean(simulation.eval().states_B == REGRESSED) == 0
    found = np.zeros(500, bool)
    for rise in (0.2, 0.5):
        simulation.rise = np.full(500, rise)
        found |= np.any(simulation.eval().states_B == REGRESSED, axis=-1)
    print(f"item error {item_error}, jitter {jitter}: found in {np.mean(found):.3f}")
    assert np.mean(found) >= at_least


@pytest.mark.parametrize("first", [25, 26, 27])
def test_a_steep_start_does_not_hide_a_rise_while_its_evals_are_being_forgotten(first):
    """24 evals are remembered: the one before the first update leaves before the others of the fall do."""
    fall = lambda k: 2.8 * (1 - math.exp(-k / 2))  # noqa: E731
    simulation = Simulation(np.random.default_rng(15), (300,), 0.0, 0.01, fall, 0.0067, 0.01, phase_ends=(40,))
    for _ in range(first - 1):
        seen = simulation.eval()
        assert np.mean(seen.states_B == REGRESSED) == 0
    assert np.median(seen.detectable) < 0.12
    simulation.rise = np.full(300, 0.2)
    assert np.mean(np.any(simulation.eval().states_B == REGRESSED, axis=-1)) >= 0.97


@pytest.mark.parametrize(("rho", "jitter", "at_most"), [(0.0, 0.02, 0.01), (0.5, 0.02, 0.01), (0.0, 0.03, 0.02)])
def test_a_steep_start_of_a_run_of_twenty_evals_makes_no_false_alarms(rho, jitter, at_most):
    rng = np.random.default_rng([14, int(100 * jitter), int(10 * rho)])
    fall = lambda k: 2.5 * (1 - 0.5**k)  # noqa: E731
    planned = {"num_evals": 20, "phase_ends": (10,)}
    assert alarmed_share(rng, 1000, rho, 0.0, fall, 0.01, jitter, **planned) <= at_most


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("tolerance", [0.0, 0.01])
@pytest.mark.parametrize("last", [*PHASE_ENDS, 20, 28])
@pytest.mark.parametrize("fall", [lambda k: 0.0, lambda k: 2 * (1 - 0.9**k)], ids=["level", "falling"])
def test_a_rise_of_what_is_said_to_be_detectable_is_found(rho, tolerance, last, fall):
    """After eval `last`, the end of a phase or amid one."""
    num_runs = 500
    simulation = Simulation(np.random.default_rng(7), (num_runs,), rho, tolerance, fall)
    for _ in range(last):
        stated = simulation.eval().detectable
    fallen = fall(simulation.k)
    simulation.fall = lambda k: fallen  # no further
    assert 0.05 < np.median(stated) < (0.25 if fallen else 0.2)  # nats; nothing to find in a rise of no size or of any
    stands = simulation.watched.states_B == REGRESSED
    simulation.rise = stated
    found_RB = [(simulation.eval().states_B == REGRESSED) & ~stands for _ in range(2)]
    by_second = np.mean(np.any(found_RB[0] | found_RB[1], axis=-1))
    at_once_B = np.mean(found_RB[0], axis=0)
    print(f"rho {rho}, tolerance {tolerance}, eval {last}: {by_second:.3f} by the second, at once {at_once_B}")
    assert by_second >= (0.86 if fallen else 0.99)
    # Against the phase's own start, which is free of the winner's curse, the first eval alone has about the stated power.
    if last in PHASE_ENDS:
        assert 0.75 <= at_once_B[PHASE_START] <= 0.93
