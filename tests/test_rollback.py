"""Data that are passed over: drawn from sources whose tokens name themselves, and counted."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from phases.batches import DataPlan, epoch_tokens
from phases.declared import Curriculum
from phases.lr import LrProgram, LrSchedule
from phases.replay import raise_share
from phases.resolve import resolve
from phases.rollback import RollbackRefused, judged_from, pass_over
from phases.schedule import Phase, Schedule, SourceSupply, cut, joined, segments_from_json, segments_to_json

LENGTH, BATCH, TOTAL = 8, 6, 120
TOKENS = {
    name: number * 100_000 + np.arange(blocks * LENGTH + 1)
    for number, (name, blocks) in enumerate({"web": 900, "code": 400, "law": 700, "new": 50}.items(), 1)
}
SUPPLIES = {name: SourceSupply(epoch_tokens(len(tokens), LENGTH)) for name, tokens in TOKENS.items()}
PHASES = (
    Phase("a", 30, {"web": 0.7, "code": 0.3}),
    Phase("b", 80, {"law": 0.9, "web": 0.1}, ramp_steps=20, lr=LrProgram(rewarm_steps=5, peak=8e-4, decay_steps=10)),
    Phase("c", "end", {"code": 0.5, "law": 0.5}, ramp_steps=9, ramp_shape="cosine"),
)
LR = LrSchedule(lr=6e-4, warmup_steps=5, decay_steps=20)


CURRICULUM = Curriculum(PHASES, SUPPLIES, LR, total_steps=TOTAL, batch_size=BATCH, seq_len=LENGTH)


def resolved(phases=PHASES, supplies=SUPPLIES, past=()):
    return resolve(replace(CURRICULUM, phases=phases, supplies=supplies), past=past)


def rows(schedule, num_steps=None):
    """Every row as (source, epoch, first token), by update; `num_steps` may reach beyond the end."""
    plan = DataPlan(schedule, 5, {name: s.num_tokens for name, s in SUPPLIES.items()}, LENGTH)
    out = []
    for draws in plan.draws(0, num_steps or schedule.total_steps):
        columns = (draws.source.tolist(), draws.epoch.tolist(), draws.offset.tolist())
        out.append([(plan.sources[source], epoch, offset) for source, epoch, offset in zip(*columns, strict=True)])
    return out


def order_of(schedule, step, until):
    """The rows of the order that update `step` belongs to, from there on to `until`, as if nothing came after it."""
    segments = [s for s in schedule.segments if s.start <= step]
    last = next(i for i, s in enumerate(segments) if s.end > step)
    return rows(Schedule(tuple(segments[: last + 1])), until)[step:]


@pytest.mark.parametrize("step", [0, 13, 29, 30, 31, 40, 49, 50, 65, 75, 79, 80, 85, 100, 119])
@pytest.mark.parametrize("num_steps", [1, 7, 60])
def test_exactly_these_positions_are_left_out(step, num_steps):
    schedule = resolved()
    after = pass_over(schedule, SUPPLIES, step, num_steps)
    updates = np.arange(TOTAL)
    assert after.phase_bounds == schedule.phase_bounds and after.total_steps == TOTAL
    assert after.rates(updates).tolist() == schedule.rates(updates).tolist()
    old, new = rows(schedule), rows(after)
    assert new[:step] == old[:step]
    end = next(end for _, _, end in schedule.phase_bounds if step < end)
    order = order_of(schedule, step, end + num_steps)
    assert new[step:end] == order[num_steps:]
    left_out = {row for batch in order[:num_steps] for row in batch}
    assert len(left_out) == num_steps * BATCH and not left_out & {row for batch in new for row in batch}
    # What is read and what is left out are together, of each source, its order from the first on, without a gap.
    for name, tokens in TOKENS.items():
        blocks = (len(tokens) - 1) // LENGTH
        of_source = [row for batch in new for row in batch if row[0] == name]
        assert len(set(of_source)) == len(of_source)
        passed = sum(row[0] == name for row in left_out)
        if TOTAL > end:
            assert after.cursors_at(TOTAL)[name] == (len(of_source) + passed) * LENGTH
        by_epoch = Counter(epoch for _, epoch, _ in {*of_source, *(row for row in left_out if row[0] == name)})
        full = (len(of_source) + passed) // blocks
        assert all(by_epoch[epoch] == blocks for epoch in range(full))


def test_a_ramp_is_as_far_as_its_data_are():
    after = pass_over(resolved(), SUPPLIES, 35, 10)
    for step in range(35, 70):
        assert after.segment_at(step).mixture_at(step) == resolved().segment_at(step + 10).mixture_at(step + 10)
    assert cut(after.segments, 35) == cut(resolved().segments, 35)


def test_the_segments_say_it():
    after = pass_over(resolved(), SUPPLIES, 60, 20)
    assert [(s.start, s.end, s.first_sequence) for s in after.segments] == [
        (0, 30, 0),
        (30, 60, 0),
        (60, 80, (30 + 20) * BATCH),
        (80, 120, 0),
    ]
    assert after.segments[3].cursors == after.segments[2].cursors_at(80) != resolved().segments[2].cursors
    assert segments_from_json(segments_to_json(after.segments)) == after.segments


def test_several_in_a_row_leave_out_each_its_own():
    rng = random.Random(1)
    for _ in range(25):
        schedule, left_out = resolved(), set()
        for _ in range(rng.randint(2, 4)):
            step, num_steps = rng.randrange(TOTAL), rng.choice([1, 5, 20, 45])
            after = pass_over(schedule, SUPPLIES, step, num_steps)
            end = next(end for _, _, end in schedule.phase_bounds if step < end)
            old, new = rows(schedule), rows(after)
            # Within the phase every update reads what was to come `num_steps` later, whatever was passed over there.
            kept = max(step, end - num_steps)
            assert new[:step] == old[:step] and new[step:kept] == old[step + num_steps : end]
            read = [row for batch in new for row in batch]
            assert len(set(read)) == len(read)
            left_out = {row for row in left_out if row not in {r for b in old for r in b}}
            before = {row for batch in old[step : min(end, step + num_steps)] for row in batch}
            assert len(before) >= BATCH and not before & set(read)
            assert after.phase_bounds == schedule.phase_bounds
            schedule = after
        for name in TOKENS:
            starts = [s.cursors[name] for s in schedule.segments]
            assert starts == sorted(starts)


def test_passed_over_twice_from_one_step_is_once_with_both():
    twice = pass_over(pass_over(resolved(), SUPPLIES, 60, 5), SUPPLIES, 60, 7)
    assert rows(twice) == rows(pass_over(resolved(), SUPPLIES, 60, 12))


def test_a_replay_goes_with_it_and_the_past_alone_gives_it_back():
    edit = {"step": 55, "source": "new", "factor": 20.0, "max_share": 0.5}
    schedule = raise_share(resolved(), CURRICULUM, **edit).schedule
    after = pass_over(schedule, SUPPLIES, 60, 4)
    assert rows(after)[60:76] == rows(schedule)[64:80] and rows(after)[76:80] != rows(schedule)[76:80]
    past = cut(after.segments, 80)
    assert resolved(past=past).segments == after.segments
    at_75 = raise_share(after, CURRICULUM, **{**edit, "step": 75, "source": "web"}).schedule
    assert rows(at_75)[:75] == rows(after)[:75]
    read = [row for batch in rows(at_75) for row in batch]
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("on_exhaust", ["error", "stop", "renormalise", "repeat"])
def test_a_source_is_never_read_beyond_its_cap(on_exhaust):
    """law: 0.9 of most steps of b, and half of c."""
    drawn = resolved().cursors_at(TOTAL)["law"]
    supply = SUPPLIES["law"].num_tokens
    enough = SourceSupply(supply, (drawn + 10 * BATCH * LENGTH) / supply, on_exhaust)
    supplies = {**SUPPLIES, "law": enough}
    pass_over(resolved(supplies=supplies), supplies, 60, 10)
    if on_exhaust == "repeat":
        pass_over(resolved(supplies=supplies), supplies, 60, 30)
        return
    with pytest.raises(
        RollbackRefused, match=r"^more than 0\.\d+ epochs of law would be read by step 120; a higher max_epochs of it"
    ):
        pass_over(resolved(supplies=supplies), supplies, 60, 30)


def test_a_cap_that_was_exceeded_before_is_no_reason_to_refuse():
    schedule = resolved((Phase("a", 20, {"law": 1}), Phase("b", "end", {"web": 1})))  # a reads 960 tokens
    lowered = {**SUPPLIES, "law": replace(SUPPLIES["law"], max_epochs=0.1)}  # 560
    read = pass_over(schedule, lowered, 40, 5).cursors_at(TOTAL)
    assert (read["law"], read["web"]) == (960, (100 + 5) * BATCH * LENGTH)


def test_a_setting_that_changes_within_what_moves_keeps_its_step():
    (whole,) = resolved((Phase("a", "end", {"web": 1}),)).segments
    schedule = Schedule((replace(whole, end=50), replace(whole.continued(50), rope_theta=2e4)))
    moved = pass_over(schedule, SUPPLIES, 20, 60)
    assert [(s.start, s.end, s.rope_theta) for s in moved.segments] == [(0, 20, None), (20, 50, None), (50, 120, 2e4)]
    assert moved.tokens(TOTAL) == TOTAL * BATCH * LENGTH


def test_what_cannot_be_is_refused():
    for step in (-1, TOTAL):
        with pytest.raises(RollbackRefused, match=f"^the run has no update {step}$"):
            pass_over(resolved(), SUPPLIES, step, 5)
    with pytest.raises(RollbackRefused, match="^got 0 steps, expected 1 or more$"):
        pass_over(resolved(), SUPPLIES, 5, 0)


def places(schedule):
    """Where `judged_from` moves."""
    found = judged_from(schedule)
    assert found.dtype == np.int32 and len(found) == schedule.total_steps
    assert all(found[step] <= step for step in range(len(found)))
    changes = [step for step in range(len(found)) if step == 0 or found[step] != found[step - 1]]
    assert [int(found[step]) for step in changes] == changes
    return changes


def test_a_loss_is_judged_from_the_newest_segment_or_ramp_end():
    assert places(resolved()) == [0, 30, 50, 80, 89]
    # A cut that only goes on is no place; nor is data that are passed over, but a ramp that ends by it is.
    pieces = (*cut(resolved().segments, 60), resolved().segment_at(60).continued(60), resolved().segments[2])
    assert joined(pieces) == joined(resolved().segments) and places(Schedule(pieces)) == [0, 30, 50, 80, 89]
    assert places(pass_over(resolved(), SUPPLIES, 60, 20)) == [0, 30, 50, 80, 89]
    assert places(pass_over(resolved(), SUPPLIES, 40, 5)) == [0, 30, 45, 80, 89]
    assert places(pass_over(resolved(), SUPPLIES, 40, 20)) == [0, 30, 40, 80, 89]
    edit = {"step": 60, "source": "web", "factor": 2.0, "max_share": 0.5}
    raised = raise_share(resolved(), CURRICULUM, **edit).schedule
    assert places(raised) == [0, 30, 50, 60, 80, 89]
