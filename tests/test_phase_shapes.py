"""Phases of other lengths and batches: what is read in which order, clocks, caps, rates, edits and rollbacks."""

import math
from dataclasses import replace

import numpy as np
import pytest

from phases.batches import DataPlan
from phases.checks import ScheduleError
from phases.clocks import clock_step
from phases.declared import Curriculum
from phases.lr import LrProgram, LrSchedule
from phases.rates import rate_spans
from phases.replay import raise_share
from phases.resolve import resolve
from phases.rollback import judged_from, pass_over
from phases.schedule import NOT_DATA, Phase, SourceSupply, cut, segments_from_json, segments_to_json

CONSTANT = LrSchedule(lr=1e-3, schedule="constant")
# Blocks of 128; an epoch of law is over within every phase, one of web now and then.
EPOCHS = {"web": 40 * 128, "law": 3 * 128}
SUPPLIES = {name: SourceSupply(num_tokens) for name, num_tokens in EPOCHS.items()}
MIX = {"web": 0.7, "law": 0.3}
PHASES = (
    Phase("short", 13, MIX, seq_len=64, batch_size=5),
    Phase("long", 30, {"web": 0.4, "law": 0.6}, seq_len=128, batch_size=3),
    Phase("shortest", 47, MIX, seq_len=32, batch_size=7),
    Phase("last", "end", {"law": 1.0}, ramp_steps=9),
)
# Neither of 64 and 96 divides the other; law is not read in between, and its cursor stays where it is.
UNEVEN = (
    Phase("a", 11, MIX, seq_len=96, batch_size=5),
    Phase("b", 23, {"web": 1.0}, seq_len=64, batch_size=3),
    Phase("c", 39, MIX, seq_len=64, batch_size=4),
    Phase("d", "end", MIX),
)
UNEVEN_EPOCHS = {"web": 20 * 192, "law": 5 * 192}


def resolved(phases=PHASES, supplies=SUPPLIES, lr=CONSTANT, total=70, batch=4, length=128, past=(), **more):
    curriculum = Curriculum(phases, supplies, lr, total_steps=total, batch_size=batch, seq_len=length)
    return resolve(curriculum, past=past, **more)


def problems(*phases, **kwargs):
    with pytest.raises(ScheduleError) as error:
        resolved(phases, **kwargs)
    return error.value.problems


def blocks_in_order(name: str, num_tokens: int, block: int, num_blocks: int) -> list[int]:
    """Where each of the first blocks begins that a source is read in: by a run that reads nothing else, block by block."""
    phases, supplies = [Phase("all", "end", {name: 1.0})], {name: SourceSupply(num_tokens)}
    whole = resolved(phases, supplies, total=num_blocks, batch=1, length=block)
    return [int(d.offset[0]) for d in DataPlan(whole, 7, {name: num_tokens}, block).draws(0, num_blocks)]


@pytest.mark.parametrize("phases, epochs, block", [(PHASES, EPOCHS, 128), (UNEVEN, UNEVEN_EPOCHS, 192)])
def test_the_order_over_phases_of_other_lengths_row_by_row(phases, epochs, block):
    supplies = {name: SourceSupply(num_tokens) for name, num_tokens in epochs.items()}
    schedule = resolved(phases, supplies, length=block)
    plan = DataPlan(schedule, 7, epochs, block)
    order = {name: blocks_in_order(name, num, block, 200) for name, num in epochs.items()}
    read = {name: {} for name in epochs}  # by epoch, which tokens
    cursor, passed, before = dict.fromkeys(epochs, 0), {}, None
    for step in range(schedule.total_steps):
        phase = phases[sum(step >= end for _, _, end in schedule.phase_bounds)]
        length, batch = phase.seq_len or block, phase.batch_size or 4
        draws = plan.draws(step)[0]
        assert len(draws.source) == batch
        if phase is not before:
            before = phase
            for name in schedule.segment_at(step).quotas.sources:
                while cursor[name] % length:  # to the next place where a row of this length begins
                    passed[name] = passed.get(name, 0) + 1
                    cursor[name] += 1
        for source, epoch, offset in zip(draws.source, draws.epoch, draws.offset, strict=True):
            name = plan.sources[source]
            number, within = divmod(cursor[name], block)
            assert offset == order[name][number] + within and epoch == cursor[name] // epochs[name]
            assert offset // block == (offset + length - 1) // block  # a row is of one block
            seen = read[name].setdefault(int(epoch), set())
            tokens = set(range(int(offset), int(offset) + length))
            assert not tokens & seen
            seen |= tokens
            cursor[name] += length
        assert schedule.cursors_at(step + 1) == cursor
    assert passed and max(map(len, read.values())) > 1
    ends = [end for _, _, end in schedule.phase_bounds[:-1]]
    passed_at_ends = [schedule.passed_over(end) for end in ends]
    assert {n: sum(of.get(n, 0) for of in passed_at_ends) for n in passed} == passed
    given = schedule.read(0, schedule.total_steps)
    assert {n: given[n] + passed.get(n, 0) for n in given} == cursor
    assert schedule.read(3, 60) == {n: sum(schedule.read(s, s + 1)[n] for s in range(3, 60)) for n in given}


def test_any_step_alone_and_any_stretch_are_the_same_rows():
    plan = DataPlan(resolved(), 7, EPOCHS, 128)
    together = plan.draws(0, 70)
    assert len(together) == 70
    for step in (0, 12, 13, 29, 30, 46, 47, 55, 69):
        assert all(np.array_equal(a, b) for a, b in zip(plan.draws(step)[0], together[step], strict=True))


def test_each_source_is_within_two_sequences_of_its_share_at_every_prefix():
    schedule = resolved()
    for segment in schedule.segments:
        asked = dict.fromkeys(MIX, 0.0)
        for step in range(segment.start, segment.end):
            asked = {n: asked[n] + segment.batch_size * segment.mixture_at(step).get(n, 0.0) for n in asked}
            given = schedule.read(segment.start, step + 1)
            assert all(abs(given[n] / segment.seq_len - asked[n]) <= 2 for n in asked)
    assert [s.seq_len for s in schedule.segments] == [64, 128, 32, 128]


def test_a_later_phase_of_the_same_blocks_changes_nothing_before_it():
    other = (*PHASES[:2], Phase("shortest", "end", {"law": 1.0}, seq_len=16, batch_size=1))
    one, two = (DataPlan(resolved(phases), 7, EPOCHS, 128).draws(0, 30) for phases in (PHASES, other))
    assert one and all(np.array_equal(a, b) for d, e in zip(one, two, strict=True) for a, b in zip(d, e, strict=True))


@pytest.mark.parametrize(
    "until, step",
    [
        ("4160 tokens", 13),  # 13 steps of 5 x 64
        ("4161 tokens", 14),  # and one of 2 x 128
        ("4416 tokens", 14),
        ("4417 tokens", 15),
        ("5.44K tokens", 18),
    ],
)
def test_a_clock_in_tokens_counts_the_updates_of_each_phase(until, step):
    phases = (PHASES[0], Phase("b", until, MIX, seq_len=128, batch_size=2), Phase("c", "end", MIX, seq_len=32))
    if step == 13:
        assert problems(*phases) == (
            ("phases[1].until", "ends at step 13 but starts at step 13; ends must increase from phase to phase"),
        )
        return
    schedule = resolved(phases)
    assert schedule.phase_bounds[1] == ("b", 13, step)
    assert schedule.tokens(step) == 4160 + (step - 13) * 256 >= schedule.tokens(step - 1) + 256
    assert schedule.tokens(70) == schedule.tokens(step) + (70 - step) * 4 * 32
    for past in (5, 13, 14):  # as well where some of it stands
        assert resolved(phases, past=cut(schedule.segments, past)).phase_bounds == schedule.phase_bounds


@pytest.mark.parametrize(
    "until, step",
    [
        ("640 tokens", 2),  # of 5 x 64
        ("641 tokens", 3),
        ("4160 tokens", 13),
        ("4161 tokens", 14),  # and one of 3 x 128
        ("6848 tokens", 20),
        ("6849 tokens", None),  # the past does not come to it
        ("30%", 21),
        ("2 epochs of web", None),
        ("soon", None),
    ],
)
def test_what_a_clock_means_in_a_run_that_was_trained_so_far(until, step):
    assert clock_step(until, 70, cut(resolved().segments, 20)) == step


def test_a_run_has_no_more_sequences_than_its_largest_batch_may_draw():
    ((path, message),) = problems(Phase("a", "end", MIX, batch_size=2**20), total=2**22 + 1)
    assert path == "train.steps" and "expected at most 2**42 sequences and 2**62 tokens in a run" in message


def test_an_epoch_clock_and_a_cap_count_what_is_passed_over():
    # 3 rows of 64 are 192 tokens of law; at 128 it goes on from 256 of its 384, so that one row is all there is.
    phases = (Phase("a", 3, {"law": 1.0}, seq_len=64, batch_size=1), Phase("b", "end", {"law": 1.0}, batch_size=1))
    clock = (phases[0], replace(phases[1], until="1 epoch of law"), Phase("c", "end", {"web": 1.0}))
    schedule = resolved(clock, total=10)
    assert schedule.phase_bounds[1] == ("b", 3, 4) and schedule.passed_over(3) == {"law": 64}
    capped = {**SUPPLIES, "law": SourceSupply(384, max_epochs=1)}
    ((path, message),) = problems(*phases, supplies=capped, total=10)
    assert path == "sources.law.max_epochs" and message.startswith("step 4 (phase b) would read more than 1 epoch")
    # With half an epoch, 192 tokens, rounding up alone goes beyond the cap; what counts is the first row.
    half = {**SUPPLIES, "law": SourceSupply(384, max_epochs=0.5, on_exhaust="renormalise")}
    mixed = (phases[0], Phase("b", "end", {"web": 0.9, "law": 0.1}, batch_size=1))
    whole = resolved(mixed, half, total=40)
    first_row = next(s for s in range(3, 40) if resolved(mixed, total=40).read(3, s + 1)["law"])
    assert first_row > 3 and [s.start for s in whole.segments] == [0, 3, first_row]
    assert whole.read(3, 40)["law"] == 0


@pytest.mark.parametrize("end", range(1, 70))
def test_a_past_that_ends_anywhere_changes_no_row_and_no_rate(end):
    lr = LrSchedule(lr=1e-3, warmup_steps=8, decay_steps=20, scale_lr_by_batch="sqrt")
    whole = resolved(lr=lr)
    again = resolved(lr=lr, past=segments_from_json(segments_to_json(cut(whole.segments, end))))
    assert np.array_equal(again.rates(np.arange(70)), whole.rates(np.arange(70)))
    one, two = (DataPlan(s, 7, EPOCHS, 128).draws(0, 70) for s in (whole, again))
    assert all(np.array_equal(a, b) for d, e in zip(one, two, strict=True) for a, b in zip(d, e, strict=True))


def test_the_shape_of_the_phase_under_way_may_change_where_the_past_ends():
    past = cut(resolved().segments, 20)
    edited = (PHASES[0], replace(PHASES[1], seq_len=64, batch_size=9), *PHASES[2:])
    schedule = resolved(edited, past=past)
    assert [(s.phase, s.start, s.seq_len, s.batch_size) for s in schedule.segments[:4]] == [
        ("short", 0, 64, 5),
        ("long", 13, 128, 3),
        ("long", 20, 64, 9),
        ("shortest", 30, 32, 7),
    ]
    assert schedule.segments[2].cursors == past[-1].cursors_at(20)
    # Another rope theta is no other data: the order goes on.
    turned = resolved((PHASES[0], replace(PHASES[1], rope_theta=5e5), *PHASES[2:]), past=past)
    assert turned.segments[2] == replace(past[-1].continued(20), end=30, rope_theta=5e5, lr=turned.segments[2].lr)
    assert judged_from(turned)[[19, 20, 29, 30]].tolist() == [13, 20, 20, 30]


def test_of_what_goes_on_all_but_the_data_is_as_declared(monkeypatch):
    """The batch stands for a field that no data depend on."""
    going_on = replace(resolved().segments[0], batch_size=9, rope_theta=2.0, lr_scale=7.0)
    phases = (replace(PHASES[0], rope_theta=3.0), *PHASES[1:])
    own = replace(going_on, rope_theta=3.0, lr_scale=1.0)
    assert resolved(phases, going_on=going_on).segments[0] == own
    monkeypatch.setitem(NOT_DATA, "batch_size", 0)
    assert resolved(phases, going_on=going_on).segments[0] == replace(own, batch_size=5)


def test_parameters_have_the_theta_of_the_phase_that_made_them():
    thetas = (2.0, 3.0, None, 4.0)
    schedule = resolved([replace(phase, rope_theta=theta) for phase, theta in zip(PHASES, thetas, strict=True)])
    assert [schedule.rope_theta_at(step) for step in (0, 1, 13, 14, 30, 31, 70)] == [
        None,
        2.0,
        2.0,
        3.0,
        3.0,
        None,
        4.0,
    ]


def test_rates_grow_with_the_root_of_the_batch():
    lr = replace(CONSTANT, scale_lr_by_batch="sqrt")
    phases = (
        Phase("a", 10, MIX),
        Phase("b", 20, MIX, batch_size=16),
        Phase("c", 40, MIX, batch_size=64, lr=LrProgram(rewarm_steps=10)),
        Phase("d", "end", MIX, batch_size=64, lr=LrProgram(peak=2e-3)),
    )
    rates = resolved(phases, lr=lr).rates(np.arange(70))
    assert np.allclose(rates[:20], [1e-3] * 10 + [2e-3] * 10, rtol=1e-15)
    # A re-warming begins at the rate that is there, and comes to the scaled one.
    assert np.allclose(rates[20:30], 2e-3 + 2e-3 * np.arange(1, 11) / 10, rtol=1e-12)
    assert np.allclose(rates[30:], [4e-3] * 10 + [8e-3] * 30, rtol=1e-15)
    assert resolved(phases).segments[1].lr_scale == 1.0


def test_the_spans_of_the_rate_say_it_at_every_update():
    """Scaled by the batch, extended in the midst of a decay, cut within a span by data that are passed over."""
    lr = LrSchedule(lr=1e-3, warmup_steps=8, decay_steps=20, scale_lr_by_batch="sqrt", allow_jump=True)
    short = resolved(lr=lr)
    longer = resolved(lr=lr, total=100, past=cut(short.segments, 60))
    without = pass_over(longer, SUPPLIES, 20, 4)
    spans = rate_spans(longer)
    assert rate_spans(without) == spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])] and spans[-1].end == 100
    assert [(span.start, span.end, span.scale) for span in spans] == [
        (0, 8, math.sqrt(5 / 4)),  # the warm-up, then the peak
        (8, 13, math.sqrt(5 / 4)),
        (13, 30, math.sqrt(3 / 4)),
        (30, 47, math.sqrt(7 / 4)),
        (47, 50, 1.0),
        (50, 60, 1.0),  # of the first run's decay, from 50 to 70
        (60, 80, 1.0),  # the rate that the new schedule has there, up to its own decay
        (80, 100, 1.0),
    ]

    def by_span(step):
        _, _, piece, scale = next(span for span in spans if span.start <= step < span.end)
        part = min((step - piece.start + 1) / piece.steps, 1.0)
        return scale * (piece.first + (piece.last - piece.first) * part)

    assert np.allclose([by_span(step) for step in range(100)], longer.rates(np.arange(100)), rtol=1e-12)


def test_a_batch_that_makes_the_rate_jump_is_refused():
    lr = replace(CONSTANT, scale_lr_by_batch="sqrt")
    phases = (Phase("a", 10, MIX), Phase("b", "end", MIX, batch_size=17))
    ((path, message),) = problems(*phases, lr=lr)
    assert path == "phases[1].batch_size"
    assert message == (
        "the learning rate jumps from 0.001 to 0.00206 at step 10, more than 2x: scaled from a batch of 4 to 17 "
        "(optim.scale_lr_by_batch); change the batch in smaller steps, give the phase an lr with rewarm_steps, or set "
        "optim.allow_jump: true"
    )
    allowed = resolved(phases, lr=replace(lr, allow_jump=True))
    assert math.isclose(allowed.rates(10), 1e-3 * math.sqrt(17 / 4))
    assert resolved((phases[0], replace(phases[1], lr=LrProgram(rewarm_steps=2))), lr=lr)
    # What is trained stands, its jumps as well.
    assert resolved(phases, lr=lr, past=cut(allowed.segments, 11)).rates(11) == allowed.rates(11)
    # Inside a decay only what the batch changes counts: over the last of the 6 updates the rate falls to a third.
    falling = LrSchedule(lr=1e-3, decay_steps=6, min_lr_ratio=0.01, scale_lr_by_batch="sqrt")
    assert resolved((Phase("a", 69, MIX), Phase("b", "end", MIX, batch_size=5)), lr=falling)


def test_a_jump_in_a_phase_that_is_declared_no_more_is_told_at_the_setting_that_allows_it():
    """The rates of a past are as declared now from some step on, and one of its phases is gone."""
    scaled, low = replace(CONSTANT, scale_lr_by_batch="sqrt", allow_jump=True), replace(CONSTANT, lr=1e-4)
    for lr, now, batch_size, words in (
        (scaled, replace(scaled, allow_jump=False), 64, "scaled from a batch of 4 to 64"),
        (low, CONSTANT, 4, "outside a decay or a re-warming"),
    ):
        first, gone, last = Phase("a", 10, MIX), Phase("b", 20, MIX, batch_size=batch_size), Phase("c", "end", MIX)
        past = cut(resolved((first, gone, last), lr=lr).segments, 20)
        ((path, message),) = problems(first, last, lr=now, past=past, rates_from=10)
        assert path == "optim.allow_jump" and "at step 10, more than 2x" in message and words in message


@pytest.mark.parametrize(
    "phase, path, words",
    [
        (
            {"seq_len": 48},
            "phases[0].seq_len",
            "got 48, expected a divisor of the longest sequence, train.seq_len (128)",
        ),
        ({"seq_len": 192}, "train.seq_len", "got 128, expected a divisor of the longest sequence, phases[0].seq_len"),
        ({"seq_len": 1}, "phases[0].seq_len", "got 1, expected 2 to 16777216"),
        ({"batch_size": 0}, "phases[0].batch_size", "got 0, expected 1 to 1048576"),
        ({"grad_accum": 0}, "phases[0].grad_accum", "got 0, expected 1 to 1000000000"),
        ({"rope_theta": 0.0}, "phases[0].rope_theta", "got 0.0, expected a positive finite number"),
        ({"rope_theta": math.inf}, "phases[0].rope_theta", "got inf, expected a positive finite number"),
    ],
)
def test_a_shape_that_cannot_be(phase, path, words):
    found = problems(Phase("a", 10, MIX, **phase), Phase("b", "end", MIX))
    assert found[0][0] == path and words in found[0][1]


def test_a_train_length_that_no_phase_takes_need_not_fit():
    phases = [Phase("a", 10, MIX, seq_len=96), Phase("b", "end", MIX, seq_len=192)]
    assert [s.seq_len for s in resolved(phases, length=128).segments] == [96, 192]


def test_data_that_are_passed_over_leave_each_step_its_theta():
    phases = (PHASES[0], replace(PHASES[1], rope_theta=5e5), *PHASES[2:])
    turned = resolved(phases, past=cut(resolved().segments, 20))
    thetas = [None] * 20 + [5e5] * 10 + [None] * 40
    assert [turned.segment_at(step).rope_theta for step in range(70)] == thetas
    for step in (15, 19, 20, 24):
        passed = pass_over(turned, SUPPLIES, step, 3)
        assert [passed.segment_at(step).rope_theta for step in range(70)] == thetas


@pytest.mark.parametrize("step", [0, 5, 20, 30, 50, 60])
def test_passing_over_stays_within_the_order_of_one_shape(step):
    whole = resolved()
    schedule = pass_over(whole, SUPPLIES, step, 4)
    assert schedule.phase_bounds == whole.phase_bounds
    _, start, end = next(b for b in whole.phase_bounds if step < b[2])
    longer = replace(whole.segment_at(step), end=end + 4)
    plan = DataPlan(schedule, 7, EPOCHS, 128)
    alone = replace(whole, segments=(*cut(whole.segments, start), replace(longer, start=start)))
    expected = DataPlan(alone, 7, EPOCHS, 128)
    for s in range(start, end):
        ours, its = plan.draws(s)[0], expected.draws(s if s < step else s + 4)[0]
        assert all(np.array_equal(a, b) for a, b in zip(ours, its, strict=True))
    for before, after in zip(schedule.segments, schedule.segments[1:], strict=False):
        if before.phase != after.phase:  # what follows reads on, from where a row of its own begins
            drawn = before.cursors_at(before.end)
            assert all(0 <= after.cursors[n] - drawn[n] < after.seq_len for n in drawn)
            assert all(after.cursors[n] % after.seq_len == 0 for n in after.quotas.sources)


def test_a_raised_share_of_a_source_that_was_read_in_shorter_rows():
    phases = (Phase("a", 9, MIX, seq_len=32, batch_size=5), Phase("b", "end", {"web": 1.0}))
    schedule = resolved(phases)
    assert schedule.segments[1].cursors["law"] % 128
    curriculum = Curriculum(phases, SUPPLIES, CONSTANT, total_steps=70, batch_size=4, seq_len=128)
    edit = {"step": 30, "source": "law", "factor": 2.0, "max_share": 0.5}
    raised = raise_share(schedule, curriculum, **edit).schedule
    law = raised.segment_at(30).cursors["law"]
    assert law % 128 == 0 and 0 < law - schedule.segments[1].cursors["law"] < 128
    assert DataPlan(raised, 7, EPOCHS, 128).draws(30, 40)
