"""The sections of a config that are the run's own; those of its parts stand beside what reads them."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from curriculum.data.sources import SourceConfig
from curriculum.parsing.typed import Limits
from curriculum.record.wandb_log import WandbConfig
from curriculum.sampling import GenerateSection
from curriculum.train.optimizer import OptimConfig
from evalsets.config import GoldConfig, RegressionConfig
from phases.lr import LrSchedule

PositiveInt = Annotated[int, Limits(ge=1, le=10**9)]


@dataclass(frozen=True)
class EvalSource:
    """Where an eval set's documents come from: exactly one of `held_out_of`, `path` and `hf`."""

    held_out_of: str | None = None
    """A source: the set is the documents that the source's `held_out` keeps out of training."""
    path: str | None = None
    """File or directory of text, JSONL, parquet or arrow, or a prepared folder."""
    hf: str | None = None
    """A dataset on the hub, NAME or NAME:CONFIGURATION; its split "train" is read."""
    format: Literal["text", "messages", "completion"] = "text"
    """As for a source; in conversations only the answers are measured."""
    text_key: str | None = None
    """Key or column of the text or of the messages in JSONL, parquet and arrow, as for a source."""
    glob: str = "**/*"
    """Which files of a directory are read."""
    max_sequences: PositiveInt | None = None
    """Take whole documents in hash order, up to this many windows, and always the first document. By default all
    documents."""
    every: PositiveInt | None = None
    """Steps between evals of this set, a multiple of `evalsets.every`; step 0, phase boundaries and the end have one
    too. Not for the primary set."""
    tolerance: Annotated[float, Limits(ge=0, le=100)] | None = None
    """Nats per token that this set may rise by before it counts as worse; by default evalsets.regression.tolerance."""

    def own_source(self) -> SourceConfig | None:
        """Where its text lies, None where it is held out of a source; ValueError as of a source."""
        if self.held_out_of is not None:
            return None
        return SourceConfig(path=self.path, hf=self.hf, format=self.format, text_key=self.text_key, glob=self.glob)


@dataclass(frozen=True)
class EvalSection:
    """The eval sets: a primary one, the same for the whole run, and any number of named ones."""

    primary: EvalSource
    """The set whose loss is the run's validation loss."""
    every: PositiveInt = 100
    """Steps between evals; there is also one at step 0, at every phase boundary and at the end."""
    seq_len: PositiveInt | None = None
    """Tokens per eval window; by default the longest sequence of the run."""
    sets: dict[str, EvalSource] = field(default_factory=dict)
    """Named eval sets."""
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    """When a set counts as worse, and what is done then."""
    gold: GoldConfig = field(default_factory=GoldConfig)
    """Which checkpoint is the best of the run."""


@dataclass(frozen=True)
class SkipUpdates:
    """Which finite updates are skipped. Updates that are not finite always are."""

    sigmas: Annotated[float, Limits(gt=0, le=1e6)] = 6.0
    """Skip an update whose loss or gradient norm is more than this many standard deviations above the window's mean."""
    window_steps: Annotated[int, Limits(ge=2, le=2**20)] = 128
    """Length of the window, the updates before this one; it restarts where other data or another rope_theta
    begin, and at the end of a ramp."""
    judge_from_steps: Annotated[int, Limits(ge=2, le=2**20)] = 64
    """Minimum number of finite values in the window before any update is skipped."""


@dataclass(frozen=True)
class RollbackSection:
    """Going back to the last good checkpoint if training diverges."""

    after: PositiveInt = 3
    """Go back after this many bad updates in a row: not finite, or beyond train.skip_updates."""
    skip_steps: PositiveInt = 20
    """Steps of data to skip, from the first bad update on."""
    max: Annotated[int, Limits(ge=1, le=1000)] = 3
    """Maximum number of rollbacks in a run; the next divergence ends it with exit code 3."""


@dataclass(frozen=True)
class TrainSection:
    """Length of the run, batch size and sequence length."""

    steps: PositiveInt
    """Updates of the whole run."""
    batch_size: Annotated[int, Limits(ge=1, le=2**20)] = 32
    """Sequences per update, over all micro-steps and devices."""
    grad_accum: PositiveInt = 1
    """Micro-steps per update: trades time for memory, changes no data."""
    seq_len: Annotated[int, Limits(ge=2, le=2**24)] = 256
    """Tokens per sequence. If left out while every phase has its own, the longest of theirs."""
    deterministic: bool | None = None
    """true: no dropout, and on a GPU deterministic kernels only, without cuDNN's attention; false: `model.dropout` is
    needed; null: neither."""
    skip_updates: SkipUpdates | None = field(default_factory=SkipUpdates)
    """Which finite updates are skipped; null: none."""
    rollback: RollbackSection | None = None
    """Go back if training diverges, such as `{after: 3, skip_steps: 20, max: 3}`; null: end with exit code 3."""

    @property
    def window_steps(self) -> int:
        """Of the guard, also where no finite update is skipped."""
        return (self.skip_updates or SkipUpdates()).window_steps

    @property
    def diverged_after(self) -> int:
        """So many bad updates in a row are a divergence amid a run: without a rollback, those that fill the window."""
        return self.window_steps if self.rollback is None else self.rollback.after


@dataclass(frozen=True)
class AveragesSection:
    """Averages of the parameters, evaluated beside the raw ones under their own names, and exportable."""

    ema_decay: Annotated[float, Limits(gt=0, lt=1)] | None = None
    """Decay of a moving average of the parameters, `ema`; at update n, from 0, it is min(this, (1 + n) / (10 + n))."""
    phase_mean: Annotated[int, Limits(ge=2, le=1000)] | None = None
    """At a phase's end, average this many of its last checkpoints; they are kept, whatever checkpoint.keep says."""


@dataclass(frozen=True)
class OptimSection(OptimConfig, LrSchedule):
    """The optimizer and the global learning rate."""


@dataclass(frozen=True)
class CheckpointSection:
    """When to save, and how many checkpoints to keep."""

    every: PositiveInt = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept; averages.phase_mean may keep more, and the newest one before a row
    of bad updates stays while it lasts."""


@dataclass(frozen=True)
class LoggingSection:
    """Metrics, TensorBoard, Weights & Biases and samples, beside the record of events."""

    every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases; null: do not."""
    generate_every: Annotated[int, Limits(ge=0, le=10**9)] = 0
    """Steps between samples of what the model writes, with one more at the end; 0: none."""
    generate: GenerateSection = field(default_factory=GenerateSection)
    """The prompts of the samples, and how the samples are drawn."""


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are divided: data x fsdp x tensor. At most one size may be -1: all remaining devices."""

    data: int = -1
    """Groups of devices that hold the same state and take different rows."""
    fsdp: int = 1
    """Devices over which parameters, gradients and moments are split; each takes rows of its own."""
    tensor: int = 1
    """Devices over which heads, feed-forward and vocabulary are split if it divides them; all take the same rows."""

    def problems(self) -> list[tuple[str, str]]:
        """Problems with the sizes, as (field, message) pairs; the field is empty if several are concerned."""
        sizes = asdict(self)
        problems = [
            (name, f"got {size}, expected 1 or more, or -1 for all remaining devices")
            for name, size in sizes.items()
            if size < 1 and size != -1
        ]
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            problems.append(("", f"got -1 for {' and '.join(free)}, expected at most one -1; give the others a size"))
        return problems

    @property
    def row_shards(self) -> int:
        """How many parts the rows of a micro-step are cut into, or a divisor of that number while a size is -1."""
        return max(self.data, 1) * max(self.fsdp, 1)
