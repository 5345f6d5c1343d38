"""Runs for comparisons: of one recipe under several seeds, branches of a trunk, and those that began with a base."""

import json
from datetime import datetime
from pathlib import Path

import numpy as np
from written_run import windows, write_run

from curriculum.run import load_run


def by_document(*losses: float):
    """Two windows, of 10 and 20 tokens, for each document of a loss of its own."""
    results = windows(0.0, len(losses))
    return results._replace(nats_N=results.tokens_N * np.repeat(losses, 2).astype(np.float64))


def only(comparison, name="val"):
    """The second of two runs on a set."""
    compared = next(c for c in comparison.sets if c.name == name)
    assert len(compared.runs) == 2
    return compared.runs[1]


def recipe_runs(folder, losses):
    """Runs of recipes, {name: [the loss under seed 0, 1, ...]}; they differ in their learning rates."""
    runs = []
    for i, (name, of_seeds) in enumerate(losses.items()):
        for seed, loss in enumerate(of_seeds):
            run = write_run(folder / f"{name}-seed{seed}", {"val": lambda _, loss=loss: by_document(*[loss] * 25)})
            change_config(run, seed=seed, optim={"lr": (1 + i) * 1e-4})
            runs.append(run)
    return runs


def change_config(run, **changes):
    """Change a resolved config: a section's keys, or a value."""
    path = run / "config.resolved.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))


def cut_otherwise(nats_D, bytes_D, texts_D, windows_D):
    """The windows of documents with these sums, each cut into a number of equal windows."""
    document_N = np.repeat(np.arange(len(nats_D)), windows_D)
    each = np.repeat(windows_D, windows_D)
    nats_N, bytes_N = np.repeat(nats_D, windows_D) / each, np.repeat(bytes_D, windows_D) // each
    return windows(3.0)._replace(
        nats_N=nats_N,
        correct_N=np.ones(len(nats_N), int),
        tokens_N=np.full(len(nats_N), 10),
        bytes_N=bytes_N,
        document_N=document_N,
        text_N=np.repeat(texts_D, windows_D).astype(np.uint64),
    )


def branch(trunk: Path, path: Path, at: int, losses) -> Path:
    """A run that shares the trunk's record up to step `at`, as `curriculum branch` makes it."""
    point = {"run": "elsewhere", "step": at, "id": path.name, "branched_from": load_run(trunk).branched_from}
    write_run(path, losses, branched_from=point)
    kept = [line for line in (trunk / "events.jsonl").read_text().splitlines() if json.loads(line)["step"] <= at]
    kept = [line for line in kept if json.loads(line)["event"] != "training_complete"]
    own = [line for line in (path / "events.jsonl").read_text().splitlines() if json.loads(line)["step"] > at]
    assert len(kept) > 2 and own
    (path / "events.jsonl").write_text("\n".join([*kept, *own]) + "\n")
    return path


def lineage(init_from, step, before=None, run="written"):
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    return {
        "init_from": init_from, "run": run, "started_at": started_at, "step": step, "keep_optimizer": False,
        "lineage": before,
    }  # fmt: skip


def begun(path, init_from, step, before=None, loss=2.0, books=None, **rest):
    losses = {"val": lambda s: loss + s / 1000} | ({} if books is None else {"books": lambda s: books})
    return write_run(path, losses, start={"lineage": lineage(init_from, step, before)}, **rest)
