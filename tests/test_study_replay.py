"""The table of the replay study, from runs made by hand."""

import json
import math

import numpy as np
import pytest
import study_replay as study

from curriculum.record.windows import write_results
from evalsets.metrics import WindowResults


def make_run(folder, rises):
    """3 documents of one window of 10, 10 and 20 tokens; nats rise by `rises` of general, half that of code."""
    (folder / "evals").mkdir(parents=True)
    (folder / "checkpoints/8/ledger").mkdir(parents=True)
    drawn = {"docs": 5, "python": 7, "cpp": 88}
    ledger = {"sources": {name: {"tokens_drawn": tokens} for name, tokens in drawn.items()}}
    (folder / "checkpoints/8/ledger/metadata").write_text(json.dumps(ledger))
    config = {
        "name": "run",
        "tokenizer": {"kind": "byte"},
        "model": None,
        "sources": {"cpp": {"path": "x"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"cpp": 1}}],
        "evalsets": {"primary": {"path": "y"}},
        "train": {"steps": 8},
        "optim": {"lr": 1e-3},
        "adaptation": {},
        "command_line": [],
        "derived": {},
    }
    (folder / "config.resolved.json").write_text(json.dumps(config))
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_text("")
    for step, times in ((0, 0.0), (8, 1.0)):
        results = {}
        for name, scale in (("general", 1.0), ("domain", -1.0), ("code", 0.5)):
            nats = np.array([20.0, 30.0, 50.0]) + times * scale * np.array(rises)
            results[name] = WindowResults(nats, np.zeros(3), np.array([10, 10, 20]), np.zeros(3), np.arange(3))
        write_results(folder / f"evals/{step}.npz", results, {})


def test_the_table_by_hand(tmp_path):
    """General: 100 nats of 40 tokens, then 20 more: 2.5, 3.0, +0.5; deviations 10 - 5, 0 - 5, 10 - 10 of the rises."""
    make_run(tmp_path / "none", [10.0, 0.0, 10.0])
    make_run(tmp_path / "some", [4.0, 0.0, 4.0])
    replay = {"docs": 0.05, "python": 0.05}
    results = [
        {"replay": 0, **study.measure(tmp_path / "none", 8, {})},
        {"replay": 0.1, **study.measure(tmp_path / "some", 8, replay)},
    ]
    general = results[0]["sets"]["general"]
    half = 4.302653 * math.sqrt(3 / 2 * (5**2 + 5**2)) / 40  # Student's quantile with 2 degrees of freedom
    interval = (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert general == {"base": 2.5, "loss": 3.0, "change": 0.5, "interval": interval}
    assert [result["replay_given"] for result in results] == [0, 0.12] and results[0]["lr"] == 1e-3
    study.add_removed(results)
    assert results[1]["sets"]["general"]["removed"] == results[1]["sets"]["code"]["removed"] == pytest.approx(0.6)
    assert study.table(results) == [
        "| replay | general | domain | code |",
        "|---:|---:|---:|---:|",
        "| base | 2.500 | 2.500 | 2.500 |",
        "| 0% | 3.000 (+0.500 ± 0.932) | 2.000 (-0.500 ± 0.932) | 2.750 (+0.250 ± 0.466) |",
        "| 10% | 2.700 (+0.200 ± 0.373) | 2.300 (-0.200 ± 0.373) | 2.600 (+0.100 ± 0.186) |",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replay", "0", "1"], "--replay: expected different shares of at least 0 and below 1"),
        (["--replay", "0.1", "0.1"], "--replay: expected different shares"),
        (["--json", "nowhere/x.json"], "argument --json: nowhere/x.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_studied_is_told(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        study.main(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err
