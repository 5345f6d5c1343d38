"""What the events of a run say of it, worked by hand from its config."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_run import tiny_data, write_corpus

from curriculum.config import build_config
from curriculum.train import fields
from curriculum.train.history import History
from curriculum.train.setup import build
from curriculum.train.watch import Evaluated
from evalsets.regressions import OK, WARNED


@pytest.fixture
def setup(tmp_path):
    """The tiny run, with an eval set of one short document."""
    sections = tiny_data(write_corpus(tmp_path))
    (tmp_path / "own.txt").write_text("text of its own " * 4)
    sections["evalsets"]["sets"]["own"] = {"path": str(tmp_path / "own.txt")}
    with closing(build(build_config(sections), tmp_path / "store")) as setup:
        yield setup


def test_the_start_tells_what_the_standard_errors_of_each_set_rest_on(setup):
    start = fields.training_start(setup)
    sets = {name: (of["documents"], of["clusters"]) for name, of in start["evalsets"].items()}
    assert sets == {"primary": (14, 20), "law": (15, 20), "own": (1, 1)}  # 20 blocks of windows where documents are few
    assert [warning for warning in start["warnings"] if "eval set" in warning] == [
        "eval set own is one document of 2 windows: no standard error, and no verdict on whether it got worse; give it "
        "more documents"
    ]


def test_an_eval_calls_sets_by_their_names_in_the_record(setup):
    risen = {"delta_B": np.array([0.5, 0.125, 0.0625]), "states_B": np.array([OK, WARNED, WARNED])}
    comparisons = {
        "primary": SimpleNamespace(detectable=0.25, **risen),
        "law": SimpleNamespace(detectable=float("inf")),
    }
    alarms = {"standing": {"law": [{"delta": 0.75}, {"delta": 1.0}], "own": [{"delta": "NaN"}]}, "warned": ["primary"]}
    evaluated = Evaluated({}, comparisons, recovered=[], worse=[], newly=[], notes=["a note"], **alarms)
    assert fields.eval_event(setup, 1, evaluated, {}, 0.12345) == {
        "progress_pct": 8.3333,
        "lr": 1.5e-3,
        "phase": "a",
        "detectable": {"val": 0.25, "law": None},
        "regressed": ["law", "own"],
        "warned": ["val"],
        "rises": {"law": 1.0, "own": float("inf"), "val": 0.125},  # not the 0.5, which is not beyond chance
        "notes": ["a note"],
        "eval_duration_s": 0.123,
    }


def test_a_switch_tells_what_the_phases_before_and_after_it_do(tmp_path):
    phases = tiny_data(write_corpus(tmp_path))["phases"]
    phases[0]["mixture"] = {"web": 0.75, "law": 0.25}
    phases[1] |= {"ramp_steps": 3, "batch_size": 2, "seq_len": 64}
    optim = {"lr": 3e-3, "warmup_steps": 0, "decay_steps": 6}
    with closing(build(build_config(tiny_data(tmp_path, phases=phases, optim=optim)), tmp_path / "store")) as setup:
        setup.course.pass_over(5, 1, back_to=4)
        event = fields.phase_switch(setup, 6, "a")
        rates, sizes = setup.course.rates, setup.course.plan.tokens_per_epoch
    drawn = {"web": 18 * 32, "law": 6 * 32}
    consumed = {"web": 21 * 32, "law": 7 * 32}  # with an update of a that was passed over before
    shape = {"batch_size": 4, "seq_len": 32, "grad_accum": 1, "rope_theta": None, "lr_scale": 1.0}
    assert event == {
        "from_phase": "a",
        "new_phase": "b",
        "mixture_before": {"web": 0.75, "law": 0.25},
        "mixture_after": {"law": 1.0},
        "ramp_steps": 3,
        "shape_before": shape,
        "shape_after": shape | {"batch_size": 2, "seq_len": 64},
        "passed_over": {"web": 32, "law": 32},  # the half of a block of 64 that b does not begin in
        "tokens_drawn": drawn,
        "consumed": consumed,
        "epochs": {name: round(tokens / sizes[name], 6) for name, tokens in consumed.items()},
        "lr": rates[6],
    }
    assert rates[6] < rates[5] == 3e-3


def test_the_end_tells_how_fast_it_all_was(setup):
    state = SimpleNamespace(skipped_updates=3, guard=SimpleNamespace(num_nonfinite=1, num_outliers=2))
    complete = fields.training_complete(setup, History("now", "b"), {}, 4.0, state)
    assert (complete["total_steps"], complete["steps_per_sec"]) == (12, 3.0)
    assert (complete["total_tokens"], complete["tokens_per_sec"]) == (12 * 4 * 32, 384.0)
    assert [complete[f"skipped_{what}"] for what in ("updates", "nonfinite", "outliers")] == [3, 1, 2]
