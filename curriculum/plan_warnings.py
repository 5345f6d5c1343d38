"""Warnings: settings with no effect, or a larger one than probably intended, and eval sets that tell too little."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from curriculum.config import Config, config_from_json
from curriculum.data.config_stores import own_sources
from curriculum.data.corpus import find_trained_on
from curriculum.data.split import parse_share
from curriculum.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from curriculum.errors import InputError, shown
from curriculum.model.formulation import BY_BACKEND
from curriculum.model.presets import ModelConfig, own_rope_theta
from curriculum.record.events import record_name
from curriculum.record.wording import counted, first_of, largest, listed
from curriculum.run_directory import read_json
from curriculum.scheduling import mean_steps, num_due
from curriculum.schema.adaptation import PastRun, find_base
from evalsets.evalset import EvalSet
from evalsets.metrics import clusters
from evalsets.regressions import NUM_HISTORY
from phases.rates import rate_spans
from phases.schedule import Schedule, SourceSupply

# Muennighoff et al. 2023, arXiv:2305.16264: repeating a source up to 4 times is worth nearly as much as fresh data.
MAX_EPOCHS_WORTH_FRESH = 4
MOST_WARNED = 4  # most sources that get a warning each
MUCH_HELD_OUT = 0.2  # of a source; less may be the 30 documents that are held out at least
MOST_HELD_OUT = 0.5  # of a source, though held_out asks for it
COSTLY_EVALS = 0.5  # of the work of a run
FEW_SCORED_TARGETS = 64  # per update; answers are contiguous, so that below this mean some updates have none


def all_warnings(
    config: Config,
    schedule: Schedule,
    epochs_of: Mapping[str, int | None],
    details: Mapping[str, Mapping[str, Any]],
    model: ModelConfig | None,
    trained: int,
) -> list[str]:
    """What `plan` and the start of a run warn of, beside what resolving and reading the data does.

    `epochs_of` and `trained` as in `schedule_warnings`; `details` are those of a corpus. `model` is None if it is a
    custom one, or unknown.
    """
    return [
        *schedule_warnings(config, schedule, epochs_of, trained),
        *much_held_out(config, details),
        *few_scored_targets(schedule, details),
        *_left_over(config, details),
        *([] if model is None else _unsplit_vocabulary(config, model)),
    ]


def schedule_warnings(
    config: Config, schedule: Schedule, epochs_of: Mapping[str, int | None], trained: int = 0
) -> Iterator[str]:
    """Warnings of settings that do nothing with this schedule, or more than may be meant.

    `epochs_of` are tokens per epoch by source, None if unknown. Of phases that are over after `trained` updates no mean
    is taken any more.
    """
    cursors = schedule.cursors_at(schedule.total_steps)
    random = config.adaptation.init_from is None and config.model is not None  # a custom model may know something
    if config.adaptation.replay and random and trained == 0:
        yield "adaptation.replay is set, but the run begins with random parameters: to adapt a model, give --init-from"
    yield from _read_often(config, cursors, epochs_of)
    yield from _replaced(config)
    yield from _unread(config, schedule)
    yield from _few_evals(config, schedule)
    yield from _shapes_that_do_nothing(config)
    yield from _decay_that_ends(schedule)
    yield from _few_to_average(config, schedule, trained)


def _decay_that_ends(schedule: Schedule) -> Iterator[str]:
    """A warning if the learning rate falls, but not to the end."""
    spans = rate_spans(schedule)
    falls = [span for span in spans if span.piece.last < span.piece.first and not span.piece.warmup]
    if spans[-1].piece.last == spans[-1].piece.first and falls:
        ended = min(falls[-1].end, falls[-1].piece.start + falls[-1].piece.steps)
        yield f"the learning rate stops decaying at step {ended}, {schedule.total_steps - ended} steps before the end"


def _few_to_average(config: Config, schedule: Schedule, trained: int) -> Iterator[str]:
    """A warning for each phase to come that has fewer checkpoints than its mean is to be of."""
    wanted = config.averages.phase_mean
    if wanted is None:
        return
    for phase, start, end in schedule.phase_bounds:
        if end <= trained:
            continue
        found = len(mean_steps(config, start, end, schedule.total_steps))
        if found < 2:
            yield f"phase {phase} has {counted(found, 'checkpoint')}: no mean is taken"
        elif found < wanted:
            yield f"the mean of phase {phase} will be of {found} checkpoints, not {wanted}"


def much_held_out(config: Config, details: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each source of which most, or far more than `held_out` asks for, is kept out of training."""
    for name, of_source in details.items():
        if of_source["dropped_documents"]:  # they are among what is kept out
            continue
        share, kept_out = parse_share(config.sources[name].held_out), of_source["kept_out_tokens"]
        num_tokens = of_source["tokens"] + kept_out
        if not share or kept_out <= MUCH_HELD_OUT * num_tokens:
            continue
        told = (
            f"{name}: {kept_out:,} of its {num_tokens:,} tokens ({kept_out / num_tokens:.0%}) are kept out of training"
        )
        if kept_out > 2 * share * num_tokens:
            yield (
                f"{told}, where held_out asks for {share:.3g}: a document is held out whole, with its copies; cut long "
                "documents into several, or lower held_out"
            )
        elif kept_out > MOST_HELD_OUT * num_tokens:
            yield f"{told}, as held_out asks for {share:.3g} of it; if training is to read most of it, lower held_out"


def _read_often(config: Config, cursors: Mapping[str, int], epochs_of: Mapping[str, int | None]) -> Iterator[str]:
    """A warning for each source read beyond `max_epochs` or too often by the run's end; of many, one for all."""
    often: dict[str, float] = {}
    for name, size in epochs_of.items():
        source = config.sources.get(name)
        repeats = source is not None and source.on_exhaust == "repeat"
        # A source that repeats does not end at its max_epochs, but reading on is worth a warning.
        cap = SourceSupply(size, source.max_epochs).cap_tokens if repeats else None
        if cap is not None and cursors[name] > cap:
            most = f"beyond its max_epochs of {source.max_epochs:g}"
            yield f"{name} is read {cursors[name] / size:.3g} times, {most}, as on_exhaust is repeat"
        elif size is not None and cursors[name] > MAX_EPOCHS_WORTH_FRESH * size:
            often[name] = cursors[name] / size
    worth = (
        f"above {MAX_EPOCHS_WORTH_FRESH} epochs repeated data is worth less and less (93 % of fresh data at 4 epochs, "
        "66 % at 16: arXiv:2305.16264)"
    )
    if len(often) <= MOST_WARNED:
        yield from (f"{name} is read {times:.1f} times; {worth}" for name, times in often.items())
    else:
        most = ", ".join(largest(often, lambda name: f"{name} {often[name]:.1f}"))
        yield f"{len(often)} sources are read more than {MAX_EPOCHS_WORTH_FRESH} times ({most}); {worth}"


def _replaced(config: Config) -> Iterator[str]:
    """A warning for each source and eval set that lost settings when an option for its directory replaced it."""
    origin = config.origin
    now = {f"sources.{name}": source for name, source in config.sources.items()}
    now |= {f"evalsets.sets.{name}": evalset for name, evalset in config.evalsets.sets.items()}
    for path, was in origin.replaced.items():
        lost = {key: again for key, again in origin.lost(path).items() if getattr(now[path], key, None) != was[key]}
        if lost:
            keep = f"to keep its {listed([*lost])}, add {' '.join(lost.values())}"
            yield f"{origin.options[path]} replaced all of {path}; {keep}"


def costly_evals(eval_tokens: int, trained_tokens: int) -> Iterator[str]:
    """A warning if evals are a large share of the work ahead: a token costs 1, forward, and 3 if it is trained on."""
    share = eval_tokens / max(eval_tokens + 3 * trained_tokens, 1)
    if share > COSTLY_EVALS:
        yield (
            f"evals score {eval_tokens:,} tokens beside {trained_tokens:,} that are trained on, about {share:.0%} of "
            "the run's work; raise evalsets.every, or give large sets an every or a max_sequences of their own"
        )


def _few_evals(config: Config, schedule: Schedule) -> Iterator[str]:
    """A warning if the action on regressions is stop or replay, but too few evals are planned to find small ones."""
    every, action = config.evalsets.every, config.evalsets.regression.action
    planned = num_due(schedule.phase_ends, every, after=0)
    if action in ("stop", "replay") and planned < NUM_HISTORY:
        yield (
            f"evalsets.regression.action is {action}, but only {planned} evals are planned after the one at step 0: "
            f"with fewer than {NUM_HISTORY} only large rises are found; lower evalsets.every"
        )


def _shapes_that_do_nothing(config: Config) -> Iterator[str]:
    if config.optim.scale_lr_by_batch and not any(
        phase.batch_size not in (None, config.train.batch_size) for phase in config.phases
    ):
        yield "optim.scale_lr_by_batch does nothing: every phase has train.batch_size"
    own = None if config.model is None else own_rope_theta(config.model)
    for before, after in pairwise(config.phases):
        if before.rope_theta not in (None, own) and after.rope_theta is None:
            yield (
                f"phase {after.name} goes back from a rope_theta of {before.rope_theta:g} to the model's own; to keep "
                f"it, give the phase rope_theta: {before.rope_theta:g}"
            )


def known_to_base(config: Config, store_dir: str | Path, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A warning for each eval set with documents that the run of `adaptation.init_from` was trained on.

    The runs that it began from count as well. And a warning if it cannot be told, as such a run is gone or its text has
    changed or is not prepared here; and one if the run was trained on conversations by another template. Raises
    InputError if the run is gone.
    """
    given = config.adaptation.init_from
    base = None if given is None or tokenizer is None else find_base(given)
    if base is None:
        return
    reads_turns = any(s.format == "messages" for s in (*config.sources.values(), *own_sources(config).values()))
    if reads_turns and base.chat is not None and base.chat.chat != config.chat:
        ours, its = asdict(config.chat), asdict(base.chat.chat)
        changed = [f"chat.{role} is {shown(its[role])} there" for role in its if ours[role] != its[role]]
        yield f"conversations are written by another template than {given} was trained with: {'; '.join(changed)}"
    for past in base.past_runs:
        further_back = "" if past.name == given else f", where the model of {given} comes from,"
        told = f"{past.name}{further_back}"
        found, unknown = read_before(past, config, config.eval_sources, store_dir, tokenizer)
        for name, (num_documents, counts) in found.items():
            for source, count in counts.items():
                yield (
                    f"{count:,} of {num_documents:,} documents of eval set {record_name(name)} are in source {source}, "
                    f"which {told} was trained on: the set's losses show that too; hold out what {past.name} held "
                    "out (the same path and held_out), or measure other text"
                )
        if unknown is not None:
            yield f"unknown whether {told} was trained on documents of the eval sets: {unknown}"


def read_before(
    past: PastRun, config: Config, names: Iterable[str], store_dir: str | Path, tokenizer: Tokenizer
) -> tuple[dict[str, tuple[int, dict[str, int]]], str | None]:
    """What a past run was trained on of the eval sets of `config` with these names, as `find_trained_on` finds it.

    And why that is not known, or not all of it; None if it is.
    """
    if past.directory is None:
        return {}, "that run is not found where it was, or cannot be read"
    try:
        resolved = past.directory.resolved()
        own = read_json(past.directory.tokenizer / "tokenizer.json").get("fingerprint") == tokenizer.fingerprint
        its_tokenizer = tokenizer if own else load_tokenizer(past.directory.tokenizer)
        its_config = config_from_json({name: resolved[name] for name in config.to_json() if name in resolved})
    except InputError:  # nothing else needs either
        return {}, "its config or its tokenizer cannot be read"
    try:
        found, unknown = find_trained_on(config, names, its_config, past.streams, store_dir, tokenizer, its_tokenizer)
    except InputError:  # of text that changed
        found, unknown = {}, list(past.streams)
    changed = f"its text of {first_of(unknown, MOST_WARNED)} has changed, or is not prepared here"
    return found, changed if unknown else None


def evalset_warnings(evalsets: Iterable[EvalSet]) -> Iterator[str]:
    """Warnings of eval sets that tell less than their size suggests: many copies, or a single document."""
    for evalset in evalsets:
        name, distinct = record_name(evalset.name), evalset.num_distinct_documents
        if 2 * distinct <= evalset.num_documents:
            yield (
                f"eval set {name} has {evalset.num_documents:,} documents, only {distinct:,} of them distinct: copies "
                "count as one document in its standard errors and verdicts; remove the copies from its text"
            )
        if len(np.unique(clusters(evalset.origin_N)[0])) < 2:
            num = np.count_nonzero(evalset.origin_N >= 0)
            yield (
                f"eval set {name} is one document of {counted(num, 'window')}: no standard error, and no "
                "verdict on whether it got worse; give it more documents"
            )


def few_scored_targets(schedule: Schedule, details: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each phase with conversations whose updates have few scored targets.

    `details` are those of a corpus. In plain text every slot that holds text counts as scored; in a source that is not
    prepared, every slot does.
    """
    for phase, _, end in schedule.phase_bounds:
        segment = schedule.segment_at(end - 1)  # the newest, where the phase was edited on its way
        shares, tokens_per_step = segment.mean_mixture(), segment.batch_size * segment.seq_len
        of_slots = {
            name: details.get(name, {}).get("scored_share", 1.0) * (details.get(name, {}).get("utilization") or 1.0)
            for name in shares
        }
        expected = tokens_per_step * sum(share * of_slots[name] for name, share in shares.items())
        if expected < FEW_SCORED_TARGETS and any("scored_share" in details.get(name, {}) for name in shares):
            yield (
                f"updates of phase {phase} have about {expected:.1f} scored targets each, in {tokens_per_step:,} slots;"
                " an update without any is skipped; raise its batch_size or seq_len"
            )


def _left_over(config: Config, details: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each source of which `packing.mode: stream` leaves more than 2 % after its last sequence."""
    if config.packing.mode != "stream":
        return
    for name, of_source in details.items():
        num_tokens, in_epoch = of_source["tokens"], of_source["tokens_per_epoch"]
        left = num_tokens - in_epoch - 1  # the token after the last sequence is its last target
        if in_epoch and left > num_tokens / 50:
            yield (
                f"{name}: the last {left:,} of its {num_tokens:,} tokens are never read, as they fill no sequence of "
                f"{config.longest_seq_len:,}; packing.mode: best_fit reads all, and shorter sequences leave out less"
            )


def _unsplit_vocabulary(config: Config, model: ModelConfig) -> Iterator[str]:
    tensor, rows = config.mesh.tensor, model.vocab_size
    if tensor < 2 or rows % tensor == 0:
        return
    multiple = math.lcm(tensor, BY_BACKEND["gpu"].head_rows)
    matrices = "embedding" if model.tie_embeddings else "embedding and of the head"
    yield (
        f"mesh.tensor {tensor} does not divide the {rows:,} rows of the {matrices}: every device keeps all of them "
        f"and computes all logits; model.vocab_size: {-(-rows // multiple) * multiple} adds rows that are never "
        "predicted, so that they are split"
    )


def _unread(config: Config, schedule: Schedule) -> Iterator[str]:
    """A warning for each replayed source that every phase names itself, and each source neither read nor measured."""
    for name in config.adaptation.replay:
        if all(name in phase.mixture for phase in config.phases):
            yield f"adaptation.replay.{name} has no effect: the mixture of every phase names {name} itself"
    measured = {source.held_out_of for source in config.eval_sources.values()}
    shared = {name for segment in schedule.segments for name, share in segment.mean_mixture().items() if share > 0}
    shared |= {name for phase in config.phases for name, share in phase.mixture.items() if share > 0}
    for name, cursor in schedule.cursors_at(schedule.total_steps).items():
        if cursor == 0 and name not in measured | shared:
            yield (
                f"source {name} is never read: no phase gives it a share, and no eval set is held out of it; give it "
                f"one in a phase's mixture, or in all phases with adaptation.replay.{name}"
            )
