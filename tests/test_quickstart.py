"""The quickstart, as `make quickstart` trains it: what a newcomer sees has to be so."""

import subprocess
import sys
from pathlib import Path

import pytest

from curriculum.config import load_config
from curriculum.run import load_run
from curriculum.train.trainer import train

ROOT = Path(__file__).parents[1]


@pytest.mark.quickstart
def test_the_quickstart_is_told_that_it_forgets_and_that_it_recovers(tmp_path):
    corpus = tmp_path / "corpus"
    tool = ROOT / "tools/build_quickstart_corpus.py"
    subprocess.run([sys.executable, str(tool), "--output", str(corpus)], check=True, capture_output=True)
    paths = [f"sources.{name}.path={corpus / name}" for name in ("docs", "python", "cpp")]
    run_dir = tmp_path / "run"
    train(load_config(ROOT / "configs/quickstart.yaml", paths), run_dir, store_dir=tmp_path / "store")

    run = load_run(run_dir)
    (_, bridge_end, adaptation_end) = (phase["end"] for phase in run.plan["phases"][:3])
    losses = dict(run.evals("general"))
    assert losses[adaptation_end] > losses[bridge_end] + 0.3 and losses[run.complete["step"]] < losses[bridge_end]

    def of_general(name):
        return [
            (e["step"], p) for e in run.events if e["event"] == name for p in e["offenders"] if p["set"] == "general"
        ]

    alarms, recoveries = of_general("eval_regression"), of_general("eval_recovered")
    assert {pair["first_step"] for _, pair in alarms} and all(step > bridge_end for step, _ in alarms)
    assert bridge_end < alarms[0][0] <= adaptation_end
    assert recoveries and all(step > adaptation_end for step, _ in recoveries)
    against_the_bridge = next(pair for _, pair in alarms if pair["baseline_step"] == bridge_end)
    assert against_the_bridge["mixture_change"] == {"docs": [0.4, 0.01], "python": [0.2, 0.01], "cpp": [0.4, 0.98]}
