"""Learning rates against values worked by hand."""

import math

import numpy as np
import pytest

from phases.lr import LrProgram, LrSchedule, PhaseSpan, check_rates, first_jump, learning_rate, lr_pieces


def rates(schedule, phases, warmup=0, decay=0, program_steps=None):
    program_steps = program_steps or [(0, 0)] * len(phases)
    spans = [PhaseSpan(*phase, *steps) for phase, steps in zip(phases, program_steps, strict=True)]
    pieces = lr_pieces(schedule, spans, warmup, decay)
    return learning_rate(pieces, np.arange(phases[-1][1])), pieces


def test_warmup_hold_and_linear_decay():
    got, _ = rates(LrSchedule(lr=1.0, min_lr_ratio=0.2), [(0, 10, None)], warmup=4, decay=4)
    assert np.allclose(got, [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert got[-1] == 0.2


def test_cosine_reaches_the_floor_at_the_last_update():
    got, _ = rates(LrSchedule(lr=2.0, schedule="cosine", min_lr_ratio=0.1), [(0, 9, None)], warmup=1)
    by_hand = [2.0] + [0.2 + 0.9 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)]
    assert np.allclose(got, by_hand)
    assert got[-1] == 0.2


def test_linear_and_constant():
    linear, _ = rates(LrSchedule(lr=1.0, schedule="linear", min_lr_ratio=0.0), [(0, 4, None)])
    assert np.allclose(linear, [0.75, 0.5, 0.25, 0.0])
    constant, _ = rates(LrSchedule(lr=1.0, schedule="constant"), [(0, 4, None)], warmup=2)
    assert np.allclose(constant, [0.5, 1, 1, 1])


@pytest.mark.parametrize("total", [10, 17])
def test_inverse_sqrt_whatever_the_length(total):
    got, _ = rates(LrSchedule(lr=2.0, schedule="inverse_sqrt"), [(0, total, None)], warmup=4)
    assert np.allclose(got, [0.5, 1, 1.5, 2, *(2 * math.sqrt(4 / n) for n in range(5, total + 1))])
    phases = [(0, 6, None), (6, 8, LrProgram(peak=1.0)), (8, total, None)]
    after, _ = rates(LrSchedule(lr=2.0, schedule="inverse_sqrt"), phases, warmup=4)
    assert np.allclose(after[6:], [1, 1, *(math.sqrt(8 / n) for n in range(9, total + 1))])
    longer, _ = rates(LrSchedule(lr=2.0, schedule="inverse_sqrt"), [(0, 101, None)], warmup=4)
    assert got.tolist() == longer[:total].tolist()  # to the bit: a run that is extended goes on as it was
    phases, decayed = [(0, 6, None), (6, 8, LrProgram(decay_to_ratio=0.0)), (8, total, None)], [(0, 0), (0, 2), (0, 0)]
    after, _ = rates(LrSchedule(lr=2.0, schedule="inverse_sqrt"), phases, 4, program_steps=decayed)
    assert after[6] > 0 and after[7:].tolist() == [0.0] * (total - 7)


def test_one_minus_sqrt():
    schedule = LrSchedule(lr=1.0, decay_shape="1-sqrt", min_lr_ratio=0.0)
    got, _ = rates(schedule, [(0, 4, None)], decay=4)
    assert np.allclose(got, [1 - math.sqrt(k / 4) for k in (1, 2, 3, 4)])


def test_a_program_rewarms_from_the_rate_it_finds_holds_and_decays_to_its_last_update():
    phases = [(0, 4, None), (4, 12, LrProgram(peak=2.0, decay_to_ratio=0.25)), (12, 14, None)]
    got, _ = rates(LrSchedule(lr=1.0, schedule="constant"), phases, program_steps=[(0, 0), (2, 3), (0, 0)])
    assert np.allclose(got, [1, 1, 1, 1, 1.5, 2, 2, 2, 2, 1.5, 1, 0.5, 0.5, 0.5])


def test_after_a_program_the_rate_stays_until_the_global_decay_begins():
    phases = [(0, 4, None), (4, 6, LrProgram(peak=0.5)), (6, 12, None)]
    got, _ = rates(LrSchedule(lr=1.0, min_lr_ratio=0.1), phases, decay=4, program_steps=[(0, 0)] * 3)
    assert np.allclose(got, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_peak_is_the_rate_found_unless_given():
    phases = [(0, 2, None), (2, 6, LrProgram(decay_to_ratio=0.5))]
    got, _ = rates(LrSchedule(lr=0.8, schedule="constant"), phases, program_steps=[(0, 0), (0, 2)])
    assert np.allclose(got, [0.8, 0.8, 0.8, 0.8, 0.6, 0.4])


def test_peak_is_the_rate_found_where_that_is_not_the_global_one():
    phases = [(0, 2, None), (2, 4, LrProgram(peak=0.4)), (4, 8, LrProgram(decay_to_ratio=0.5))]
    got, _ = rates(LrSchedule(lr=0.8, schedule="constant"), phases, program_steps=[(0, 0), (0, 0), (0, 2)])
    assert np.allclose(got, [0.8, 0.8, 0.4, 0.4, 0.4, 0.4, 0.3, 0.2])


def test_a_program_in_the_first_phase_replaces_the_global_warmup():
    got, _ = rates(LrSchedule(lr=1.0), [(0, 4, LrProgram(peak=3.0))], warmup=2, program_steps=[(3, 0)])
    assert np.allclose(got, [1, 2, 3, 3])


def test_any_step_alone_equals_the_whole():
    phases = [(0, 40, None), (40, 70, LrProgram(peak=2e-4, shape="cosine")), (70, 100, None)]
    got, pieces = rates(LrSchedule(lr=3e-4, min_lr_ratio=0.0), phases, 7, 13, [(0, 0), (5, 9), (0, 0)])
    assert [float(learning_rate(pieces, step)) for step in range(100)] == got.tolist()


def test_a_jump_of_more_than_two_times_is_found_but_not_in_warmup():
    phases = [(0, 4, None), (4, 8, LrProgram(peak=2.5))]
    _, pieces = rates(LrSchedule(lr=1.0, schedule="constant"), phases, warmup=3, program_steps=[(0, 0), (0, 0)])
    assert first_jump(pieces) == (4, 1.0, 2.5)
    _, pieces = rates(LrSchedule(lr=1.0, schedule="constant"), phases, warmup=3, program_steps=[(0, 0), (2, 0)])
    assert first_jump(pieces) is None
    _, pieces = rates(LrSchedule(lr=1.0, schedule="constant"), [(0, 4, None), (4, 8, LrProgram(peak=2.0))])
    assert first_jump(pieces) is None
    _, pieces = rates(LrSchedule(lr=1.0, schedule="constant"), [(0, 4, None), (4, 8, LrProgram(peak=0.4))])
    assert first_jump(pieces) == (4, 1.0, 0.4)


def test_bad_numbers_are_named():
    assert [field for field, _ in check_rates(LrSchedule(lr=0.0, min_lr_ratio=2.0))] == ["lr", "min_lr_ratio"]
    assert [field for field, _ in check_rates(LrSchedule(lr=float("nan")))] == ["lr"]
    assert check_rates(LrSchedule()) == check_rates(LrSchedule(min_lr_ratio=0.0)) == []
    assert check_rates(LrSchedule(min_lr_ratio=1.0)) == []


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear", "inverse_sqrt", "constant"])
def test_every_schedule_is_positive_and_never_above_the_peak(schedule):
    got, _ = rates(LrSchedule(lr=1.0, schedule=schedule), [(0, 200, None)], 20, 50 if schedule == "wsd" else 0)
    assert len(got) == 200 and (got > 0).all() and (got <= 1.0 + 1e-12).all()
