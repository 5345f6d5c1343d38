"""The README's recipes "To extend": in a copy of the source with just these lines added, all views know the new thing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from compared_runs import saved_arrays
from tiny_run import tiny_data, tiny_train, write_corpus

from curriculum.record.events import read_events

ROOT = Path(__file__).parent.parent

# An eval metric: the share of tokens that have at least a probability of exp(-4.8).
METRIC = {
    "evalsets/summary.py": [
        (
            '    bpb: float | None = _metric("bpb")\n',
            '    bpb: float | None = _metric("bpb")\n    sure: float | None = _metric("sure", ".1%", default=None)\n',
        ),
    ],
    "evalsets/metrics.py": [
        (
            "    text_N: np.ndarray | None = None\n",
            "    text_N: np.ndarray | None = None\n    sure_N: np.ndarray | None = None\n",
        ),
        (
            "        loss=loss,\n",
            "        loss=loss,\n        sure=None if results.sure_N is None else int(results.sure_N.sum()) / tokens,\n",
        ),
    ],
    "curriculum/model/loss.py": [('return {"nats": nats_BT, ', 'return {"nats": nats_BT, "sure": nats_BT <= 4.8, ')],
}

# An attribute of a phase that no data depend on: a factor of each update's learning rate.
ATTRIBUTE = {
    "phases/schedule.py": [
        (
            '    """Base of rope in this phase, such as a larger one for long sequences; by default the model\'s."""\n',
            '    """Base of rope in this phase, such as a larger one for long sequences; by default the model\'s."""\n'
            '    pace: float = 1.0\n    """Multiplies the learning rate of each update."""\n',
        ),
        ('"lr_scale": 1.0}\n', '"lr_scale": 1.0, "pace": 1.0}\n'),
        ("    lr_scale: float = 1.0\n", "    lr_scale: float = 1.0\n    pace: float = 1.0\n"),
    ],
    "curriculum/train/course.py": [
        ("np.float32(self.rates[step])", "np.float32(self.rates[step] * self.schedule.segment_at(step).pace)")
    ],
}

CHECKPOINT = {"every": 2, "keep": 6}

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path):
    """A run of the source as it is, in a folder with its corpus and store."""
    tiny_train(write_corpus(tmp_path), tmp_path / "run", checkpoint=CHECKPOINT)
    return tmp_path / "run"


def extended(place, changes):
    """A command of the source with these changes made, run in `place`; it gives what the command printed."""
    tree = place / "tree"
    for package in ("curriculum", "phases", "evalsets"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in changes.items():
        text = (tree / name).read_text()
        for before, after in pairs:
            assert before in text, (name, before)
            text = text.replace(before, after)
        (tree / name).write_text(text)

    def command(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        program = [sys.executable, "-m", "curriculum", *arguments]
        done = subprocess.run(program, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return command


def parameters(run_dir, step):
    saved = saved_arrays(run_dir / f"checkpoints/{step}")
    return {name: array for name, array in saved.items() if name.startswith("params/")}


def declared(place, **phase_b):
    data = tiny_data(place, checkpoint=CHECKPOINT, logging={"every": 1})
    data["phases"][1] |= phase_b
    (place / "tiny.yaml").write_text(yaml.safe_dump(data))
    return "tiny.yaml"


def test_an_eval_metric(run_dir):
    place = run_dir.parent
    curriculum = extended(place, METRIC)
    curriculum("train", declared(place), "--run-dir", "run", "--resume", "6", "--store-dir", "store")
    evals = {event["step"]: event for event in read_events(run_dir) if event["event"] == "eval"}
    assert list(evals) == [0, 3, 6, 9, 12]
    for name, key in (("primary", "val_sure"), ("law", "eval_law_sure")):
        with np.load(run_dir / "evals/12.npz") as arrays:
            share = arrays[f"{name}.sure"].sum() / arrays[f"{name}.tokens"].sum()
        assert 0 < share < 1 and evals[12][key] == round(share, 6)
        assert key not in evals[3]

    measured = json.loads(curriculum("eval", "run", "--step", "12", "--store-dir", "store", "--json"))["sets"]
    assert {round(measured[name]["sure"], 6) for name in ("val", "law")} == {
        evals[12][key] for key in ("val_sure", "eval_law_sure")
    }
    shown = f"{evals[12]['val_sure']:.1%}"
    curriculum("report", "run", "-o", "page.html")
    page = (place / "page.html").read_text()
    assert ">sure</th>" in page and shown in page
    for said in (
        curriculum("inspect", "run"),
        curriculum("compare", "run", "run"),
        curriculum("eval", "run", "--step", "12", "--store-dir", "store"),
    ):
        lines = said.splitlines()
        at = next(i for i, line in enumerate(lines) if "± sem" in line)
        titles = lines[at]
        end = titles.index("sure") + len("sure")
        [val] = [line for line in lines[at + 1 : at + 4] if line.split()[0] == "val"]
        assert val[:end].endswith(f" {shown}"), said
    drawn = [path.read_bytes() for path in (run_dir / "tensorboard").rglob("events.*")]
    assert any(b"eval/val/sure" in events for events in drawn) and any(b"eval_sets/sure" in events for events in drawn)


def test_an_attribute_of_a_phase(run_dir):
    place = run_dir.parent
    before = parameters(run_dir, 12)
    curriculum = extended(place, ATTRIBUTE)
    going_on = (declared(place, pace=0.0), "--run-dir", "run", "--resume", "4", "--store-dir", "store")
    planned = curriculum("plan", *going_on)
    row = next(line for line in planned.splitlines() if line.startswith("b ") and "x 32" in line)
    assert row.split()[-1] == "0", planned
    curriculum("train", *going_on)
    [switch] = [event for event in read_events(run_dir) if event["event"] == "phase_switch"]
    assert (switch["shape_before"]["pace"], switch["shape_after"]["pace"]) == (1.0, 0.0)
    [edit] = [event for event in read_events(run_dir) if event["event"] == "schedule_edit"]
    assert [(change["path"], change["now"]) for change in edit["changes"]] == [("phases.b.pace", 0.0)]
    rates = [row["lr"] for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]
    assert min(rates) > 0  # those of the schedule
    assert parameters(run_dir, 12) == parameters(run_dir, 6) != before
