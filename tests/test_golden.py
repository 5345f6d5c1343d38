"""A small run against its recorded course: no change to the computation means the same losses.

python tests/test_golden.py      records it anew, after a change that is meant to change it
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from curriculum.config import build_config
from curriculum.run import load_run
from curriculum.train.setup import build
from curriculum.train.trainer import train

GOLDEN = Path(__file__).parent / "golden/three_phases.json"
STEPS = 24


def write_text(folder: Path) -> None:
    """Three sources of 40 documents each from a congruential generator, the same with every version of everything."""
    state = 1
    for name, words in (("web", "the cat sat on a mat"), ("code", "if x : y = x + 1"), ("law", "the party shall pay")):
        rows = []
        for _ in range(40):
            picked = []
            for _ in range(60):
                state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
                picked.append(words.split()[(state >> 33) % len(words.split())])
            rows.append(json.dumps({"text": " ".join(picked)}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def config_data(folder: Path) -> dict:
    return {
        "tokenizer": {"kind": "byte"},
        "model": {
            "preset": "tiny",
            "n_layer": 2,
            "d_model": 32,
            "n_head": 4,
            "n_kv_head": 2,
            "d_ff": 48,
            "dropout": 0.1,
        },
        "sources": {n: {"path": str(folder / f"{n}.jsonl"), "held_out": "10%"} for n in ("web", "code", "law")},
        "phases": [
            {"name": "foundation", "until": 10, "mixture": {"web": 0.7, "code": 0.3}},
            {"name": "bridge", "until": "75%", "mixture": {"web": 0.3, "code": 0.2, "law": 0.5}, "ramp_steps": 5},
            {"name": "domain", "until": "end", "mixture": {"law": 0.9, "web": 0.1}, "lr": {"decay_steps": 4}},
        ],
        "evalsets": {"every": 8, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}},
        "train": {"steps": STEPS, "batch_size": 8, "seq_len": 64, "grad_accum": 2},
        "optim": {"lr": 1e-2, "warmup_steps": 4, "decay_steps": 6},
        "averages": {"ema_decay": 0.9},
        "checkpoint": {"every": STEPS},
        "logging": {"every": 2, "tensorboard": False},
    }


def course(folder: Path) -> dict:
    """What the run read, as hashes of its batches, and what it lost."""
    write_text(folder)
    config = build_config(config_data(folder))
    setup = build(config, folder / "store")
    try:
        batches = [
            hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in setup.course.feed[step]))
            for step in range(STEPS)
        ]
    finally:
        setup.course.feed.close()
    train(config, folder / "run", store_dir=folder / "store")
    run = load_run(folder / "run")
    return {
        "batches": [batch.hexdigest()[:16] for batch in batches],
        "train_loss": [row["loss"] for row in run.metrics],
        "web": run.evals(),
        "law": run.evals("law"),
        "law_ema": [[e["step"], e["ema"]["eval_law"]] for e in run.events if "ema" in e],
    }


def test_the_course_of_a_run_is_the_recorded_one(tmp_path):
    found, golden = json.loads(json.dumps(course(tmp_path))), json.loads(GOLDEN.read_text())
    meant = f"where the change is meant: python {Path(__file__).name} in tests/ records {GOLDEN.name} anew"
    assert found["batches"] == golden["batches"] and len(set(golden["batches"])) == STEPS, f"other data; {meant}"
    # Sums in another order, on another processor or with another version, over 24 steps at a high rate.
    assert found["train_loss"] == pytest.approx(golden["train_loss"], rel=1e-3), f"another training loss; {meant}"
    for name in ("web", "law", "law_ema"):
        assert [step for step, _ in found[name]] == [step for step, _ in golden[name]]
        losses, recorded = ([loss for _, loss in pairs] for pairs in (found[name], golden[name]))
        assert losses == pytest.approx(recorded, rel=1e-3), f"another loss of {name}; {meant}"
    assert golden["train_loss"][-1] < 0.6 * golden["train_loss"][0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded = course(Path(folder))
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"recorded {GOLDEN}", file=sys.stderr)
