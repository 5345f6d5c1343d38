"""Thirty runs of kill -9, and that what compares them would see a difference."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kill_and_resume as kills
import numpy as np
import pytest

from curriculum.run_directory import read_arrays

TOOL = Path(__file__).resolve().parents[1] / "tools/kill_and_resume.py"

pytestmark = pytest.mark.slow


def kill_runs(folder, *options):
    command = [sys.executable, str(TOOL), "--directory", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of 30 kills, and what the tool printed."""
    folder = tmp_path_factory.mktemp("kills") / "runs"
    return folder, kill_runs(folder, "--kills", "30")


@pytest.fixture(scope="module")
def whole(killed):
    """All that the undisturbed run holds."""
    found = kills.everything(killed[0] / "whole")
    assert len(found) > 1000 and kills.differences(found, found) == []
    return found


def test_thirty_kills_leave_the_run_as_it_would_have_been(killed):
    folder, printed = killed
    assert re.search(
        r"^30 kills of \d+ runs, with the compile cache, .* all equal to the undisturbed run$", printed, re.M
    )
    hit = dict(re.findall(r"^\| ([a-z].*) \| (\d+) \|$", printed, re.M))
    assert len(hit) >= 6 and {"saving", "evaluating", "preparing"} <= set(hit), printed
    cut = list(kills.superseded_lines(folder / "killed_1"))
    assert cut and not set(cut) & set(kills.record_lines(folder / "killed_1"))


def rewrite(path, change):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(lines)))


def change_an_eval(run):
    arrays = read_arrays(run / "evals/20.npz")
    arrays["law.nats"] = np.nextafter(arrays["law.nats"], np.float32(np.inf))
    np.savez_compressed(run / "evals/20.npz", **arrays)


def change_a_row(run):
    changed = {"loss": 1.0}
    rewrite(
        run / "metrics.jsonl", lambda lines: [*lines[:3], json.dumps(json.loads(lines[3]) | changed) + "\n", *lines[4:]]
    )


def take_an_older_checkpoint(run):
    shutil.rmtree(run / f"checkpoints/{kills.STEPS}/params")
    before = run / f"checkpoints/{kills.STEPS - kills.CHECKPOINT_EVERY}/params"
    shutil.copytree(before, run / f"checkpoints/{kills.STEPS}/params")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (change_an_eval, "evals/20.npz law.nats"),
        (lambda run: (run / "evals/20.npz").unlink(), "evals/20.npz primary.nats: missing"),
        (change_a_row, "metrics.jsonl, line 3 (row of step 8)/loss: 1.0, undisturbed "),
        (lambda run: rewrite(run / "events.jsonl", lambda lines: lines[:-2] + lines[-1:]), "events.jsonl, line "),
        (take_an_older_checkpoint, f"checkpoints/{kills.STEPS}/params/"),
        (lambda run: shutil.rmtree(run / "tensorboard/law"), "tensorboard law eval_sets/loss: missing"),
    ],
)  # fmt: skip
def test_a_difference_is_told(killed, whole, tmp_path, change, place):
    changed = tmp_path / "run"
    shutil.copytree(killed[0] / "whole", changed)
    change(changed)
    problems = kills.differences(whole, kills.everything(changed))
    assert any(place in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda run: rewrite(run / "metrics.jsonl", lambda lines: [*lines, lines[-1]]), "a step twice, or out of order"),
        (lambda run: rewrite(run / "events.jsonl", lambda lines: [*lines[:2], *lines[1:]]), "eval of step 0 2 times"),
        (lambda run: rewrite(run / "events.jsonl", lambda lines: lines[:-1]), "begins with training_start and ends with"),
        (lambda run: rewrite(run / "superseded.jsonl", lambda lines: [*lines, lines[-1]]), "1 lines twice"),
        (lambda run: rewrite(run / "superseded.jsonl", lambda lines: lines[:-1]), "neither in the record nor in"),
        (lambda run: (run / "checkpoints/.5.saving").mkdir(), "left over: "),
    ],
)  # fmt: skip
def test_what_is_double_lost_or_left_over_is_told(killed, tmp_path, change, problem):
    folder, _ = killed
    run, store = tmp_path / "run", folder / "store"
    shutil.copytree(folder / "killed_1", run)
    seen = {*kills.record_lines(run), *kills.superseded_lines(run)}
    assert kills.unsound(run, store, seen) == []
    change(run)
    assert problem in "\n".join(kills.unsound(run, store, seen))
