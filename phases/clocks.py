"""When a phase ends, as the config says it: a step, a share of the run, tokens, or epochs of a source."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from phases.schedule import Schedule, Segment, SourceSupply

_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_PERCENT = re.compile(_NUMBER + r"\s*%")
_TOKENS = re.compile(_NUMBER + r"(e\+?\d{1,2}|\s*[KMBT])?\s*tokens?", re.IGNORECASE)
_EPOCHS = re.compile(_NUMBER + r"\s*epochs? of (\S+)")
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Positions are int64 in units of 2**-20 sequences (phases/mixture.py), cursors int64 in tokens.
MOST_SEQUENCES, MOST_TOKENS = 2**42, 2**62


def resolve_steps(value: int | str, total_steps: int) -> int:
    """A number of steps, given as such or as a percentage of the run (rounded up). Raises ValueError for others."""
    if isinstance(value, int):
        if not 0 <= value <= MOST_SEQUENCES:
            raise ValueError(f"got {short(value)}, expected 0 to 2**42 steps")
        return value
    if (share := percentage(value)) is not None:
        return math.ceil(share * total_steps)
    raise ValueError(f"got {short(value)}, expected a number of steps or a percentage of train.steps such as '5%'")


def percentage(text: str) -> Fraction | None:
    """The share that a text such as `5%` or `0.5 %` gives; None for any other text."""
    match = _PERCENT.fullmatch(text.strip())
    return Fraction(match[1]) / 100 if match else None


def any_steps(value: int | str) -> bool:
    """Whether a number of steps or a percentage is above 0; False for a value that is neither."""
    try:
        return resolve_steps(value, 1) > 0
    except ValueError:
        return False


class EpochGoal(NamedTuple):
    """A clock in epochs: reached once the cursor of `source` is at `tokens`, None if its size is unknown."""

    source: str
    tokens: int | None
    text: str


class TokenGoal(NamedTuple):
    """A clock in tokens: reached once the updates since the run's start have `tokens` slots in total."""

    tokens: Fraction

    def step(self, segments: Sequence[Segment], tokens_per_step: int) -> int:
        """The step at which it is reached, if updates after `segments` have `tokens_per_step` slots each."""
        tokens, start = self.tokens, 0
        for segment in segments:
            of_update, num_steps = segment.batch_size * segment.seq_len, segment.end - segment.start
            if tokens <= num_steps * of_update:
                return start + math.ceil(tokens / of_update)
            tokens -= num_steps * of_update
            start = segment.end
        return start + math.ceil(tokens / tokens_per_step)


def read_clock(
    until: int | str, supplies: Mapping[str, SourceSupply], total_steps: int, sizes_to_come: bool
) -> int | EpochGoal | TokenGoal:
    """The exclusive end of a phase: a step, or the goal whose reaching ends it. Raises ValueError if there is none."""
    if isinstance(until, int):
        if abs(until) > MOST_TOKENS:
            raise ValueError(f"got {short(until)}, expected a step of the run")
        return until
    until = until.strip()
    if until == "end":
        return total_steps
    if (share := percentage(until)) is not None:
        return math.ceil(share * total_steps)
    if match := _TOKENS.fullmatch(until):
        multiple = (match[2] or "").strip().upper()
        return TokenGoal(Fraction(match[1]) * (_MULTIPLES.get(multiple) or Fraction(f"1{multiple}")))
    if match := _EPOCHS.fullmatch(until):
        epochs, name = match.groups()
        if name not in supplies:
            raise ValueError(f"got {short(until)}: {no_such_source(name, supplies)}")
        size = supplies[name].num_tokens
        if size is None and not sizes_to_come:
            raise ValueError(
                f"{until!r} needs the size of {name}, which is not prepared yet; run `curriculum prepare CONFIG` first"
            )
        return EpochGoal(name, None if size is None else math.ceil(Fraction(epochs) * size), until)
    tokens = re.sub(r"\s*tok\w*$", "", until, flags=re.IGNORECASE) + " tokens"
    match = _TOKENS.fullmatch(tokens)
    hint = f"; did you mean {tokens!r}?" if match and match[2] else ""
    raise ValueError(
        f"got {short(until)}, expected a step, a percentage ('40%'), tokens ('1.5B tokens'), "
        f"epochs ('2 epochs of {next(iter(supplies), 'law')}') or 'end'{hint}"
    )


def in_epochs(until: int | str) -> bool:
    """Whether `until` is a clock in epochs of a source."""
    return isinstance(until, str) and _EPOCHS.fullmatch(until.strip()) is not None


def clock_step(until: int | str, total_steps: int, past: Sequence[Segment]) -> int | None:
    """The step that `until` means in a run with this past.

    None for a clock in epochs, for one in tokens that is reached only after the past, and for text that is no clock.
    """
    try:
        clock = read_clock(until, {}, total_steps, True)
    except ValueError:
        return None
    if isinstance(clock, TokenGoal):
        num_tokens = sum((s.end - s.start) * s.batch_size * s.seq_len for s in past)
        return clock.step(past, 1) if clock.tokens <= num_tokens else None
    return clock if isinstance(clock, int) else None


def reached(clock: int | EpochGoal | TokenGoal, schedule: Schedule, step: int) -> bool:
    """Whether a clock is reached by `step` of a schedule; one in epochs of unknown size never is."""
    if isinstance(clock, EpochGoal):
        return clock.tokens is not None and schedule.cursors_at(step).get(clock.source, 0) >= clock.tokens
    if isinstance(clock, TokenGoal):
        return clock.tokens <= schedule.tokens(step)
    return clock <= step


def short(value: int | str) -> str:
    """A value for an error message, shortened if it is long."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    return repr(value if len(value) <= 60 else value[:60] + "...")


def no_such_source(name: str, sources: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sources, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no such source{hint} (sources: {', '.join(sorted(sources))})"
