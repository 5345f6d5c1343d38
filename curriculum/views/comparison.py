"""What `compare` finds: runs beside each other on the eval sets that they share."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from curriculum.record.events import plain
from curriculum.views.same_text import set_title
from evalsets.summary import Recorded

NATS, BITS = "nats per token", "bits per byte"


@dataclass(frozen=True)
class Difference:
    """One run minus the one it is compared with, on one set: positive is worse.

    interval: 95 %, over the choice of held-out text. sem and interval are None if there is a single cluster.
    share: the least part of the bytes of either run's set that the difference is over; 1 for the same windows.
    """

    against: str
    delta: float
    sem: float | None
    interval: tuple[float, float] | None
    clusters: str
    num_clusters: int
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RunOnSet(Recorded):
    """The eval of one run on one set that enters the comparison; `set` is this run's own name for the set.

    `difference` and `verdict` are None for the run that the others are compared with.
    """

    run: str
    set: str
    step: int
    tokens: int
    difference: Difference | None
    verdict: str | None


@dataclass(frozen=True)
class Recipe:
    """Runs that began alike and whose configs differ in `seed` alone: {run: its seed}, by a name for all of them.

    repeats: {run: the run whose seed it has}, runs that are left out, as no seed counts twice.
    """

    name: str
    seeds: dict[str, int]
    repeats: dict[str, str]


@dataclass(frozen=True)
class RecipeDifference:
    """The mean loss of a recipe's runs minus that of another's, on one set: positive is worse.

    interval: 95 %, over the seeds and the choice of held-out text, whose standard errors are sem_seeds, with df_seeds
    degrees of freedom, and sem_text. All are None if a recipe has a single run or the set a single cluster.
    """

    against: str
    delta: float
    interval: tuple[float, float] | None
    sem_seeds: float | None
    df_seeds: float | None
    sem_text: float | None


@dataclass(frozen=True)
class RecipeOnSet:
    """The runs of one recipe on one set that count: their mean loss, and its standard deviation over them.

    sd is None for a single run; `difference` and `verdict` are None for the recipe that the others are compared with.
    """

    recipe: str
    runs: tuple[str, ...]
    loss: float
    sd: float | None
    difference: RecipeDifference | None
    verdict: str | None


@dataclass(frozen=True)
class ComparedSet:
    """The runs that measured one text, in the order given. The others are compared with the first.

    name, content_hash: the first run's name for the set, and its content hash.
    unit: of the differences: NATS if all have the windows of the first, BITS if none of the others has.
    recipes: those of `ComparedRuns`, each over its runs here; none in BITS.
    """

    name: str
    content_hash: str
    runs: tuple[RunOnSet, ...]
    unit: str = NATS
    recipes: tuple[RecipeOnSet, ...] = ()

    @property
    def title(self) -> str:
        """The name, and what other runs call the set: `val (books in adapted)`."""
        return set_title({m.run: m.set for m in self.runs})


@dataclass(frozen=True)
class ComparedRuns:
    """The result of `compare`.

    at, common: the unit, `tokens` or `step`, and how many of them: as `asked` for, or where the shortest run was last
    measured, among those that share a set with another and are no base. A run enters with its last eval at or before
    that many. With `gold` each run enters with its last eval at or before its own gold, or its last one if it has none;
    `common` is None and `begun` empty.
    alone: runs that share no set with another; they enter with their last eval.
    unmeasured: runs without any eval yet, which are left out.
    damaged: {path: why} for runs of a folder that cannot be read, which are left out.
    recipes: the runs by what they share but their seeds, in the order given; none if no recipe has two of the runs.
    begun: {run, base, step} for each run that began with the parameters of another, directly or through other runs. A
    base enters with its last eval at or before that step, or the latest such step if several runs began from it.
    runs: name, path, step and tokens of the last eval that counts, the gold's step, and whether the run is finished.
    sets: one for each text that two or more runs measured, under one name or several; and one for each name under which
      runs measured other windows than the first that has it, but documents of it.
    refused: names under which runs measured different text, or text without a content hash, each with messages.
    only: names whose text not every run measured, with the runs that did, under whatever name.
    shared: {runs, step} for each pair with a common past: the step up to which they share it.
    config: the differences between the configs, from `config_differences`.
    """

    at: str
    common: int | None
    asked: bool
    runs: tuple[dict[str, Any], ...]
    sets: tuple[ComparedSet, ...]
    refused: dict[str, tuple[str, ...]]
    only: dict[str, tuple[str, ...]]
    shared: tuple[dict[str, Any], ...]
    begun: tuple[dict[str, Any], ...]
    alone: tuple[str, ...]
    unmeasured: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    config: tuple[dict[str, Any], ...]
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def base_steps(self) -> dict[str, int]:
        """By name, the step at which each base enters the comparison."""
        return steps_of_bases(self.begun)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; floats that are not finite become the strings that the record uses for them."""
        return plain(asdict(self))


def steps_of_bases(begun: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """By name, the latest step at which one of these runs began from that base; `begun` as in `ComparedRuns`."""
    steps: dict[str, int] = {}
    for pair in begun:
        steps[pair["base"]] = max(pair["step"], steps.get(pair["base"], 0))
    return steps
