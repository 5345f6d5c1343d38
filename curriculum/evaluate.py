"""Measure a checkpoint later, on the run's eval sets and on new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.config import Config, changed_config
from curriculum.data.config_stores import place_of
from curriculum.data.corpus import find_trained_on, load_evalsets
from curriculum.data.corpus_warnings import size_warnings
from curriculum.data.documents import file_warnings
from curriculum.data.progress import WINDOWS, ConsoleProgress
from curriculum.errors import InputError, check_several, no_such, no_such_path
from curriculum.parsing.options import named_directories
from curriculum.plan_warnings import evalset_warnings, read_before
from curriculum.record.events import config_name, record_name
from curriculum.record.wording import listed
from curriculum.run import DEFAULT_STORE_DIR, load_run
from curriculum.run_directory import RunDirectory, telling_where_started
from curriculum.saved_weights import chosen_again, find_saved
from curriculum.schema.adaptation import PastRun, past_runs
from evalsets.evalset import EvalSet
from evalsets.metrics import WindowResults, summarise
from evalsets.summary import Summary

if TYPE_CHECKING:
    from curriculum.data.tokenizers.tokenizer import Tokenizer
    from curriculum.model.model import Model


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint scored on eval sets, by the set's name; the primary set is `val`."""

    run: str
    step: int
    weights: str
    summaries: dict[str, Summary]
    results: dict[str, WindowResults]
    evalsets: dict[str, EvalSet]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All but the results by window, as plain data."""
        sets = {
            name: {
                **asdict(summary),
                "windows": self.evalsets[name].num_windows,
                "documents": self.evalsets[name].num_documents,
                "tokens": self.evalsets[name].num_tokens,
                "bytes": self.evalsets[name].num_bytes,
                "content_hash": self.evalsets[name].content_hash,
            }
            for name, summary in self.summaries.items()
        }
        found = {"run": self.run, "step": self.step, "weights": self.weights, "sets": sets}
        return {**found, "warnings": list(self.warnings)}


@chosen_again
def evaluate(
    run: str | os.PathLike,
    *,
    step: str | int | None = None,
    weights: str = "raw",
    eval_dataset_dirs: Iterable[str] | Mapping[str, str | os.PathLike] = (),
    overrides: Iterable[str] = (),
    sets: Iterable[str] | None = None,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> Evaluation:
    """Measure a checkpoint on eval sets, with the function, the windows and the micro-batches of training.

    So on the same devices the sums of every window equal those in `evals/<step>.npz` bit for bit. If the run's mesh
    does not fit the devices here, all of them become the data axis, and a warning says so.

    `step` and `weights` are as for `export`. `eval_dataset_dirs` are new sets, as for `load_config`; `overrides` give
    their other fields, as in `evalsets.sets.NAME.format=messages`. Beside them `sets` are measured, names of the run's,
    by default all of them. `make_model` is the one that the run was trained with, if any.

    Nothing is written into the run. A new set needs neither the run's sources nor its phases; a set that is held out
    of a source needs the source's text. Raises InputError if a set is not the one that the run measured under its
    name, or if something needed is missing.
    """
    check_several("sets", sets)
    check_several("overrides", overrides)
    new = named_directories("--eval-dataset-dir", eval_dataset_dirs or ())
    own = load_run(run).config
    config = _with_sets(own, new, overrides)
    names = _names(config, sets, new)
    texts = {name: text for name in new if (text := config.eval_sources[name].own_source()) is not None}
    if missing := {name: Path(text.path) for name, text in texts.items() if text.is_missing}:
        raise config.error([(place_of(name), no_such_path(path)) for name, path in missing.items()])
    saved = find_saved(run, own, step, weights, make_model, "evaluate")
    evalsets = {}
    for origin, some in ((own, [n for n in names if n not in new]), (config, [n for n in names if n in new])):
        with telling_where_started(RunDirectory(Path(run))):
            evalsets |= load_evalsets(origin, store_dir, saved.tokenizer, some)
        _check_content(origin, evalsets, saved.ledger["history"]["eval_sets"])
    evalsets = {name: evalsets[name] for name in names}
    streams = {name: source["stream"] for name, source in saved.ledger["sources"].items() if source["tokens_drawn"]}
    found, unknown = find_trained_on(config, texts, own, streams, store_dir, saved.tokenizer) if texts else ({}, [])

    # Slow imports, after all checks that do without them.
    from curriculum.train.compiled import make_suite
    from curriculum.train.device import own_settings
    from curriculum.train.trained import load_trained

    with own_settings():
        trained = load_trained(saved, store_dir)
        suite = make_suite(config, trained.mesh, trained.model, evalsets.values())
        progress = ConsoleProgress(f"measuring step {saved.step:,}", unit=WINDOWS)
        results = suite.run(trained.params, progress=progress)
    warnings = []
    if trained.unfit_mesh is not None:
        how = f"measured with mesh.data {trained.mesh.size}; sums may differ from training's in the last digits"
        warnings.append(f"{trained.unfit_mesh}: {how}")
    for name in texts:
        counts = found[name][1] | dict.fromkeys(unknown)
        warnings += [_read_warning(evalsets[name], source, count, own) for source, count in counts.items()]
    past = past_runs(saved.ledger["lineage"], Path(run)) if texts else []
    warnings += _read_before(past, config, {name: evalsets[name] for name in texts}, store_dir, saved.tokenizer)
    warnings += file_warnings({f"eval set {name}": text for name, text in texts.items()})
    warnings += size_warnings(config, {name: evalset for name, evalset in evalsets.items() if name in new})
    warnings += evalset_warnings(evalsets.values())
    return Evaluation(
        run=str(run),
        step=saved.step,
        weights=weights,
        summaries={record_name(name): summarise(result) for name, result in results.items()},
        results={record_name(name): result for name, result in results.items()},
        evalsets={record_name(name): evalset for name, evalset in evalsets.items()},
        warnings=tuple(warnings),
    )


def _read_warning(evalset: EvalSet, source: str, count: int | None, config: Config) -> str:
    """The warning that `count` of the documents of a set are in a source that the run read; None if that is unknown."""
    where = f"also occur in source {source}, which the run was trained on"
    if count is not None:
        return f"{count:,} of {evalset.num_documents:,} documents of {evalset.name} {where}"
    changed = "its text or the run's eval sets have changed since, or are not prepared here"
    why = changed if source in config.sources else "the config no longer has it"
    return f"unknown how many documents of {evalset.name} {where}: {why}"


def _read_before(
    runs: Iterable[PastRun],
    config: Config,
    evalsets: Mapping[str, EvalSet],
    store_dir: str | Path,
    tokenizer: Tokenizer,
) -> Iterator[str]:
    for past in runs:
        found, unknown = read_before(past, config, evalsets, store_dir, tokenizer)
        told = f"{past.name}, where the model comes from, was trained on"
        for name, (num_documents, counts) in found.items():
            for source, count in counts.items():
                yield f"{count:,} of {num_documents:,} documents of {name} also occur in source {source}, which {told}"
        if unknown is not None:
            yield f"unknown how many documents of {listed(list(evalsets))} {told}: {unknown}"


def _with_sets(config: Config, new: Mapping[str, str], overrides: Iterable[str]) -> Config:
    """The config with the new eval sets. Raises InputError if one is invalid, or an override is of anything else."""
    overrides = list(overrides)
    for override in overrides:
        if not override.lstrip().startswith(tuple(f"evalsets.sets.{name}." for name in new)):
            expected = "expected evalsets.sets.NAME.KEY=VALUE of a new set, which --eval-dataset-dir gives"
            raise InputError(f"--set {override}: {expected} (new sets: {', '.join(new) or 'none'})")
    return changed_config(config, overrides, eval_dataset_dirs=new, check_paths=False)


def _names(config: Config, sets: Iterable[str] | None, new: Iterable[str]) -> list[str]:
    """The names in the config of `sets`, by default all, and of the `new` ones; `val` may stand for the primary set."""
    if sets is None:
        return list(config.eval_sources)
    known = [record_name(name) for name in config.eval_sources]
    names = list(dict.fromkeys(record_name(name) for name in [*sets, *new]))
    for name in names:
        if name not in known:
            raise InputError(f"--sets {name}: {no_such('eval set', name, known)}")
    if not names:
        raise InputError(f"--sets: got none, expected names of eval sets ({', '.join(known)})")
    return [config_name(name) for name in names]


def _check_content(config: Config, evalsets: Mapping[str, EvalSet], measured: Mapping[str, str]) -> None:
    """Raise InputError for each set whose content is not what the run measured under its name."""
    changed = [
        name for name, evalset in evalsets.items() if measured.get(name, evalset.content_hash) != evalset.content_hash
    ]
    message = "is not the set that the run measured under this name; restore it, or measure it under another name"
    if changed:
        raise config.error((place_of(name), message) for name in changed)
