"""The plan of a run before training: what each source gets, when, and warnings. Imports no jax, prepares no text."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from curriculum.config import Config, check_is_config
from curriculum.data.corpus import Sizes, find_sizes
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.model.counts import num_adapters, num_parameters, num_projections, num_trained
from curriculum.model.memory import FLOAT32_BYTES, memory_estimate
from curriculum.model.presets import ModelConfig, model_problems
from curriculum.plan_warnings import all_warnings, costly_evals, known_to_base
from curriculum.record.wording import MOST_SOURCES, first_of
from curriculum.run import DEFAULT_STORE_DIR
from curriculum.scheduling import constant_tokens_per_step, describe_phases, num_due, resolve_schedule
from curriculum.schema.adaptation import base_lineage, resolved_model
from curriculum.schema.shapes import row_problems
from curriculum.train.optimizer import OPTIMIZERS, OptimConfig
from phases.batches import num_micro_steps
from phases.caps import first_above
from phases.schedule import Schedule

# While muon orthogonalises its updates, XLA on a CPU holds this many arrays of the size of every matrix at once.
MUON_ARRAYS = 6


@dataclass(frozen=True)
class PlanRow:
    """One source in one phase. Epochs and the first repeated step are None while the source's size is unknown."""

    phase: str
    source: str
    start: int
    end: int
    share_asked: float
    share_given: float
    tokens: int
    epochs_so_far: float | None
    first_repeat_step: int | None


@dataclass(frozen=True)
class Plan:
    """What `curriculum plan` shows.

    tokens_per_step: None if phases differ in it; each of `phases` gives its own batch size and sequence length.
    custom_model: whether the config's `model` is null, so that no size of it is known.
    num_parameters, num_trained: how many the model has, and how many of them are trained. Both are None while the
        vocabulary is unknown, and for a model of one's own.
    memory: estimated bytes on one device, by part and in total, for the update that needs the most: that of `phase`,
        with micro-steps of `rows` x `seq_len` tokens. `on_gpu` is the total on an NVIDIA GPU. `free_axis` is the mesh
        axis given as -1, which counts as 1. None as for `num_parameters`, and for an optimizer of one's own.
    evals: {num, sets, tokens} of those ahead: how many, of which sets, and an upper bound of the tokens that they
        measure in all, None while that is unknown.
    checkpoints: {num, keep, bytes} of those ahead; the bytes are those of one checkpoint, None as for `memory`.
    rates: (step, learning rate of that update) at the start of every phase and at the last update.
    passed_over: {step, phase, tokens by source} where a phase leaves tokens unread to begin with whole sequences of
        its own length.
    begins_from: the lineage of a run that begins from another run or from a folder.
    resumes: for a run that is resumed, {run, step, complete, lr, measures, edit}: its folder, the checkpoint's step,
        whether the run is complete there, the learning rate of the next update (None if there is none), the eval sets
        that are measured before it, and the `schedule_edit` that the run would record (None if the config changes
        nothing).
    """

    name: str
    total_steps: int
    tokens_per_step: int | None
    total_tokens: int
    custom_model: bool
    num_parameters: int | None
    num_trained: int | None
    memory: dict[str, Any] | None
    evals: dict[str, Any]
    checkpoints: dict[str, Any]
    phases: tuple[dict[str, Any], ...]
    rows: tuple[PlanRow, ...]
    rates: tuple[tuple[int, float], ...]
    passed_over: tuple[dict[str, Any], ...]
    packing_mode: str
    sources: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    begins_from: dict[str, Any] | None = None
    resumes: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(config: Config, *, store_dir: str | Path = DEFAULT_STORE_DIR) -> Plan:
    """Resolve the whole run from the config and the sizes of what is already prepared. Raises InputError."""
    check_is_config(config)
    sizes = find_sizes(config, store_dir)
    known = known_to_base(config, store_dir, sizes.tokenizer)
    sizes = replace(sizes, warnings=(*sizes.warnings, *known))
    return plan_of(config, sizes, resolve_schedule(config, sizes.tokens_per_epoch), base_lineage(config))


def plan_of(
    config: Config,
    sizes: Sizes,
    schedule: Schedule,
    begins_from: dict[str, Any] | None,
    resumes: dict[str, Any] | None = None,
) -> Plan:
    """The plan of a schedule that is resolved already.

    `sizes` may have epochs of sources that the config no longer has. `begins_from` and `resumes` are as in `Plan`.
    """
    epochs_of = sizes.tokens_per_epoch
    model = _model_of(config, sizes.tokenizer)
    trained = 0 if resumes is None else resumes["step"]
    ahead = schedule.phases_after(trained)
    if problems := list(row_problems(config.train, config.phases, config.mesh.row_shards, ahead)):
        raise config.error(problems)
    warnings = [*schedule.warnings, *sizes.warnings]
    warnings += all_warnings(config, schedule, epochs_of, sizes.details, model, trained)
    evals = _evals(config, sizes, schedule, trained, config.eval_sources if resumes is None else resumes["measures"])
    tokens_ahead = schedule.tokens(schedule.total_steps) - schedule.tokens(trained)
    if evals["tokens"] is not None and tokens_ahead:
        warnings += costly_evals(evals["tokens"], tokens_ahead)
    unknown = [name for name, size in epochs_of.items() if size is None]
    if unknown:
        names = first_of(unknown, MOST_SOURCES)
        warnings.append(f"not prepared yet, so epochs are unknown: {names} ({prepare_command(config)})")
    bounds = [start for _, start, _ in schedule.phase_bounds] + [schedule.total_steps - 1]
    rates = tuple((step, float(schedule.rates(step))) for step in dict.fromkeys(bounds))
    parameters = trained_parameters = memory = checkpoint_bytes = None
    if model is not None:
        parameters, trained_parameters = num_parameters(model), num_trained(model)
        memory, checkpoint_bytes = _memory(config, model, schedule, trained), _checkpoint_bytes(config, model)
    return Plan(
        name=config.name,
        total_steps=schedule.total_steps,
        tokens_per_step=constant_tokens_per_step(schedule),
        total_tokens=schedule.tokens(schedule.total_steps),
        custom_model=config.model is None,
        num_parameters=parameters,
        num_trained=trained_parameters,
        memory=memory,
        evals=evals,
        checkpoints={
            "num": num_due({schedule.total_steps}, config.checkpoint.every, trained),
            "keep": config.checkpoint.keep,
            "bytes": checkpoint_bytes,
        },
        phases=describe_phases(schedule, config),
        rows=tuple(_rows(schedule, epochs_of)),
        rates=rates,
        passed_over=tuple(
            {"step": start, "phase": phase, "tokens": tokens}
            for phase, start, _ in schedule.phase_bounds
            if (tokens := schedule.passed_over(start))
        ),
        packing_mode=config.packing.mode,
        sources={n: {"tokens_per_epoch": epochs_of[n], **sizes.details.get(n, {})} for n in config.sources},
        warnings=tuple(warnings),
        begins_from=begins_from,
        resumes=resumes,
    )


def _model_of(config: Config, tokenizer: Tokenizer | None) -> ModelConfig | None:
    """The architecture that would be trained; None if it is a custom model, or if its vocabulary is not known yet."""
    # A tokenizer that is trained has the size that the config gives it, or is refused.
    vocab_size = config.tokenizer.vocab_size if tokenizer is None else tokenizer.vocab_size
    if config.model is None or vocab_size is None:
        return None
    if problems := model_problems(config.model, vocab_size):
        raise config.error((f"model.{key}", message) for key, message in problems)
    return resolved_model(config, vocab_size)


def _rows(schedule: Schedule, epochs_of: Mapping[str, int | None]) -> Iterator[PlanRow]:
    for phase, start, end in schedule.phase_bounds:
        read, after = schedule.read(start, end), schedule.cursors_at(end)
        total = sum(read.values())
        asked, repeats = _shares_asked(schedule, phase), _first_repeats(schedule, phase, epochs_of)
        for name in (name for name in epochs_of if name in asked):
            size = epochs_of[name]
            yield PlanRow(
                phase=phase,
                source=name,
                start=start,
                end=end,
                share_asked=asked[name],
                share_given=read[name] / total,
                tokens=read[name],
                epochs_so_far=None if size is None else after[name] / size,
                first_repeat_step=repeats.get(name),
            )


def _shares_asked(schedule: Schedule, phase: str) -> dict[str, float]:
    """Exact mean proportion of each source in a phase's tokens, over its ramp and the segments that edits made."""
    segments = [s for s in schedule.segments if s.phase == phase]
    tokens = [(s.end - s.start) * s.batch_size * s.seq_len for s in segments]
    asked: dict[str, float] = {}
    for segment, num_tokens in zip(segments, tokens, strict=True):
        for name, share in segment.mean_mixture().items():
            asked[name] = asked.get(name, 0.0) + share * num_tokens / sum(tokens)
    return asked


def prepare_command(config: Config) -> str:
    """The advice for text that is not prepared yet: which command to run."""
    prepare = f"curriculum prepare {'CONFIG' if config.origin.text is None else shlex.quote(config.origin.file)}"
    return f"run `{prepare}`{' with the same options' if config.command_line else ''}"


def _evals(config: Config, sizes: Sizes, schedule: Schedule, trained: int, first: Collection[str]) -> dict[str, Any]:
    """The evals ahead after step `trained`; `first`: the sets that are measured before the next update too.

    The tokens are those of the averages too: a moving average is measured at each eval after step 0, the mean of a
    phase at its end.
    """
    due = {
        name: num_due(schedule.phase_ends, source.every or config.evalsets.every, trained)
        for name, source in config.eval_sources.items()
    }
    num = {name: due[name] + (name in first) for name in due}
    averages = config.averages
    num_means = 0 if averages.phase_mean is None else sum(end > trained for end in schedule.phase_ends)
    measured = {name: num[name] + num_means for name in num}
    if averages.ema_decay is not None:
        for name in measured:
            measured[name] += num[name] if trained else due[name]  # at step 0 there is none
    known = None not in sizes.evalset_tokens.values()
    return {
        "num": max(num.values()),
        "sets": list(num),
        "tokens": sum(measured[name] * tokens for name, tokens in sizes.evalset_tokens.items()) if known else None,
    }


def _checkpoint_bytes(config: Config, model: ModelConfig) -> int | None:
    """Bytes of parameters, moments and average on all devices together; None for an optimizer of one's own."""
    moments = _moments_per_parameter(config.optim, model, {})
    if moments is None:
        return None
    return round(FLOAT32_BYTES * num_trained(model) * (1 + moments + (config.averages.ema_decay is not None)))


def _memory(config: Config, model: ModelConfig, schedule: Schedule, trained: int) -> dict[str, Any] | None:
    """The memory of the largest update on a CPU, and `on_gpu`, the total of the largest one on an NVIDIA GPU.

    Of the updates after step `trained`, or of all if none is left. A mesh axis of -1 counts as 1. None for an optimizer
    of one's own.
    """
    ahead = [segment for segment in schedule.segments if segment.end > trained] or schedule.segments
    mesh, estimates = config.mesh, {"cpu": [], "gpu": []}
    split = {"fsdp": max(mesh.fsdp, 1), "tensor": max(mesh.tensor, 1)}
    moments = _moments_per_parameter(config.optim, model, split)
    if moments is None:
        return None
    model = replace(model, dropout=0.0) if config.train.deterministic else model
    update_bytes = 0
    if config.optim.name == "muon":
        update_bytes = MUON_ARRAYS * FLOAT32_BYTES * (num_adapters(model) or num_projections(model))
    for segment, backend in product(ahead, estimates):
        grad_accum = num_micro_steps(config.grad_accum_of(segment.phase), segment.batch_size)
        rows = max(segment.batch_size // grad_accum // mesh.row_shards, 1)  # what is trained had other devices perhaps
        estimate = memory_estimate(
            model,
            rows=rows,
            seq_len=segment.seq_len,
            backend=backend,
            grad_accum=grad_accum,
            moments_per_parameter=moments,
            ema=config.averages.ema_decay is not None,
            document_mask=config.packing.document_mask,
            update_bytes=update_bytes,
            **split,
        )
        shape = {"phase": segment.phase, "rows": rows, "seq_len": segment.seq_len}
        estimates[backend].append(shape | estimate.to_json())
    free_axis = next((axis for axis, size in asdict(mesh).items() if size == -1), None)
    on_cpu, on_gpu = (max(found, key=lambda estimate: estimate["total"]) for found in estimates.values())
    return {**on_cpu, "on_gpu": on_gpu["total"], "free_axis": free_axis}


def _moments_per_parameter(optim: OptimConfig, model: ModelConfig, split: Mapping[str, int]) -> float | None:
    """The optimizer's moments per parameter, averaged over a device's parameters; None if its state is unknown."""
    rule = OPTIMIZERS.get(optim.name)
    moments = rule and rule.moments
    if optim.name != "muon" or model.lora is not None:  # adapters are all matrices
        return moments
    muon_share = num_projections(model, **split) / num_parameters(model, **split)
    if optim.muon.allow_all_2d or (optim.muon.allow_tied_embed and model.tie_embeddings):
        muon_share = 1.0  # except vectors and a table of positions
    of_rest = OPTIMIZERS[optim.muon.rest].moments
    return None if moments is None or of_rest is None else muon_share * moments + (1 - muon_share) * of_rest


def _first_repeats(schedule: Schedule, phase: str, epochs_of: Mapping[str, int | None]) -> dict[str, int]:
    """By source, the first update of a phase that reads any of it again; sources that are not reread are left out."""
    found: dict[str, int] = {}
    for segment in (s for s in schedule.segments if s.phase == phase):
        at_start, at_end = segment.cursors_at(segment.start), segment.cursors_at(segment.end)
        for name in segment.quotas.sources:
            if name in found or (size := epochs_of.get(name)) is None:
                continue
            within = max(size, at_start[name])
            if at_end[name] > within:  # of many sources a search for each would take long
                found[name] = first_above(segment, name, within, segment.end) - 1
    return found
