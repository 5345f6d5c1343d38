"""Schedules of a few phases, resolved from their start or after a past, and the problems of those that are refused."""

import pytest

from phases.checks import ScheduleError
from phases.declared import Curriculum
from phases.lr import LrProgram, LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

CONSTANT = LrSchedule(lr=1e-3, schedule="constant")
SUPPLIES = {"web": SourceSupply(8000), "law": SourceSupply(800)}


def resolved(*phases, supplies=SUPPLIES, total=100, batch=4, length=10, lr=CONSTANT, **known):
    return resolve(Curriculum(phases, supplies, lr, total_steps=total, batch_size=batch, seq_len=length), **known)


def problems(*phases, **kwargs):
    with pytest.raises(ScheduleError) as error:
        resolved(*phases, **kwargs)
    return error.value.problems


THREE = (
    Phase("a", 30, {"web": 0.7, "law": 0.3}),
    Phase("b", 60, {"web": 0.3, "law": 0.7}, ramp_steps=20, lr=LrProgram(rewarm_steps=6, peak=1.5e-3, decay_steps=9)),
    Phase("c", "end", {"web": 0.9, "law": 0.1}, ramp_steps=11, ramp_shape="cosine"),
)
WSD = LrSchedule(lr=1e-3, warmup_steps=7, decay_steps=20)


def after(past, *phases, **kwargs):
    """The phases resolved after a past, with `resolved`'s numbers."""
    return resolved(*phases, past=past, **({"lr": WSD} | kwargs))


def after_problems(past, *phases, **kwargs):
    with pytest.raises(ScheduleError) as error:
        after(past, *phases, **kwargs)
    return error.value.problems
