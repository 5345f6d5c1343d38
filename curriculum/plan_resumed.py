"""The plan of a resumed run: what its config would change, and how the rest is planned. Nothing is touched."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from curriculum.config import Config, check_is_config
from curriculum.data.corpus import Sizes, find_evalsets, find_sizes
from curriculum.plan import Plan, plan, plan_of, prepare_command
from curriculum.record.events import check_offsets, plain, read_events_before_damage
from curriculum.run import DEFAULT_STORE_DIR
from curriculum.run_directory import RunDirectory
from curriculum.scheduling import continued_schedule
from curriculum.schema.adaptation import resolved_model
from curriculum.train.resuming import going_back, opening
from curriculum.train.resuming.edits import edit_event, find_edit
from curriculum.train.resuming.ledger import Found, check_past
from curriculum.train.resuming.start import start_of
from evalsets.evalset import EvalSet
from phases.schedule import Schedule


def plan_resumed(
    config: Config,
    run_dir: str | Path,
    resume: str | int = "latest",
    *,
    accept_past: bool = False,
    store_dir: str | Path = DEFAULT_STORE_DIR,
) -> Plan:
    """Plan what `train` would do with the same arguments. Takes no lock, so the run may be training.

    A run without a checkpoint gets the plan of one that begins. Raises InputError where `train` would: if there is no
    such checkpoint, or if the config changes what is trained already. Text that is not prepared is not compared, and a
    warning says so. Arrays are verified by their checksums but not loaded.
    """
    check_is_config(config)
    directory = RunDirectory(Path(run_dir))
    directory.check_usable(to_write=False)
    resumed, under_way = going_back.to_continue(directory, resume)
    told = [f"{folder}: is damaged: {why}; skipped" for _, folder, why in opening.damaged(directory, resumed)]
    if under_way is None:
        told += opening.resumed_from_copy(directory, resume, resumed)
    saved = going_back.ledger_of(under_way, resumed)
    if saved is None:
        fresh = plan(config, store_dir=store_dir)
        return replace(fresh, warnings=(*told, opening.nothing_to_resume(directory), *fresh.warnings))
    step = 0
    if resumed is not None:
        step = resumed.step
        check_offsets(directory.path, saved["offsets"])
    edit = find_edit(config, saved, accept_past=accept_past)
    opening.check_ahead(config, directory, step, edit.past)
    start_of(config, None if resumed is None else saved, directory)

    sizes = find_sizes(config, store_dir, opening.kept_tokenizer(directory, config))
    evalsets = find_evalsets(config, store_dir, sizes.tokenizer) if sizes.tokenizer else {}
    schedule, _ = continued_schedule(config, sizes.tokens_per_epoch, edit.past)
    found = _found(config, schedule, sizes, evalsets)
    accepted = check_past(saved, found, accept_past=accept_past)
    # The ledger does not tell: a later config may have ended the run there.
    last = read_events_before_damage(directory.path)[-1:]
    resumes = {
        "run": str(directory.path),
        "step": step,
        "complete": [(e["event"], e["step"]) for e in last] == [("training_complete", step)],
        "lr": float(schedule.rates(step)) if step < schedule.total_steps else None,
        "measures": _measures(config, schedule, saved["history"], step),
        "edit": edit_event(edit, saved, found, accepted, warnings=()),
    }
    drawn = schedule.cursors_at(schedule.total_steps)
    gone = {name: saved["sources"][name]["tokens_per_epoch"] for name in drawn if name not in config.sources}
    all_sizes = replace(sizes, tokens_per_epoch={**sizes.tokens_per_epoch, **gone})
    planned = plan_of(config, all_sizes, schedule, saved["lineage"], resumes)
    told += _not_compared(config, directory, sizes, evalsets)
    return replace(planned, warnings=(*told, *planned.warnings))


def _found(config: Config, schedule: Schedule, sizes: Sizes, evalsets: Mapping[str, EvalSet]) -> Found:
    """What a resume would find now, as far as it is prepared; it is compared with what the run has trained."""
    architecture = None
    if config.model is not None and sizes.tokenizer is not None:
        architecture = plain(resolved_model(config, sizes.tokenizer.vocab_size).architecture)
    return Found(
        config=config,
        schedule=schedule,
        architecture=architecture,
        parameters=None,
        tokenizer=sizes.tokenizer and sizes.tokenizer.fingerprint,
        # Text of eval sets is kept out of training: unless all sets are known, the text that is trained on is not.
        sources=sizes.details if config.eval_sources.keys() <= evalsets.keys() else {},
        evalsets={name: evalset.content_hash for name, evalset in evalsets.items()},
    )


def _not_compared(
    config: Config, directory: RunDirectory, sizes: Sizes, evalsets: Mapping[str, EvalSet]
) -> Iterator[str]:
    """Warnings of what is not prepared yet, so that only `train` can compare it with the run's."""
    if sizes.tokenizer is None:
        own = directory.resolved()["tokenizer"]
        theirs = ", ".join(f"{key}: {value}" for key, value in own.items() if value is not None)
        yield (
            f"tokenizer: differs from the run's ({theirs}) and is not prepared yet; train will refuse it unless it "
            "gives the same ids"
        )
    unseen = []
    if sets := [name for name in config.eval_sources if name not in evalsets]:
        unseen.append(f"eval sets {', '.join(sets)}")
    if sources := [name for name in config.sources if name not in sizes.details]:
        unseen.append(f"sources {', '.join(sources)}")
    if unseen:
        yield (
            "not prepared yet, so it cannot be checked against the text that the run was trained or measured on: "
            f"{'; '.join(unseen)} ({prepare_command(config)})"
        )


def _measures(config: Config, schedule: Schedule, history: Mapping[str, Any], step: int) -> list[str]:
    """The eval sets that training measures at `step`, before the next update.

    These are new sets, and all that were not measured there if a phase now begins or the run now ends at `step`.
    """
    there = {name: memory["history_steps_H"][-1] for name, memory in history["watch"]["sets"].items()}
    if step == schedule.total_steps or history["phase"] != schedule.segment_at(step).phase:
        there = {name: last for name, last in there.items() if last == step}
    return [name for name in config.eval_sources if name not in there]
