"""The learning rate at any step, as a list of pieces resolved before step 0."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

Shape = Literal["linear", "cosine", "1-sqrt"]
LEAST_RATE, MOST_RATE = 1e-30, 3.4e38  # far beyond any that trains; in float32 neither is 0 or infinite
EXPECTED_RATE = f"expected a positive learning rate from {LEAST_RATE:g} to {MOST_RATE:g}"


@dataclass(frozen=True)
class LrSchedule:
    """The run's global learning rate."""

    lr: float = 6e-4
    """Peak learning rate."""
    schedule: Literal["wsd", "cosine", "linear", "inverse_sqrt", "constant"] = "wsd"
    """After warm-up: wsd holds the peak and decays over the last `decay_steps`; cosine and linear decay all the way;
    inverse_sqrt gives update n, from 1, the rate lr * sqrt(warmup_steps / n), whatever the run's length.
    """
    warmup_steps: int | str = 0
    """Updates of linear warm-up, or a share of the run such as `2%`; update 0 already has lr / warmup_steps."""
    decay_steps: int | str = 0
    """Length of the final decay of `wsd`, in updates or as a share of the run such as `20%`."""
    decay_shape: Shape = "linear"
    """Shape of the decay of `wsd`."""
    min_lr_ratio: float = 0.1
    """Rate of the last update, as a fraction of the peak (not for `constant` and `inverse_sqrt`)."""
    allow_jump: bool = False
    """Allow changes by more than 2x between updates outside warm-up, decays and re-warming of 2 updates or more."""
    scale_lr_by_batch: Literal["sqrt"] | None = None
    """sqrt: rates, including a phase's own, are for train.batch_size, and are multiplied by
    sqrt(phase's batch_size / train.batch_size). null: rates are used as given, whatever the batch.
    """


@dataclass(frozen=True)
class LrProgram:
    """A phase's own learning rate, in place of the global one for that phase."""

    rewarm_steps: int | str = 0
    """Updates over which the rate at the phase's start changes to `peak`, or a share of the run such as `2%`."""
    peak: float | None = None
    """Rate after the re-warming; by default the rate at the phase's start."""
    decay_steps: int | str = 0
    """Updates at the phase's end over which the rate decays, or a share of the run such as `10%`."""
    decay_to_ratio: float = 0.1
    """Rate of the phase's last update, as a fraction of `peak`."""
    shape: Shape = "linear"
    """Shape of the decay."""


@dataclass(frozen=True)
class LrPiece:
    """From update `start` on, the rate moves from `first` to `last` within `steps` updates, and then stays.

    A piece holds until the next one starts. Its k-th update (from 1) has moved k / steps of the way; with inverse_sqrt
    update n (from 1) of the run has the rate first * sqrt(start / n), whatever `steps` is.
    """

    start: int
    steps: int
    shape: Shape | Literal["inverse_sqrt"]
    first: float
    last: float
    warmup: bool = False


def shaped(moved: np.ndarray, shape: str) -> np.ndarray:
    """How far a rate or mixture has moved once the fraction `moved` of its steps is done; 0 and 1 stay 0 and 1."""
    if shape == "cosine":
        return 0.5 - 0.5 * np.cos(np.pi * moved)
    return np.sqrt(moved) if shape == "1-sqrt" else moved  # the root: Hägele et al. 2024, arXiv:2405.18392


def learning_rate(pieces: Sequence[LrPiece], steps) -> np.ndarray:
    """Learning rate (float64) of each update in `steps`, an integer or an array of them."""
    steps = np.asarray(steps, np.int64)
    index = np.searchsorted([p.start for p in pieces], steps, side="right") - 1
    rates = np.empty(steps.shape, np.float64)
    for i, piece in enumerate(pieces):
        here = index == i
        done = np.minimum((steps[here] - piece.start + 1) / piece.steps, 1.0)
        if piece.shape == "inverse_sqrt":
            between = piece.first * np.sqrt(piece.start / (steps[here] + 1))
        else:
            between = piece.first + (piece.last - piece.first) * shaped(done, piece.shape)
        rates[here] = np.where(done == 1.0, piece.last, between)
    return rates


def lr_scale(schedule: LrSchedule, batch_size: int, meant_for: int) -> float:
    """The factor on every rate in updates of `batch_size` sequences, if the rates are `meant_for` another size."""
    return math.sqrt(batch_size / meant_for) if schedule.scale_lr_by_batch == "sqrt" else 1.0


class PhaseSpan(NamedTuple):
    """The updates [start, end) of a phase, its own learning rate, and how many of the updates re-warm and decay.

    `path` is where the config declares the phase. One known only from the past has neither a path nor a program.
    """

    start: int
    end: int
    program: LrProgram | None = None
    rewarm_steps: int = 0
    decay_steps: int = 0
    path: str | None = None


class Standing(NamedTuple):
    """What the pieces of a run have to fit: the rates of the past, and the segments' `lr_scale`.

    Updates before `past_end` keep their rates, `past_rate(update)`: the pieces hold from `past_end` on. `scales` are
    pairs of an update and the factor from there on. All rates here are without that factor.
    """

    past_end: int = 0
    past_rate: Callable[[int], float] | None = None  # needed if past_end is above 0
    scales: Sequence[tuple[int, float]] = ((0, 1.0),)

    def scale(self, step: int) -> float:
        return next((scale for start, scale in reversed(self.scales) if start <= step), 1.0)


NOTHING_STANDS = Standing()


def lr_pieces(
    schedule: LrSchedule,
    spans: Sequence[PhaseSpan],
    warmup_steps: int,
    decay_steps: int,
    standing: Standing = NOTHING_STANDS,
) -> tuple[LrPiece, ...]:
    """The pieces of a run of these phases; `warmup_steps` and `decay_steps` are those of `schedule`, in updates.

    A re-warming begins at the scaled rate of the update before the phase, even if the phase has another scale.
    Elsewhere a rate that is held is held before scaling, so a new scale changes it.
    """
    decay = _global_decay(schedule, warmup_steps, decay_steps, total_steps=spans[-1].end)
    pieces: list[LrPiece] = []
    is_global = spans[0].program is None
    if is_global:
        if warmup_steps:
            pieces.append(LrPiece(0, warmup_steps, "linear", 0.0, schedule.lr, warmup=True))
        if warmup_steps < spans[-1].end:
            pieces += _held_then_decayed(warmup_steps, schedule.lr, decay)
    for span in spans:
        start = span.start
        if span.program is None and is_global:
            continue  # the global pieces so far go on through it
        if start == 0:
            found = 0.0
        elif start <= standing.past_end:
            found = standing.past_rate(start - 1)
        else:
            found = float(learning_rate(pieces, start - 1))
        pieces = [piece for piece in pieces if piece.start < start]
        if span.program is None:
            pieces += _held_then_decayed(start, found, decay)
        else:
            peak = span.program.peak
            if peak is None:
                peak = found if start else schedule.lr
            rescaled = found * (standing.scale(start - 1) / standing.scale(start))
            pieces += _own_pieces(span, span.program, rescaled, peak)
        is_global = span.program is None
    return tuple(pieces)


class _Decay(NamedTuple):
    """A decay over the updates [start, end), to the rate `floor` if it begins above; inverse_sqrt has no floor."""

    start: int
    end: int
    shape: Shape | Literal["inverse_sqrt"]
    floor: float


def _global_decay(schedule: LrSchedule, warmup_steps: int, decay_steps: int, total_steps: int) -> _Decay | None:
    """The decay with which a run ends; None if it has none."""
    if schedule.schedule == "constant":
        return None
    if schedule.schedule == "wsd":
        start, shape = total_steps - decay_steps, schedule.decay_shape
    else:
        start, shape = warmup_steps, schedule.schedule
    return _Decay(start, total_steps, shape, schedule.lr * schedule.min_lr_ratio) if start < total_steps else None


def _held(start: int, rate: float) -> LrPiece:
    return LrPiece(start, 1, "linear", rate, rate)


def _held_then_decayed(start: int, rate: float, decay: _Decay | None) -> list[LrPiece]:
    """`rate` from `start` on until the decay begins, and decayed from there."""
    if decay is None:
        return [_held(start, rate)]
    begin = max(start, decay.start)
    last = rate * math.sqrt(begin / decay.end) if decay.shape == "inverse_sqrt" else min(decay.floor, rate)
    decayed = LrPiece(begin, decay.end - begin, decay.shape, rate, last)
    return [_held(start, rate), decayed] if start < begin else [decayed]


def _own_pieces(span: PhaseSpan, program: LrProgram, found: float, peak: float) -> list[LrPiece]:
    """The pieces of a phase's own program, which re-warms from the rate `found` to `peak`."""
    warm, decay_start = span.start + span.rewarm_steps, span.end - span.decay_steps
    pieces = []
    if span.rewarm_steps:
        pieces.append(LrPiece(span.start, span.rewarm_steps, "linear", found, peak, warmup=True))
    if warm < decay_start:
        pieces.append(_held(warm, peak))
    if span.decay_steps:
        last = peak * program.decay_to_ratio
        pieces.append(LrPiece(decay_start, span.decay_steps, program.shape, peak, last))
    return pieces


def first_jump(pieces: Sequence[LrPiece], standing: Standing = NOTHING_STANDS) -> tuple[int, float, float] | None:
    """(update, rate before, rate) of the first jump: a change by more than 2x from one update to the next.

    Changes inside a warm-up, a re-warming of at least 2 updates or a decay are not jumps, except those caused by
    `lr_scale`. A decay counts from its `first` rate: a change to that rate by more than 2x is a jump. If the past ends
    inside a piece that gives the past's last rate, that piece goes on, and there is no jump.
    """
    past_end, scales = standing.past_end, standing.scales
    begins = {max(piece.start, past_end): piece for piece in pieces}  # of several that the past cuts, the last
    changes = {start for (_, before), (start, scale) in pairwise(scales) if before != scale and start >= past_end}
    for step in sorted(begins.keys() | changes):
        if step == 0:
            continue
        at, here = (float(learning_rate(pieces, s)) for s in (step - 1, step))
        before = standing.past_rate(step - 1) if step == past_end else at
        piece = begins.get(step)
        if piece is not None and piece.start == step:
            now = piece.last if piece.warmup and piece.steps == 1 else piece.first
        else:  # a piece that was under way there goes on
            now = before if before == at else here
        before, now = before * standing.scale(step - 1), now * standing.scale(step)
        if max(before, now) > 2 * min(before, now) * (1 + 1e-12):
            return step, before, now
    return None


def check_rates(lr: LrSchedule) -> list[tuple[str, str]]:
    """What is wrong with the numbers of a schedule: (field, message) pairs."""
    problems = []
    if not LEAST_RATE <= lr.lr <= MOST_RATE:
        problems.append(("lr", f"got {lr.lr}, {EXPECTED_RATE}"))
    if not 0 <= lr.min_lr_ratio <= 1:
        problems.append(("min_lr_ratio", f"got {lr.min_lr_ratio}, expected 0 to 1"))
    return problems
