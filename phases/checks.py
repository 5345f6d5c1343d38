"""Checks of phases that need no resolved step. Problems are (path in the config, message) pairs."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from phases.clocks import MOST_SEQUENCES, MOST_TOKENS, any_steps, no_such_source, short
from phases.lr import EXPECTED_RATE, LEAST_RATE, MOST_RATE
from phases.schedule import Phase, SourceSupply

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")  # of anything that becomes part of a file or folder name
EXPECTED_NAME = "expected letters (a-z, A-Z), digits, '_' and '-', at most 100"
_SIZES = {"seq_len": (2, 2**24), "batch_size": (1, 2**20), "grad_accum": (1, 10**9)}  # least and most in a phase


class ScheduleError(ValueError):
    """The phases cannot be resolved. `problems` are (path in the config, message) pairs, all that were found."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}: {message}" for path, message in problems))


def check_phases(phases: Sequence[Phase], sources: Collection[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with the phases on their own, before any step is resolved: (path, message) pairs."""
    if not phases:
        yield "phases", "got none, expected at least one phase"
    seen: dict[str, int] = {}
    for i, phase in enumerate(phases):
        path = f"phases[{i}]"
        if not NAME.fullmatch(phase.name):
            yield f"{path}.name", f"got {phase.name!r}, {EXPECTED_NAME}"
        elif phase.name in seen:
            yield f"{path}.name", f"{phase.name!r} is already the name of phases[{seen[phase.name]}]"
        seen.setdefault(phase.name, i)
        yield from _check_mixture(phase.mixture, f"{path}.mixture", sources)
        if phase.until == "end" and i < len(phases) - 1:
            yield f"{path}.until", "'end' is for the last phase only"
        if i == 0 and any_steps(phase.ramp_steps):
            yield f"{path}.ramp_steps", "the first phase has no mixture before it to ramp from"
        yield from _check_numbers(phase, path)


def _check_mixture(mixture: Mapping[str, float], path: str, sources: Collection[str]) -> Iterator[tuple[str, str]]:
    for name, weight in mixture.items():
        if name not in sources:
            yield f"{path}.{name}", no_such_source(name, sources)
        if not 0 <= weight < math.inf:
            yield f"{path}.{name}", f"got {weight}, expected a proportion of 0 or more"
    if all(weight == 0 for weight in mixture.values()):
        yield path, "got no positive proportion, expected at least one"
    elif all(map(math.isfinite, mixture.values())) and math.isinf(sum(mixture.values())):
        yield path, "the proportions add up to more than a float holds; write them on a smaller scale"


def _check_numbers(phase: Phase, path: str) -> Iterator[tuple[str, str]]:
    program = phase.lr
    if program is not None:
        if program.peak is not None and not LEAST_RATE <= program.peak <= MOST_RATE:
            yield f"{path}.lr.peak", f"got {program.peak}, {EXPECTED_RATE}"
        if not 0 <= program.decay_to_ratio <= 1:
            yield f"{path}.lr.decay_to_ratio", f"got {program.decay_to_ratio}, expected 0 to 1"
    for key, (least, most) in _SIZES.items():
        size = getattr(phase, key)
        if size is not None and not least <= size <= most:
            yield f"{path}.{key}", f"got {short(size)}, expected {least} to {most}"
    if phase.rope_theta is not None and not 0 < phase.rope_theta < math.inf:
        yield f"{path}.rope_theta", f"got {phase.rope_theta}, expected a positive finite number"


def check_lengths(phases: Sequence[Phase], seq_len: int) -> list[tuple[str, str]]:
    """Problems of sequence lengths that do not divide the longest one; `seq_len` is train.seq_len."""
    lengths = {f"phases[{i}].seq_len": phase.seq_len for i, phase in enumerate(phases) if phase.seq_len is not None}
    longest_path, longest = max([("train.seq_len", seq_len), *lengths.items()], key=lambda item: item[1])
    if len(lengths) < len(phases):
        lengths = {"train.seq_len": seq_len, **lengths}
    why = "sources are read in blocks of that length"
    return [
        (path, f"got {length}, expected a divisor of the longest sequence, {longest_path} ({longest}): {why}")
        for path, length in lengths.items()
        if length > 0 and longest % length
    ]


def check_bounds(
    supplies: Mapping[str, SourceSupply], total_steps: int, batch_size: int, seq_len: int
) -> Iterator[tuple[str, str]]:
    """Problems of runs too large for the arithmetic and of bad `max_epochs`; the sizes are the run's largest."""
    sequences = total_steps * batch_size
    if sequences > MOST_SEQUENCES or sequences * seq_len > MOST_TOKENS:
        got = f"got {short(total_steps)}, with batch_size and seq_len {short(sequences * seq_len)} tokens"
        most = "at most 2**42 sequences and 2**62 tokens in a run"
        yield "train.steps", f"{got}, expected {most}; lower one of the three"
    for name, supply in supplies.items():
        yield from check_cap(name, supply.max_epochs)


def check_cap(name: str, max_epochs: float | None) -> list[tuple[str, str]]:
    """The problem of a source's `max_epochs`, if it has one; None is no cap."""
    if max_epochs is None or 0 < max_epochs < math.inf:
        return []
    expected = "expected a finite number above 0; leave it out for no cap"
    return [(f"sources.{name}.max_epochs", f"got {max_epochs}, {expected}")]
