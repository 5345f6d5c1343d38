"""A run of 12 steps that takes as little time as a run can: what tests of resume, damage and full disks start from."""

import json
import math
import os
import signal
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import numpy as np
from compared_runs import record, saved_arrays

from curriculum.config import build_config
from curriculum.train import divergence
from curriculum.train.trainer import train
from evalsets.suite import Suite

WORDS = {"web": "the quick brown fox jumps over a lazy dog", "law": "whereas the party of first part shall"}


def write_corpus(folder: Path, words: Mapping[str, str] = WORDS, num: int = 60, low: int = 20, high: int = 60) -> Path:
    """A source a list of words: `num` documents of `low` to `high` of them."""
    rng = np.random.default_rng(0)
    for name, of_source in words.items():
        texts = [" ".join(rng.choice(of_source.split(), int(rng.integers(low, high)))) for _ in range(num)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def tiny_data(corpus: Path, **sections) -> dict:
    """Evals at 0, 3, 6, 9, 12, checkpoints every 2 steps, a phase switch at 6; every eval is a new gold."""
    return {
        "name": "tiny",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 1, "n_kv_head": 1, "d_ff": 24},
        "sources": {name: {"path": str(corpus / f"{name}.jsonl"), "held_out": "20%"} for name in WORDS},
        "phases": [
            {"name": "a", "until": 6, "mixture": {"web": 1.0}},
            {"name": "b", "until": "end", "mixture": {"law": 1.0}},
        ],
        "evalsets": {"every": 3, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}},
        "train": {"steps": 12, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 3e-3, "warmup_steps": 2, "decay_steps": 2},
        "checkpoint": {"every": 2, "keep": 3},
        "logging": {"every": 1, "tensorboard": False},
    } | sections


def with_changes(data: dict, changes: Mapping) -> dict:
    """The data of a config changed by `section__key` or whole sections."""
    for name, value in changes.items():
        section, _, key = name.partition("__")
        data[section] = {**data[section], key: value} if key else value
    return data


def tiny_train(place: Path, run_dir: Path, resume=None, **sections) -> dict:
    """Train it in `run_dir`; `place` holds the corpus and the token stores."""
    return train(build_config(tiny_data(place, **sections)), run_dir, resume=resume, store_dir=place / "store")


def last_state(run_dir: Path) -> dict[str, bytes]:
    """Every array of the checkpoint of step 12."""
    return saved_arrays(run_dir / "checkpoints/12", ("params", "train", "baselines"))


def assert_same_run(run_dir: Path, other: Path, golds: bool = True) -> None:
    """Bit for bit; without `golds`: but for the checkpoints that were saved on the way, and the gold before a gold."""
    assert last_state(run_dir) == last_state(other)
    (events, metrics), (expected_events, expected_metrics) = (
        record(path, without=("resume", "checkpoint_failed")) for path in (run_dir, other)
    )
    if not golds:
        without = ("previous", "previous_step")
        events, expected_events = (
            [{k: v for k, v in e.items() if k not in without} for e in some if e["event"] != "checkpoint"]
            for some in (events, expected_events)
        )
    assert events == expected_events and metrics == expected_metrics
    for step in (0, 3, 6, 9, 12):
        with np.load(run_dir / f"evals/{step}.npz") as mine, np.load(other / f"evals/{step}.npz") as its:
            assert mine.files and mine.files == its.files
            assert all(np.array_equal(mine[name], its[name]) for name in mine.files)


def flip_bit(path: Path, byte: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= 4
    path.write_bytes(content)


def diverges(monkeypatch, *bad: tuple[int, int], good=divergence._newest) -> list:
    """Divergences that runs find one after the other, as (step that finds it, first bad update); the list of the found.

    `good` gives the checkpoint to go back to.
    """
    find, found = divergence._find, []

    def finds(run, done, whole_state):
        if len(found) == len(bad) or done != bad[len(found)][0]:
            return find(run, done, whole_state)
        run.settle(done)
        first = bad[len(found)][1]
        found.append(divergence._Divergence("planted", first, good(run.directory, first), first))
        return found[-1]

    monkeypatch.setattr(divergence, "_find", finds)
    return found


def worse_from(monkeypatch, first: int, factor: float = 3.0, num_evals: float = math.inf) -> None:
    """Multiply the nats that `num_evals` evals measure by `factor`, from number `first` on; the next is number 0."""
    measured, evals = Suite.run, count()

    def run(self, params, names=None, **how):
        scale = factor if first <= next(evals) < first + num_evals else 1.0
        return {name: r._replace(nats_N=scale * r.nats_N) for name, r in measured(self, params, names, **how).items()}

    monkeypatch.setattr(Suite, "run", run)


def signalled(patch, *passes, then=lambda: None):
    """SIGTERM at the second micro-batch of these calls of `Suite.run`; the first of a process is number 0.

    `then` is called as often as the suite goes on to a micro-batch after the signal.
    """
    measured, calls = Suite.run, count()

    def run(self, params, names=None, **how):
        if next(calls) not in passes:
            return measured(self, params, names, **how)
        whole, batches = self._sum_windows, count()

        def summed(*arrays):
            i = next(batches)
            if i == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            elif i > 1:
                then()
            return whole(*arrays)

        self._sum_windows = summed
        try:
            return measured(self, params, names, **how)
        finally:
            self._sum_windows = whole

    patch.setattr(Suite, "run", run)
