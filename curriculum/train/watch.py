"""What the run remembers of its eval sets, and how the newest eval compares: which sets got worse, which recovered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curriculum.config import Config
from curriculum.plan_warnings import evalset_warnings
from curriculum.record.events import number, plain, record_name
from curriculum.record.wording import MOST_NAMED, largest, smallest_rise
from curriculum.scheduling import num_due, shape_of
from evalsets.jitter import MIN_NU
from evalsets.metrics import WindowResults, summarise
from evalsets.regressions import (
    BASELINES,
    BEST,
    OK,
    PHASE_START,
    REGRESSED,
    START,
    WARNED,
    Change,
    Comparison,
    Watched,
    begin,
    begin_phase,
    error_level,
    observe,
    transfer,
)
from evalsets.summary import Summary

if TYPE_CHECKING:
    from curriculum.train.setup import Setup

Pair = dict[str, Any]  # an eval set and a baseline that it is compared with, as an event names them
_NATS = "baseline_nats_BN"  # a field of Watched that is saved as an array, the rest as JSON
_RAISED = 1.1  # a learning rate this many times as high may be why a set got worse
_REPEATED = 0.1  # and so may this many epochs of a source that were read again
_NO_ERROR_LEFT = "(no error is left)"  # cannot be the name of a set
_ABOVE_UNTRAINED = "(above the untrained model) "  # and a set's name


class RegressionStop(Exception):
    """Ends the run as `regression.action: stop` asks for, after its checkpoint was saved.

    `sets`: those that got worse, as named in the config.
    """

    in_every_process = True

    def __init__(self, step: int, sets: Iterable[str]):
        self.step, self.sets = step, tuple(sets)
        super().__init__(step, self.sets)  # what a copy in another process is made from

    def __str__(self) -> str:
        return f"stopped at step {self.step}, which was saved: {', '.join(map(record_name, self.sets))} got worse"


class Evaluated(NamedTuple):
    """What an eval found, by set as named in the config.

    comparisons: how each set that was measured before compares with its baselines.
    recovered: the alarms that ended at this eval.
    worse: the sets that raised an alarm at this eval.
    newly: those of `worse` whose standing alarms are all from phases before this one.
    standing: every current alarm of the sets that the run measures, by set.
    warned: the sets without an alarm that rose by more than chance alone often does.
    notes: remarks about the sets, in words.
    joined: those of `standing` that are new, but of a rise whose alarm stood already.
    """

    summaries: Mapping[str, Summary]
    comparisons: Mapping[str, Comparison]
    recovered: Sequence[Pair]
    worse: Sequence[str]
    newly: Sequence[str]
    standing: Mapping[str, Sequence[Pair]]
    warned: Sequence[str]
    notes: Sequence[str]
    joined: Sequence[Pair] = ()


@dataclass(frozen=True)
class Watch:
    """The memory of every eval set.

    spent: the part already used of the probability that any comparison of the run raises a false alarm.
    standing: the pairs of a set and a baseline that are regressed, as last measured, by set.
    told: what is said only once: the sets whose smallest detectable rise was reported, those above the untrained
        model, and that no more verdicts are possible.

    A set that the config no longer has stays in memory. If it comes back, it is compared with its old baselines; in a
    later phase its first eval there counts as the phase's start.
    """

    sets: dict[str, Watched] = field(default_factory=dict)
    spent: float = 0.0
    standing: dict[str, list[Pair]] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    @staticmethod
    def of(saved: Mapping[str, Any], baselines: Mapping[str, np.ndarray]) -> Watch:
        """Restore from `to_json` and `baselines`."""
        sets = {
            name: Watched(**_arrays(memory), **{_NATS: baselines[name].astype(np.float64)})
            for name, memory in saved["sets"].items()
        }
        return Watch(sets, saved["spent"], saved["standing"], tuple(saved["told"]))

    def to_json(self) -> dict[str, Any]:
        sets = {
            name: {key: array.tolist() for key, array in watched._asdict().items() if key != _NATS}
            for name, watched in self.sets.items()
        }
        return plain({"sets": sets, "spent": self.spent, "standing": self.standing, "told": self.told})

    def baselines(self) -> dict[str, np.ndarray]:
        """Nats of every window at each baseline, [B, N] by set; float32 loses nothing, as the device sums in it."""
        return {name: watched.baseline_nats_BN.astype(np.float32) for name, watched in self.sets.items()}

    def measured_at(self, step: int) -> set[str]:
        return {name for name, watched in self.sets.items() if watched.history_steps_H[-1] == step}

    def with_eval(self, setup: Setup, step: int, results: Mapping[str, WindowResults]) -> tuple[Watch, Evaluated]:
        """The watch after an eval of some sets, and what the eval found."""
        measured, comparisons = self._compared(setup, step, results)
        standing, recovered, worse = self._verdicts(setup, step, comparisons)
        notes, told = measured._notes(setup, step, comparisons)
        if step:  # those of the first eval are in `training_start`
            notes += evalset_warnings(setup.corpus.evalsets[name] for name in results if name not in self.sets)
        bounds = setup.course.schedule.phase_bounds
        _, begun, _ = bounds[_phase_at(bounds, step)]
        newly = [name for name in worse if all(pair["first_step"] <= begun for pair in self.standing.get(name, ()))]
        stood = {(name, pair["baseline"]) for name, pairs in self.standing.items() for pair in pairs}
        now = [(name, pair) for name, pairs in standing.items() for pair in pairs]
        joined = [p for name, p in now if (name, p["baseline"]) not in stood and p["first_step"] != step]
        warned = [name for name, c in comparisons.items() if name not in standing and np.any(c.states_B == WARNED)]
        evaluated = Evaluated(
            summaries={name: summarise(result) for name, result in results.items()},
            comparisons=comparisons,
            recovered=recovered,
            worse=worse,
            newly=newly,
            standing={name: pairs for name, pairs in standing.items() if name in setup.corpus.evalsets},
            warned=warned,
            notes=notes,
            joined=joined,
        )
        return replace(measured, standing=standing, told=told), evaluated

    def _compared(
        self, setup: Setup, step: int, results: Mapping[str, WindowResults]
    ) -> tuple[Watch, dict[str, Comparison]]:
        """(the watch with an eval's measurements, the comparison of each set that was measured before)."""
        sets, comparisons = dict(self.sets), {}
        planned, left = (num_comparisons(setup, after, step) for after in (0, step - 1))
        level = error_level(setup.config.evalsets.regression.confidence, self.spent, planned, left) if left else 0.0
        bounds = setup.course.schedule.phase_bounds
        phase = _phase_at(bounds, step)
        read = setup.course.schedule.read(0, step)
        for name, result in results.items():
            if name not in sets:
                sets[name] = begin(step, phase if step else -1, result.nats_N, result.tokens_N)
                continue
            if sets[name].baseline_steps_B[PHASE_START] < bounds[phase][1]:  # it was absent at the switch
                sets[name] = begin_phase(sets[name], step, result.nats_N)
            sets[name], comparisons[name] = observe(
                sets[name],
                step,
                phase,
                result.nats_N,
                result.tokens_N,
                result.document_N,
                tolerance=tolerance(setup.config, name),
                level=level,
                untaught=setup.from_scratch and read.get(setup.config.eval_sources[name].held_out_of) == 0,
            )
        spent = self.spent + sum(float(comparison.spent) for comparison in comparisons.values())
        return replace(self, sets=sets, spent=spent), comparisons

    def _verdicts(
        self, setup: Setup, step: int, comparisons: Mapping[str, Comparison]
    ) -> tuple[dict[str, list[Pair]], list[Pair], list[str]]:
        """(alarms that stand, alarms that recovered, sets that raised an alarm); `self` is from before the eval."""
        standing, recovered, worse = dict(self.standing), [], []
        for name, comparison in comparisons.items():
            before_B, now_B = comparison.states_before_B == REGRESSED, comparison.states_B == REGRESSED
            first_steps = {pair["baseline"]: pair["first_step"] for pair in self.standing.get(name, [])}
            recovered += [
                {**_pair(setup, step, name, comparison, b), "first_step": first_steps[BASELINES[b]]}
                for b in np.flatnonzero(before_B & ~now_B)
            ]
            standing[name] = [_pair(setup, step, name, comparison, b) for b in np.flatnonzero(now_B)]
            if any(comparison.first_steps_B == step):
                worse.append(name)
        return {name: pairs for name, pairs in standing.items() if pairs}, recovered, worse

    def _notes(
        self, setup: Setup, step: int, comparisons: Mapping[str, Comparison]
    ) -> tuple[list[str], tuple[str, ...]]:
        """(notes, what was said once); `self` is from after the eval.

        Said once: the smallest rise that each set can show, as soon as its scatter is known well; which sets are too
        small for their tolerance; which sets rose above the untrained model's loss before their source was read;
        and that the run's false-alarm probability is used up. Said when it begins: which sets may be worse.
        """
        notes, told = [], list(self.told)
        tested = {name: c for name, c in comparisons.items() if c.no_verdict is None}
        unlearned = {name: c for name, c in tested.items() if c.unlearned and np.any(c.t_B > c.critical)}
        if new := [name for name in unlearned if _ABOVE_UNTRAINED + name not in told]:
            rises = {record_name(name): float(unlearned[name].delta_B[START]) for name in new}
            above = ", ".join(largest(rises, lambda name: f"{name} {rises[name]:+.4f}", MOST_NAMED))
            notes.append(f"above the untrained model: {above}; no alarm, as their source has not been read yet")
            told += [_ABOVE_UNTRAINED + name for name in new]
        if not tested and _NO_ERROR_LEFT not in told:
            for reason in {c.no_verdict for c in comparisons.values() if c.num_clusters > 1}:
                notes.append(f"no more verdicts: {reason}")
                told.append(_NO_ERROR_LEFT)
        new = {
            name: c
            for name, c in tested.items()
            if name not in told
            and c.nu >= MIN_NU
            and (step in setup.course.phase_ends or self.sets[name].history_phases_H[0] >= 0)
        }
        if new:
            rises = {record_name(name): float(c.detectable) for name, c in new.items()}
            shown = ", ".join(largest(rises, lambda name: f"{name} {smallest_rise(rises[name])}", MOST_NAMED))
            scattered = any(c.jitter > c.sem_item_B[BEST] for c in new.values())
            later = "; it shrinks as the losses become smoother" if scattered else ""
            notes.append(f"smallest rise that an eval finds with 80 % power, in nats: {shown}{later}")
        for name, c in new.items():
            if c.too_small:
                notes.append(
                    f"eval set {record_name(name)} is too small for its tolerance of {tolerance(setup.config, name):g} "
                    f"nats: the choice of its {c.num_clusters} {c.clusters} alone hides rises of twice that; give it "
                    "more text, or a higher tolerance"
                )
        return [*notes, *_newly_warned(tested)], (*told, *new)

    def with_phase(self, step: int, results: Mapping[str, WindowResults]) -> Watch:
        """The watch after a phase switch: its eval is the new baseline, and alarms against the old one end."""
        begun = {name: begin_phase(self.sets[name], step, result.nats_N) for name, result in results.items()}
        standing = {
            name: [pair for pair in pairs if pair["baseline"] != "phase_start"] for name, pairs in self.standing.items()
        }
        standing = {name: pairs for name, pairs in standing.items() if pairs}
        return replace(self, sets={**self.sets, **begun}, standing=standing)


def _phase_at(bounds: Sequence[tuple[str, int, int]], step: int) -> int:
    """The index of the phase that the update before an eval belongs to."""
    return next((i for i, (_, _, end) in enumerate(bounds) if step <= end), len(bounds) - 1)


def _newly_warned(comparisons: Mapping[str, Comparison]) -> list[str]:
    """A note on the sets without an alarm that newly rose by more than chance alone often does."""
    risen, by_t = {}, {}
    for name, c in comparisons.items():
        new_B = (c.states_B == WARNED) & (c.states_before_B == OK)
        if new_B.any() and not np.any(c.states_B == REGRESSED):
            b = int(np.argmax(np.where(new_B, c.t_B, -np.inf)))
            rise = f"{record_name(name)} {c.delta_B[b]:+.4f} against {BASELINES[b]}"
            needed = c.delta_B[b] + (c.critical - c.t_B[b]) * c.sem_B[b]
            risen[name] = f"{rise} (an alarm needs more than {needed:+.4f})"
            by_t[name] = float(c.t_B[b])
    told = ", ".join(largest(by_t, risen.__getitem__, MOST_NAMED))
    return [f"maybe worse: {told}"] if risen else []


def _arrays(memory: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a `Watched` from their JSON, in which a float that is not finite is a string."""

    def array(values: list) -> np.ndarray:
        kinds = {type(value) for value in values}
        return np.array(values) if kinds == {int} else np.array([number(value) for value in values])

    return {key: array(values) for key, values in memory.items()}


def num_comparisons(setup: Setup, after: int, now: int) -> int:
    """Comparisons in evals after step `after`, as planned at `now`: one per set, eval and baseline; none at step 0."""
    ends, every = setup.course.phase_ends_at(now), setup.config.evalsets.every
    sources = setup.config.eval_sources.values()
    return len(BASELINES) * sum(num_due(ends, source.every or every, max(after, 0)) for source in sources)


def tolerance(config: Config, name: str) -> float:
    """Nats per token that a set may rise by before it counts as worse."""
    own = config.eval_sources[name].tolerance
    return config.evalsets.regression.tolerance if own is None else own


def transfer_matrix(
    bounds: Sequence[tuple[str, int, int]],
    watch: Watch,
    nats: Mapping[int, Mapping[str, np.ndarray]],
    last: Mapping[str, WindowResults],
    *,
    from_scratch: bool,
) -> dict[str, Any]:
    """How every set's loss changed from phase end to phase end.

    `nats` has the nats_N of the sets that were measured at each end, `last` the results of the last eval. `bounds` are
    the schedule's phases, (name, start, end). `from_scratch` is as in `transfer`. `best_phase`, the phase since whose
    end the set has forgotten, is "the start" if the set was best before the first phase; no phase has a space in its
    name. An interval is None if the set has no standard error, or if a loss is not finite.
    """
    sets, names = {}, ["the start", *(name for name, _, _ in bounds)]
    for name, result in last.items():
        measured = [nats.get(end, {}).get(name) for _, _, end in bounds]
        found = transfer(watch.sets[name], measured, result.tokens_N, result.document_N, from_scratch=from_scratch)
        sets[record_name(name)] = {
            "start": found.start,
            "start_step": int(watch.sets[name].baseline_steps_B[START]),  # later than 0 if the set was added then
            "loss": found.losses,
            "forgetting": {
                "value": found.forgetting.value,
                "interval": _interval(found.forgetting),
                "best_phase": None if found.best is None else names[found.best],
            },
            "gain": {"value": found.gain.value, "interval": _interval(found.gain)},
        }
    return {"phases": [name for name, _, _ in bounds], "steps": [end for _, _, end in bounds], "sets": sets}


def _interval(change: Change) -> list[float] | None:
    return [change.low, change.high] if math.isfinite(change.high - change.low) else None


def _pair(setup: Setup, step: int, name: str, comparison: Comparison, b: int) -> Pair:
    baseline_step = int(comparison.baseline_steps_B[b])
    return {
        "set": record_name(name),
        "step": step,  # of the measurement: later evals repeat a standing alarm, and may not measure its set
        "baseline": BASELINES[b],
        "baseline_step": baseline_step,
        "loss": float(comparison.loss),
        "baseline_loss": float(comparison.baseline_losses_B[b]),
        "delta": float(comparison.delta_B[b]),
        "sem": float(comparison.sem_B[b]),
        "interval": [float(comparison.low_B[b]), float(comparison.high_B[b])],
        "t": float(comparison.t_B[b]),
        "df": round(float(comparison.df), 1),
        "tolerance": tolerance(setup.config, name),
        "first_step": int(comparison.first_steps_B[b]),
        **_changed_between(setup, baseline_step, step),
    }


def _changed_between(setup: Setup, before: int, now: int) -> dict[str, Any]:
    """What changed in training from one eval to another, so that it may be why a set got worse."""
    config, course = setup.config, setup.course
    mixture_then, mixture_now = course.mixture_at(before), course.mixture_at(now)
    if before == 0 and setup.lineage is not None:  # what the parameters of step 0 were trained on
        mixture_then = setup.lineage.get("mixture") or mixture_then  # a folder may have none
    shares = {
        source: [mixture_then.get(source, 0.0), mixture_now.get(source, 0.0)]
        for source in dict.fromkeys([*config.sources, *mixture_then, *mixture_now])  # some may be gone from the config
    }
    shape_then, shape_now = (shape_of(course.segment_at(step), config) for step in (before, now))
    first_piece = course.schedule.segments[0].lr[0]
    warm = first_piece.steps if first_piece.warmup else 0  # a rise up to there is the run's beginning, and no reason
    rate = course.rate_at(max(before, min(warm, now)))
    highest = float(np.max(course.rates[before:now], initial=0))
    sizes = setup.corpus.tokens_per_epoch
    read_then, read_now = (course.schedule.cursors_at(step) for step in (before, now))
    epochs = {
        source: [round(read.get(source, 0) / sizes[source], 3) for read in (read_then, read_now)]
        for source in read_now
        if sizes.get(source)
    }
    return {
        "mixture_change": {source: [was, is_now] for source, (was, is_now) in shares.items() if was != is_now},
        "shape_change": {
            key: [shape_then[key], shape_now[key]]
            for key in shape_now
            if shape_then[key] != shape_now[key] and key != "grad_accum"  # which changes memory and time alone
        },
        "rate_rise": [rate, highest] if highest > _RAISED * rate else None,  # a fall is no reason
        "repeated": {
            source: [was, is_now] for source, (was, is_now) in epochs.items() if is_now - max(was, 1.0) >= _REPEATED
        },
    }
