"""The input that a schedule is resolved from, and its step counts as numbers, however the config gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from phases.clocks import EpochGoal, TokenGoal, read_clock, resolve_steps
from phases.lr import LrProgram, LrSchedule
from phases.schedule import Phase, SourceSupply


@dataclass(frozen=True)
class Curriculum:
    """All that a schedule is resolved from: phases in order, the supply of each source, and the run's numbers.

    `total_steps` is the number of updates. `batch_size` (sequences per update) and `seq_len` (tokens per sequence) are
    those of phases that have none of their own. `lr` is the run's global learning rate, meant for `batch_size` (see
    `lr.scale_lr_by_batch`).

    `settled` has step counts that are not resolved again, by name. `optim.warmup_steps`, `PHASE.ramp_steps` and
    `PHASE.lr.rewarm_steps` are settled if they are given as a share of the run and had begun before `total_steps`
    changed. `PHASE.until` is settled if it is in epochs and some of the phase's data were passed over, since the clock
    would count these too.
    """

    phases: Sequence[Phase]
    supplies: Mapping[str, SourceSupply]
    lr: LrSchedule
    _: KW_ONLY
    total_steps: int
    batch_size: int
    seq_len: int
    settled: Mapping[str, int] = field(default_factory=dict)


class Declared(NamedTuple):
    """A phase with its step counts as numbers. `path` is where the config declares it.

    `clock` is the step at which the phase ends, or the goal whose reaching ends it.
    """

    path: str
    phase: Phase
    is_last: bool
    clock: int | EpochGoal | TokenGoal
    ramp_steps: int
    rewarm_steps: int
    decay_steps: int
    batch_size: int
    seq_len: int

    @property
    def goal(self) -> EpochGoal | None:
        """The clock, if it is in epochs."""
        return self.clock if isinstance(self.clock, EpochGoal) else None


class Numbers(NamedTuple):
    """The step counts of the global learning rate, and the phases with theirs."""

    warmup_steps: int
    decay_steps: int
    phases: list[Declared]


def read_numbers(curriculum: Curriculum, sizes_to_come: bool) -> tuple[Numbers, list[tuple[str, str]]]:
    """(the numbers, problems), with 0 for each number that cannot be read; `sizes_to_come` is as in `resolve`."""
    lr, supplies, total_steps = curriculum.lr, curriculum.supplies, curriculum.total_steps
    problems: list[tuple[str, str]] = []

    def read(path, reader, *arguments):
        try:
            return reader(*arguments)
        except ValueError as error:
            problems.append((path, str(error)))
            return 0

    def steps_of(path, value, key=None):
        return curriculum.settled[key] if key in curriculum.settled else read(path, resolve_steps, value, total_steps)

    warmup_steps = steps_of("optim.warmup_steps", lr.warmup_steps, key="optim.warmup_steps")
    decay_steps = steps_of("optim.decay_steps", lr.decay_steps)
    if lr.schedule != "wsd":
        decay_steps = 0
    declared = []
    for i, phase in enumerate(curriculum.phases):
        path, key, program = f"phases[{i}]", phase.name, phase.lr or LrProgram()
        declared.append(
            Declared(
                path,
                phase,
                is_last=i == len(curriculum.phases) - 1,
                clock=curriculum.settled.get(f"{key}.until")
                or read(f"{path}.until", read_clock, phase.until, supplies, total_steps, sizes_to_come),
                ramp_steps=steps_of(f"{path}.ramp_steps", phase.ramp_steps, f"{key}.ramp_steps"),
                rewarm_steps=steps_of(f"{path}.lr.rewarm_steps", program.rewarm_steps, f"{key}.lr.rewarm_steps"),
                decay_steps=steps_of(f"{path}.lr.decay_steps", program.decay_steps),
                batch_size=curriculum.batch_size if phase.batch_size is None else phase.batch_size,
                seq_len=curriculum.seq_len if phase.seq_len is None else phase.seq_len,
            )
        )
    return Numbers(warmup_steps, decay_steps, declared), problems
