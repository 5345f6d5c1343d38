"""The gold: the run's best parameters at an eval, of those that no guard objects to.

Every eval is one call of `decide`. All it knows of earlier evals is a `GoldState`, saved in every checkpoint, so a
resumed run decides like an uninterrupted one. A candidate is an eval whose value is below the gold's. Guards look only
at candidates, and a blocked candidate leaves the gold as it is: the next eval is compared with the same gold.

A dip right after several rises in a row is likely noise, so it is pending until the next eval, which confirms it by
being below the gold too. Nothing is lost by waiting: `kept_steps` says whose checkpoints must stay.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from evalsets.config import GoldConfig
from evalsets.evalset import PRIMARY
from evalsets.summary import Summary


class Regressed(NamedTuple):
    """An eval set with a standing alarm, raised at step `since`. Losses in nats per token."""

    before: float
    now: float
    delta: float
    since: int


@dataclass(frozen=True)
class Measured:
    """One eval. Sets go by their names in the config.

    summaries: of the sets that were measured.
    train_loss: the recent training loss; None before the first update.
    regressed: every set with a standing alarm, whenever it was last measured.
    is_last: no eval follows in this run.
    is_candidate: False at step 0 of a run from scratch, whose value is only remembered: a gold must be below it.
    limits_from_start: `subject_to` limits count from a set's first loss; otherwise from its lowest so far.
    """

    step: int
    summaries: Mapping[str, Summary]
    train_loss: float | None
    regressed: Mapping[str, Regressed] = field(default_factory=dict)
    is_last: bool = False
    is_candidate: bool = True
    limits_from_start: bool = False


@dataclass(frozen=True)
class Best:
    """The gold; `score` is the gate's, None if it gave none. `losses`: of the sets that were measured at its eval."""

    step: int
    value: float
    score: float | None = None
    losses: dict[str, float | None] = field(default_factory=dict)  # empty if an older version wrote the state


@dataclass(frozen=True)
class Pending:
    """A dip after `rises` rises in a row that the next eval has to confirm; `losses` as in `Best`."""

    step: int
    value: float
    rises: int
    losses: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class SetMemory:
    """An eval set's first and lowest finite loss, and its `last` loss, of `step`; None for one that is not finite."""

    start: float | None
    lowest: float | None
    last: float | None
    step: int


@dataclass(frozen=True)
class GoldState:
    """What `decide` knows of earlier evals. Finite numbers, None and text only, so `to_json` and back is exact.

    metric: what is minimised; if it changes, the search for the gold starts over, but the sets' losses stay.
    start: its value before the first update of a run from scratch; None for other runs or if it is not finite.
    rises: evals in a row, up to the last, that were above the one before or not finite.
    last: value of the last eval; None if there is none or it is not finite.
    """

    metric: str | None = None
    start: float | None = None
    gold: Best | None = None
    pending: Pending | None = None
    rises: int = 0
    last: float | None = None
    sets: dict[str, SetMemory] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def minimising(self, metric: str) -> "GoldState":
        """The state in a search for the lowest `metric`: it starts over if that is another than before."""
        return self if metric == self.metric else GoldState(metric=metric, sets=self.sets)

    def without(self, steps: Collection[int]) -> "GoldState":
        """The state once the checkpoints of `steps` are lost: without a gold or pending dip among them."""
        gold, pending = (None if point and point.step in steps else point for point in (self.gold, self.pending))
        return replace(self, gold=gold, pending=pending)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "GoldState":
        return GoldState(
            **{
                **saved,
                "gold": saved["gold"] and Best(**saved["gold"]),
                "pending": saved["pending"] and Pending(**saved["pending"]),
                "sets": {name: SetMemory(**memory) for name, memory in saved["sets"].items()},
            }
        )


class _Event:
    """A decision for the record: the event's name, its step (the candidate's), and its fields."""

    event: ClassVar[str]

    def fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step"}


@dataclass(frozen=True)
class Gold(_Event):
    """The candidate of `step` becomes the gold."""

    event: ClassVar[str] = "gold_checkpoint"

    step: int
    metric: str
    value: float
    previous: float | None
    previous_step: int | None
    score: float | None


@dataclass(frozen=True)
class Blocked(_Event):
    """A guard objected to the candidate of `step`; if several did, `guard` is the first, and `reason` tells all."""

    event: ClassVar[str] = "gold_blocked"

    step: int
    metric: str
    value: float
    best: float | None
    best_step: int | None
    guard: Literal["start", "overfit", "regression", "limit", "trend", "gate"]
    reason: str


@dataclass(frozen=True)
class Candidate:
    """An eval that no guard objects to. Ask the gate next, then call `accepted` or `vetoed` with its answer.

    One eval may bring two candidates: the pending dip that it confirms, and itself. The gate is asked about the lower
    one first. `instead` is the decision about the other one in case the gate vetoes the first: `Blocked`, or a
    `Candidate` to ask about next. `losses` as in `Best`.
    """

    step: int
    metric: str
    value: float
    losses: dict[str, float | None]
    instead: "Candidate | Blocked | None" = None


Decision = Gold | Blocked | Candidate


def decide(config: GoldConfig, state: GoldState, measured: Measured) -> tuple[GoldState, list[Decision]]:
    """The state after an eval, and the decisions in the order of the record.

    If the eval did not measure the set to minimise, the losses of the others are remembered and nothing is decided. A
    candidate that passes all guards is returned as `Candidate` if there is a `config.gate`, else as `Gold`. A dip that
    has to be confirmed makes no decision until the next eval; at the last eval it is blocked, as none follows.
    """
    state = replace(state.minimising(config.minimise), sets=_remembered(state.sets, measured))
    evalset, metric = config.target
    if evalset not in measured.summaries:
        return state, []

    value = _finite(getattr(measured.summaries[evalset], metric))
    rises, pending, gold = state.rises, state.pending, state.gold
    rose = value is None or (state.last is not None and value > state.last)
    state = replace(state, rises=rises + 1 if rose else 0, last=value, pending=None)
    if not measured.is_candidate:
        return replace(state, start=value), []

    decisions: list[Decision] = []
    dip = None  # the pending one, if this eval confirms it
    if pending is not None:
        dip = Candidate(pending.step, config.minimise, pending.value, pending.losses)
        if not _below(value, gold):
            decisions.append(_blocked(state, dip, "trend", _unconfirmed(pending, measured.step, value, gold)))
            dip = None

    own = None
    if _below(value, gold):
        losses = {name: state.sets[name].last for name in measured.summaries}
        own = Candidate(measured.step, config.minimise, value, losses)
        is_dip = bool(config.consecutive_rises) and rises >= config.consecutive_rises and not rose
        if objections := _objections(config, state, measured, value):
            own = _blocked(state, own, objections[0][0], "; ".join(reason for _, reason in objections))
        elif is_dip and measured.is_last:
            reason = f"trend: a dip to {value:.4f} after {rises} rises in a row cannot be confirmed at the last eval"
            own = _blocked(state, own, "trend", reason)
        elif is_dip:
            state, own = replace(state, pending=Pending(measured.step, value, rises, losses)), None

    if dip is not None and own is not None and not _below(value, dip):
        first = replace(dip, instead=own)  # which is decided only if the gate vetoes the dip
    elif isinstance(own, Candidate):
        first = replace(own, instead=dip)
    else:
        first = dip
        if own is not None:
            decisions.append(own)
    if first is None:
        return state, decisions
    if config.gate is not None:
        return state, [*decisions, first]
    state, crowned = accepted(state, first)
    return state, [*decisions, *crowned]


def accepted(
    state: GoldState, candidate: Candidate, score: float | None = None
) -> tuple[GoldState, list[Gold | Blocked | Candidate]]:
    """After the gate accepted a candidate. A finite `score` (lower is better) must also be below the gold's."""
    gold = state.gold
    if score is not None and gold is not None and gold.score is not None and not score < gold.score:
        return vetoed(state, candidate, f"score {score:g} is not below the gold's {gold.score:g} (step {gold.step})")
    best = Best(candidate.step, candidate.value, score, candidate.losses)
    previous, previous_step = (None, None) if gold is None else (gold.value, gold.step)
    event = Gold(candidate.step, candidate.metric, candidate.value, previous, previous_step, score)
    return replace(state, gold=best), [event]


def vetoed(state: GoldState, candidate: Candidate, reason: str) -> tuple[GoldState, list[Blocked | Candidate]]:
    """After the gate vetoed a candidate: it is blocked, and `instead` comes next, which may be another to ask about."""
    blocked = _blocked(state, candidate, "gate", f"gate: {reason}")
    return state, [blocked] if candidate.instead is None else [blocked, candidate.instead]


def kept_steps(state: GoldState) -> set[int]:
    """The steps whose checkpoints `gold/` has to hold between evals: the gold and the pending dip.

    Another step may be dropped once no checkpoint that can be resumed has a state that names it.
    """
    return {point.step for point in (state.gold, state.pending) if point is not None}


def _remembered(sets: Mapping[str, SetMemory], measured: Measured) -> dict[str, SetMemory]:
    remembered = dict(sets)
    for name, summary in measured.summaries.items():
        loss = _finite(summary.loss)
        before = sets.get(name, SetMemory(None, None, None, measured.step))
        start = loss if before.start is None else before.start
        lowest = min((x for x in (before.lowest, loss) if x is not None), default=None)
        remembered[name] = SetMemory(start, lowest, loss, measured.step)
    return remembered


def _objections(config: GoldConfig, state: GoldState, measured: Measured, value: float) -> list[tuple[str, str]]:
    """(guard, reason) of every guard that objects to this eval, the trend guard aside: see `decide`."""
    found = []
    if state.start is not None and value >= state.start:
        found.append(("start", f"start: {value:.4f} is not below {state.start:.4f}, the value before training"))
    primary, train_loss = measured.summaries.get(PRIMARY), measured.train_loss
    if config.overfit_ratio is not None and primary is not None and _finite(train_loss) is not None:
        ratio = primary.loss / train_loss if train_loss > 0 else math.inf
        if not ratio <= config.overfit_ratio:
            now, most = _apart(ratio, config.overfit_ratio, 1)
            found.append(("overfit", f"overfit: val loss is {now}x the training loss, overfit_ratio is {most}x"))

    minimised, at_gold = config.target[0], {} if state.gold is None else state.gold.losses
    alarms = {} if config.subject_to else measured.regressed  # limits, if any, say all of what may rise and how far
    offenders = [
        f"{_shown(name)} {r.before:.4f}→{r.now:.4f} ({r.delta:+.4f}, alarm since step {r.since})"
        for name, r in alarms.items()
        if name != minimised
        # A set that is no worse than at the gold loses nothing by this candidate, though it has been better between.
        and not (at_gold.get(name) is not None and r.now <= at_gold[name])
    ]
    if offenders:
        found.append(("regression", f"eval regression: {', '.join(offenders)}"))

    for name, limit in config.subject_to.items():
        if name not in state.sets:
            continue
        memory = state.sets[name]
        reference = memory.start if measured.limits_from_start else memory.lowest
        at = "" if memory.step == measured.step else f" at step {memory.step}"
        if memory.last is None or reference is None:
            found.append(("limit", f"limit: the loss of {_shown(name)}{at} is not finite"))
        elif memory.last > reference + limit.max_increase:
            increase, most = _apart(memory.last - reference, limit.max_increase, 4)
            moved = f"{_shown(name)} {reference:.4f}→{memory.last:.4f}{at} (+{increase})"
            found.append(("limit", f"limit: {moved}, max_increase={most}"))
    return found


def _unconfirmed(pending: Pending, step: int, value: float | None, gold: Best | None) -> str:
    dip = f"trend: a dip to {pending.value:.4f} after {pending.rises} rises in a row was not confirmed"
    if value is None:
        return f"{dip}: at step {step} the value is not finite"
    return f"{dip}: {value:.4f} at step {step} is not below the gold's {gold.value:.4f} (step {gold.step})"


def _blocked(state: GoldState, candidate: Candidate, guard: str, reason: str) -> Blocked:
    best, best_step = (None, None) if state.gold is None else (state.gold.value, state.gold.step)
    return Blocked(candidate.step, candidate.metric, candidate.value, best, best_step, guard, reason)


def _below(value: float | None, bar: Best | Candidate | None) -> bool:
    return value is not None and (bar is None or value < bar.value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _apart(value: float, threshold: float, digits: int) -> tuple[str, str]:
    """Both numbers with `digits` decimals, or more if it takes more to show that they differ and are not 0."""
    while digits < 12 and (
        f"{value:.{digits}f}" == f"{threshold:.{digits}f}"
        or any(number and not float(f"{number:.{digits}f}") for number in (value, threshold))
    ):
        digits += 1
    return f"{value:.{digits}f}", f"{threshold:.{digits}f}"


def _shown(name: str) -> str:
    return "val" if name == PRIMARY else name
