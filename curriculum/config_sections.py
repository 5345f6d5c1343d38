"""The sections of a config that are the run's own; those of its parts stand beside what reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from curriculum.data.sources import SourceConfig
from curriculum.record.wandb_log import WandbConfig
from curriculum.sampling import GenerateSection
from curriculum.train.optimizer import OptimConfig
from curriculum.typed import Limits
from evalsets.config import GoldConfig, RegressionConfig
from phases.lr import LrSchedule

PositiveInt = Annotated[int, Limits(ge=1, le=10**9)]
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class EvalSource:
    """Where an eval set's documents come from: exactly one of `held_out_of`, `path` and `hf`."""

    __pydantic_config__: ClassVar = _STRICT

    held_out_of: str | None = None
    """A source; the documents that its `held_out` keeps out of training."""
    path: str | None = None
    """File or directory of text, JSONL, parquet or arrow, or a prepared folder."""
    hf: str | None = None
    """Name of a data set on the hub (its train split)."""
    format: Literal["text", "messages", "completion"] = "text"
    """As of a source; of conversations only the answers are measured."""
    text_key: str | None = None
    """Field or column of the text or of the messages in JSONL, parquet and arrow, as of a source."""
    glob: str = "**/*"
    """Which files of a directory are read."""
    max_sequences: PositiveInt | None = None
    """Whole documents in hash order, up to this many windows; the first one also where it alone has more. By default
    all of them."""
    every: PositiveInt | None = None
    """A multiple of `evalsets.every`, not for the primary set; boundaries, step 0 and the end always count."""
    tolerance: Annotated[float, Limits(ge=0, le=100)] | None = None
    """Nats per token that this set may rise by before it counts as worse; by default evalsets.regression.tolerance."""

    def own_source(self) -> SourceConfig | None:
        """Where its text lies, None where it is held out of a source; ValueError as of a source."""
        if self.held_out_of is not None:
            return None
        return SourceConfig(path=self.path, hf=self.hf, format=self.format, text_key=self.text_key, glob=self.glob)


@dataclass(frozen=True)
class EvalSection:
    """The eval sets: the primary one is the same for the whole run, and any number of named ones watch beside it."""

    __pydantic_config__: ClassVar = _STRICT

    primary: EvalSource
    """The set whose loss is the run's validation loss."""
    every: PositiveInt = 100
    """Steps between evals; also at step 0, at every phase boundary and at the end."""
    seq_len: PositiveInt | None = None
    """Tokens of an eval window; by default the longest sequence of the run."""
    sets: dict[str, EvalSource] = field(default_factory=dict)
    """Named eval sets."""
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    """When a set counts as worse, and what is done then."""
    gold: GoldConfig = field(default_factory=GoldConfig)
    """Which checkpoint is the best of the run."""


@dataclass(frozen=True)
class SkipUpdates:
    """Which finite updates are skipped. Those that are not finite are, whatever stands here."""

    __pydantic_config__: ClassVar = _STRICT

    sigmas: Annotated[float, Limits(gt=0, le=1e6)] = 6.0
    """Those whose loss or gradient norm is more than so many standard deviations above the mean of the window."""
    window_steps: Annotated[int, Limits(ge=2, le=2**20)] = 128
    """Updates before this one in the window; it begins anew at each segment and at the end of a ramp."""
    judge_from_steps: Annotated[int, Limits(ge=2, le=2**20)] = 64
    """How many finite values the window holds at least before it is judged by."""


@dataclass(frozen=True)
class RollbackSection:
    """Going back to the last good checkpoint where training diverges."""

    __pydantic_config__: ClassVar = _STRICT

    after: PositiveInt = 3
    """Updates in a row that are bad: not finite, or beyond train.skip_updates."""
    skip_steps: PositiveInt = 20
    """How many steps of data are passed over, from the first bad update on."""
    max: Annotated[int, Limits(ge=1, le=1000)] = 3
    """How often in a run; then it ends with exit code 3."""


@dataclass(frozen=True)
class TrainSection:
    """How long and how wide."""

    __pydantic_config__: ClassVar = _STRICT

    steps: PositiveInt
    """Updates of the whole run."""
    batch_size: Annotated[int, Limits(ge=1, le=2**20)] = 32
    """Sequences per update, over all micro-steps and devices."""
    grad_accum: PositiveInt = 1
    """Micro-steps per update: trades time for memory, changes no data."""
    seq_len: Annotated[int, Limits(ge=2, le=2**24)] = 256
    """Tokens per sequence. Left out where each phase has its own, it is the longest of theirs."""
    deterministic: bool | None = None
    """true: no dropout, and on a GPU deterministic kernels only; false: `model.dropout` is needed; null: as it is."""
    skip_updates: SkipUpdates | None = field(default_factory=SkipUpdates)
    """Which finite updates are skipped; null for none of them."""
    rollback: RollbackSection | None = None
    """Go back where training diverges, such as `{after: 3, skip_steps: 20, max: 3}`; null: end with exit code 3."""

    @property
    def window_steps(self) -> int:
        """Of the guard, also where no finite update is skipped."""
        return (self.skip_updates or SkipUpdates()).window_steps

    @property
    def diverged_after(self) -> int:
        """So many bad updates in a row are a divergence. Without a rollback, when the window is full of them."""
        return self.window_steps if self.rollback is None else self.rollback.after


@dataclass(frozen=True)
class AveragesSection:
    """Averages of the parameters, measured beside the raw ones under their own names, and exportable."""

    __pydantic_config__: ClassVar = _STRICT

    ema_decay: Annotated[float, Limits(gt=0, lt=1)] | None = None
    """Of a moving average of the parameters, `ema`; a step's decay is min(this, (1 + step) / (10 + step))."""
    phase_mean: Annotated[int, Limits(ge=2, le=1000)] | None = None
    """At a phase's end, the mean of its last so many checkpoints; as many are kept, whatever checkpoint.keep says."""


@dataclass(frozen=True)
class OptimSection(OptimConfig, LrSchedule):
    """The optimizer and the global learning rate."""

    __pydantic_config__: ClassVar = _STRICT


@dataclass(frozen=True)
class CheckpointSection:
    """When to save, and how many checkpoints stay."""

    __pydantic_config__: ClassVar = _STRICT

    every: PositiveInt = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept; averages.phase_mean keeps more, a row of bad updates the newest one
    from before it."""


@dataclass(frozen=True)
class LoggingSection:
    """What is written beside the record of events."""

    __pydantic_config__: ClassVar = _STRICT

    every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases; null for not."""
    generate_every: Annotated[int, Limits(ge=0, le=10**9)] = 0
    """Steps between samples of what the model writes, which the end has too; 0 for none."""
    generate: GenerateSection = field(default_factory=GenerateSection)
    """What the samples go on from, and how they are drawn."""
