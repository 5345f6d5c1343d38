"""Whole runs on an NVIDIA card: JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_nvidia.py; skipped without one."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from curriculum.model.formulation import backend

pytestmark = pytest.mark.skipif(backend() != "gpu", reason="needs an NVIDIA GPU")

WORDS = "a model reads the text of every source again until its loss no longer falls by much".split()
CONFIG = {
    "name": "card",
    "tokenizer": {"kind": "char"},
    "model": {
        "n_layer": 2,
        "n_head": 4,
        "n_kv_head": 2,
        "d_model": 256,
        "d_ff": 512,
        "max_seq_len": 128,
        "dropout": 0.1,
    },
    "sources": {"text": {"path": "text", "held_out": "5%"}, "other": {"path": "other", "held_out": "5%"}},
    "packing": {"document_mask": True},
    "phases": [
        {"name": "short", "until": 20, "mixture": {"text": 1}, "seq_len": 64},
        {"name": "long", "until": "end", "mixture": {"text": 0.5, "other": 0.5}, "batch_size": 4},
    ],
    "evalsets": {"every": 10, "primary": {"held_out_of": "text"}, "sets": {"other": {"held_out_of": "other"}}},
    "train": {"steps": 40, "batch_size": 8, "seq_len": 128, "deterministic": True},
    "optim": {"lr": 1e-3, "warmup_steps": 5},
    "checkpoint": {"every": 10, "keep": 10},
    "logging": {"every": 5, "tensorboard": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("card"), np.random.default_rng(0)
    for name, num_words in (("text", 40), ("other", 15)):
        (folder / name).mkdir()
        for number in range(100):
            (folder / name / f"{number:03}.txt").write_text(" ".join(rng.choice(WORDS, num_words)))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def train(folder, name, *options, platforms=None):
    """Rows and evals of the run in a process of its own, as a user starts it."""
    environment = os.environ | {"XLA_FLAGS": ""} | ({"JAX_PLATFORMS": platforms} if platforms else {})
    command = [sys.executable, "-m", "curriculum", "train", "config.json", "--run-dir", name, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("NVIDIA" in done.stdout) == (platforms is None)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def told(rows, *columns):
    """The columns that do not speak of time or memory."""
    columns = columns or [
        name for name in rows[0] if not any(part in name for part in ("time", "memory", "per_sec", "wait", "stall"))
    ]
    return [[row.get(name) for name in columns] for row in rows]


BFLOAT16 = ("--set", "model.compute_dtype=bfloat16")


@pytest.mark.parametrize("options", [BFLOAT16, ()], ids=["bfloat16", "float32"])
def test_a_deterministic_run_that_goes_on_from_a_checkpoint_has_the_same_bits(folder, tmp_path, options):
    rows = train(folder, tmp_path / "whole", *options)
    assert told(train(folder, tmp_path / "again", *options)) == told(rows)
    for step in ("10", "30"):
        shutil.copytree(tmp_path / "whole", tmp_path / step)
        assert told(train(folder, tmp_path / step, "--resume", step)) == told(rows)


@pytest.mark.parametrize(
    ("options", "most"),
    [((), 1e-3), ((*BFLOAT16, "--set", "train.deterministic=null"), 0.03)],
    ids=["float32", "cuDNN"],
)
def test_a_card_trains_on_the_same_data_to_the_same_losses_as_a_cpu(folder, tmp_path, options, most):
    rows = train(folder, tmp_path / "card", "--set", "model.dropout=0", *options)
    others = train(folder, tmp_path / "cpu", "--set", "model.dropout=0", platforms="cpu")
    data = [name for name in rows[0] if "tokens" in name and "per_sec" not in name]
    assert data and told(rows, *data) == told(others, *data)
    np.testing.assert_allclose(told(rows, "loss"), told(others, "loss"), atol=most)
