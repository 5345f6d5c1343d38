"""Whole runs that forget and recover: alarms, what is done about them, the gold checkpoint, what a resume remembers."""

import json
import re
import shutil
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from test_regressions import slow_difference, slow_scatter
from test_trainer import WORDS, config_data, final_state, record
from tiny_run import tiny_data, tiny_train, write_corpus

from curriculum.cli.main import cli
from curriculum.config import build_config
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.record.events import last_gold
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.train.checkpoints.best import BestCheckpoints
from curriculum.train.history import History
from curriculum.train.judge import _act, _worst
from curriculum.train.setup import build
from curriculum.train.trainer import train
from curriculum.train.watch import Evaluated
from curriculum.views.inspection import inspect_run
from evalsets import gold
from evalsets.gold import GoldState, Regressed, kept_steps
from evalsets.suite import Suite
from evalsets.summary import Summary

SWITCH, BACK, END = 200, 225, 260


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """The three sources of test_trainer, twice as many documents: 48 of each are held out."""
    return write_corpus(tmp_path_factory.mktemp("texts"), WORDS, num=240, low=8, high=36)


BOTH = {"web": 0.45, "code": 0.45, "law": 0.1}
PHASES = [
    {"name": "base", "until": 60, "mixture": BOTH},
    {"name": "more", "until": SWITCH, "mixture": BOTH},
    {"name": "domain", "until": BACK, "mixture": {"law": 1.0}},
    {"name": "back", "until": "end", "mixture": BOTH},
]


def forgetful(texts, **changes):
    """Three sources until step 200, then only one of them for 25 steps, then all again; the model learns all along."""
    sections = {
        "sources": {name: {"path": str(texts / f"{name}.jsonl"), "held_out": "20%"} for name in WORDS},
        "phases": PHASES,
        "evalsets": {
            "every": 5,
            "primary": {"held_out_of": "web"},
            "sets": {"code": {"held_out_of": "code"}, "law": {"held_out_of": "law"}},
            "gold": {"subject_to": {"law": {"max_increase": 0.1}}},
            **changes.pop("evalsets", {}),
        },
        "train": {"steps": END, "batch_size": 8, "seq_len": 32},
        "optim": {"lr": 3e-3, "schedule": "constant", "warmup_steps": 5},
        "checkpoint": {"every": 25, "keep": 12},
        "logging": {"every": 10, "tensorboard": False},
    }
    return build_config(config_data(texts, **sections | changes))


@pytest.fixture(scope="session")
def told(texts, store, tmp_path_factory):
    """The run in one go, with `action: log`."""
    run_dir = tmp_path_factory.mktemp("told") / "run"
    train(forgetful(texts), run_dir, store_dir=store)
    return run_dir


@pytest.fixture
def run_dir(told, tmp_path):
    """A copy of the run, to be taken up somewhere, as at step 200, where the forgetting begins."""
    shutil.copytree(told, tmp_path / "run")
    return tmp_path / "run"


def events(run_dir, name):
    return [event for event in load_run(run_dir).events if event["event"] == name]


def of_set(verdicts, *names):
    """(step, pair) of what events say of some sets."""
    return [(e["step"], pair) for e in verdicts for pair in e["offenders"] if pair["set"] in names]


def windows(run_dir, name, step):
    with np.load(run_dir / "evals" / f"{step}.npz") as arrays:
        return [arrays[f"{name}.{column}"] for column in ("nats", "tokens", "document")]


def test_nothing_is_said_while_all_is_well_and_forgetting_is_told_at_once(told):
    alarms = of_set(events(told, "eval_regression"), "val", "code", "law")
    assert len(events(told, "eval")) == END // 5 + 1
    assert min(step for step, _ in alarms) in (SWITCH + 5, SWITCH + 10)
    assert {pair["set"] for step, pair in alarms if step <= SWITCH + 10} >= {"val"}
    first = next(pair for step, pair in alarms if pair["set"] == "val")
    assert first["baseline"] == "phase_start" and first["baseline_step"] == SWITCH
    assert first["mixture_change"] == {"web": [0.45, 0.0], "code": [0.45, 0.0], "law": [0.1, 1.0]}
    assert first["first_step"] in (SWITCH + 5, SWITCH + 10) and first["tolerance"] == 0.01
    assert all(pair["step"] == step for step, pair in alarms)  # every set is measured at every eval


def test_each_eval_says_how_far_a_set_has_risen(told):
    losses = {e["step"]: e["val_loss"] for e in events(told, "eval")}
    (run_dir_back,) = [e for e in events(told, "eval") if e["step"] == BACK]
    stood = {pair["baseline_step"] for step, pair in of_set(events(told, "eval_regression"), "val") if step < BACK}
    above = max(losses[BACK] - losses[step] for step in stood)
    assert "val" in run_dir_back["regressed"] and above > 0.1
    assert run_dir_back["rises"]["val"] == pytest.approx(above, abs=2e-6)  # six decimals of each
    assert f"worse: val {run_dir_back['rises']['val']:+.4f}" in (told / "train.log").read_text()
    quiet = [e for e in events(told, "eval") if "regressed" not in e and "warned" not in e]
    assert len(quiet) > 20 and not any("rises" in e for e in quiet)


def test_what_an_alarm_says_is_what_the_windows_say(told):
    step, pair = of_set(events(told, "eval_regression"), "val")[0]
    _, tokens_N, document_N = windows(told, "primary", step)

    def difference(now, before):
        nats = [windows(told, "primary", s)[0] for s in (now, before)]
        return slow_difference(*nats, tokens_N, document_N)

    delta, item, num_documents = difference(step, pair["baseline_step"])
    assert num_documents > 40
    assert pair["delta"] == pytest.approx(delta, rel=1e-12) and delta > 0.1
    assert pair["loss"] - pair["baseline_loss"] == pytest.approx(delta, rel=1e-9)
    jitter = np.sqrt((pair["sem"] ** 2 - item**2) / 2)

    evals = [(e["step"], e["phase"] if e["step"] else -1, e["val_loss"]) for e in events(told, "eval")]
    evals = evals[: [s for s, _, _ in evals].index(step) + 1]

    def smallest_item(k):
        now = evals[k][0]
        begun = max(s for s in (0, 60, SWITCH, BACK) if s < now)
        best = min(evals[:k], key=lambda e: e[2])[0]
        return min(difference(now, before)[1] for before in (0, begun, best))

    typical = np.median([smallest_item(k) for k in range(max(1, len(evals) - 25), len(evals))])
    best = min(evals[:-1], key=lambda e: e[2])[0]
    measured, _, df, _ = slow_scatter(evals[:-1][-24:], typical, best)
    assert jitter == pytest.approx(measured, rel=1e-3)  # the record has six decimals of each loss
    assert pair["df"] == round(min(df, num_documents - 1), 1)
    assert pair["t"] == pytest.approx((delta - 0.01) / pair["sem"], rel=1e-9)


def test_a_set_recovers_and_its_phase_start_alarm_ends_with_the_phase(told):
    recovered = of_set(events(told, "eval_recovered"), "val")
    assert [pair["baseline"] for _, pair in recovered] == ["best"]
    step, pair = recovered[0]
    assert BACK < step <= END and pair["first_step"] in (SWITCH + 5, SWITCH + 10)
    late = [pair["baseline"] for s, pair in of_set(events(told, "eval_regression"), "val") if s > BACK]
    assert "phase_start" not in late
    worse = [e["step"] for e in events(told, "eval") if "val" in e.get("regressed", [])]
    assert worse == list(range(pair["first_step"], step, 5))
    may_be = [e for e in events(told, "eval") if e.get("warned")]
    assert all(set(e["warned"]).isdisjoint(e.get("regressed", [])) for e in may_be)


def test_the_matrix_at_the_end_is_that_of_the_phase_ends(told):
    (complete,) = events(told, "training_complete")
    transfer = complete["transfer"]
    assert transfer["phases"] == ["base", "more", "domain", "back"] and transfer["steps"] == [60, SWITCH, BACK, END]
    losses = {e["step"]: e for e in events(told, "eval")}
    for name, key in (("val", "val_loss"), ("code", "eval_code"), ("law", "eval_law")):
        found = transfer["sets"][name]
        ends = [losses[step][key] for step in transfer["steps"]]
        assert found["loss"] == pytest.approx(ends, abs=1e-6)
        assert found["gain"]["value"] == pytest.approx(losses[0][key] - ends[-1], abs=2e-6)
        assert losses[0][key] > min(ends)  # a run from its seed: the start is never the best
        assert found["forgetting"]["value"] == pytest.approx(ends[-1] - min(ends), abs=2e-6)
        assert found["forgetting"]["best_phase"] == transfer["phases"][int(np.argmin(ends))]
        low, high = found["gain"]["interval"]
        assert low < found["gain"]["value"] < high
    forgetting = transfer["sets"]["law"]["forgetting"]
    assert forgetting["best_phase"] == "domain"
    assert forgetting["value"] > 0.2 and forgetting["interval"][0] > 0  # how much it is differs by the processor


def test_the_smallest_rise_that_can_be_told_stands_in_every_eval_but_the_first(told):
    first, *later = events(told, "eval")
    assert "detectable" not in first
    assert all(set(e["detectable"]) == {"val", "code", "law"} for e in later)
    steady = [e["detectable"]["val"] for e in later if 150 < e["step"] <= SWITCH]
    assert all(0.01 < nats < 1 for nats in steady)
    notes = [(e["step"], note) for e in later for note in e.get("notes", [])]
    ((step, note),) = [(step, note) for step, note in notes if note.startswith("smallest rise")]
    assert step == 60 and note.endswith("; it shrinks as the losses become smoother")


def test_the_gold_is_the_best_that_no_guard_objects_to_and_its_checkpoint_is_whole(told, texts, store):
    run = load_run(told)
    golds, blocked = events(told, "gold_checkpoint"), events(told, "gold_blocked")
    assert [e["value"] for e in golds] == sorted((e["value"] for e in golds), reverse=True) and len(golds) > 10
    for before, after in zip(golds, golds[1:], strict=False):
        assert (after["previous"], after["previous_step"]) == (before["value"], before["step"])
    gold = golds[-1]
    assert run.complete["gold_step"] == gold["step"] == run.gold_step
    assert run.complete["gold_value"] == gold["value"]
    losses = {e["step"]: e["val_loss"] for e in events(told, "eval")}
    objected = {e["step"] for e in blocked}
    assert gold["value"] == min(loss for step, loss in losses.items() if step and step not in objected)

    setup = build(forgetful(texts), store)
    try:
        folder, window_steps = told / f"gold/{gold['step']}", setup.config.train.window_steps
        state = setup.states.restored(folder, setup.course.plan.sources, window_steps)
        results = setup.suite_at(0).run(state.params)
    finally:
        setup.course.feed.close()
    for name, result in results.items():
        assert np.array_equal(result.nats_N, windows(told, name, gold["step"])[0])


def test_going_on_from_the_gold_gives_the_same_run_again(run_dir, told, texts, store):
    gold = load_run(told).gold_step
    train(forgetful(texts), run_dir, resume="gold", store_dir=store)
    again = [e for e in load_run(run_dir).events if e["event"] == "resume"]
    assert [e["step"] for e in again] == [gold]
    assert record(run_dir) == record(told)
    assert final_state(run_dir) == final_state(told)


def test_baselines_and_states_come_from_the_checkpoint(run_dir, told, texts, store):
    """From the middle of an alarm on: neither the alarm nor what it compares with begins anew."""
    train(forgetful(texts), run_dir, resume=BACK, store_dir=store)
    assert record(run_dir) == record(told)


def test_the_eval_before_the_first_update_is_in_no_phase(told):
    memory = read_ledger(told / "checkpoints/75")["history"]["watch"]["sets"]["law"]
    steps_of = {phase: [] for phase in (-1, 0, 1)}
    for step, phase in list(zip(memory["history_steps_H"], memory["history_phases_H"], strict=True))[-16:]:
        steps_of[phase].append(step)
    assert steps_of == {-1: [0], 0: list(range(5, 61, 5)), 1: [65, 70, 75]}


def test_a_set_that_comes_back_is_compared_with_what_it_was(run_dir, told, texts, store):
    """Without `law` for 20 steps; with it again nothing of it begins anew."""
    both = {"evalsets": {"sets": {"code": {"held_out_of": "code"}}, "gold": {}}}
    at = {"train": {"steps": SWITCH + 20, "batch_size": 8, "seq_len": 32}}
    short = [phase for phase in PHASES[:2]] + [{"name": "domain", "until": "end", "mixture": {"law": 1.0}}]
    train(forgetful(texts, **both, **at, phases=short), run_dir, resume=SWITCH, store_dir=store)
    before = read_ledger(run_dir / f"checkpoints/{SWITCH}")["history"]["watch"]["sets"]["law"]
    after = read_ledger(run_dir / f"checkpoints/{SWITCH + 20}")["history"]["watch"]["sets"]["law"]
    assert after == before and before["baseline_steps_B"][0] == 0
    train(forgetful(texts), run_dir, resume="latest", store_dir=store)
    evals = {e["step"]: e for e in events(run_dir, "eval")}
    assert "eval_law" not in evals[SWITCH + 20] and "law" in evals[BACK]["detectable"]


@pytest.mark.slow
def test_a_boundary_that_is_moved_to_the_resumed_step_is_measured(run_dir, texts, store):
    """The checkpoint of step 175 has an eval, that of the boundary at 202 has none."""
    moved = [*PHASES[:1], {**PHASES[1], "until": SWITCH + 2}, *PHASES[2:]]
    every = {"checkpoint": {"every": 22, "keep": 100}}  # 176 and 198
    train(forgetful(texts, phases=moved, **every), run_dir, resume=175, store_dir=store)
    again = [*PHASES[:1], {**PHASES[1], "until": SWITCH + 4}, *PHASES[2:]]
    train(forgetful(texts, phases=again, **every), run_dir, resume=176, store_dir=store)
    later = [*PHASES[:1], {**PHASES[1], "until": SWITCH - 2}, *PHASES[2:]]
    train(forgetful(texts, phases=later, **every), run_dir, resume=SWITCH - 2, store_dir=store)
    evals = {e["step"]: e for e in events(run_dir, "eval")}
    assert {"val_loss", "eval_code", "eval_law"} <= set(evals[SWITCH - 2])
    switch = next(e for e in events(run_dir, "phase_switch") if e["new_phase"] == "domain")
    assert switch["step"] == SWITCH - 2
    starts = {p["baseline_step"] for _, p in of_set(events(run_dir, "eval_regression"), "val")
              if p["baseline"] == "phase_start"}  # fmt: skip
    assert starts == {SWITCH - 2}


def test_what_a_checkpoint_remembers_is_strict_json(told):
    def refuse(name):
        raise AssertionError(name)

    text = (told / f"checkpoints/{SWITCH}/ledger/metadata").read_text()
    assert "watch" in json.loads(text, parse_constant=refuse)["history"]


def test_a_gold_stays_while_the_newest_checkpoint_is_on_its_way(run_dir):
    """A kill now would leave the checkpoint before as the newest."""
    directory = RunDirectory(run_dir)
    steps = checkpoint_steps(directory.checkpoints)
    ledgers = {
        step: GoldState.from_json(read_ledger(directory.checkpoints / str(step))["history"]["gold"]) for step in steps
    }
    assert ledgers[75].gold.step != ledgers[50].gold.step
    for step in steps:
        if step != 50:
            shutil.rmtree(directory.checkpoints / str(step))
    with BestCheckpoints(directory, 50, []) as best:
        best.note_saving(75, ledgers[75])
        best.drop_all_but(kept_steps(ledgers[75]))
        assert ledgers[50].gold.step in best.gold.steps()
        (directory.checkpoints / "50").rename(directory.checkpoints / "75")
        best.drop_all_but(kept_steps(ledgers[75]))
        assert best.gold.steps() == []


def test_golds_that_no_checkpoint_needs_any_more_go_with_the_checkpoint(tmp_path, monkeypatch):
    """The loss falls up to step 4, where `checkpoints/` has step 2, whose gold is its own; at the end it has step 8."""
    measured, losses = Suite.run, iter([9.0, 8.0, 7.0, 6.0, 5.0, 6.0, 6.0, 6.0, 6.0])

    def falling(self, params, names=None, **how):
        loss = next(losses)
        return {name: r._replace(nats_N=r.tokens_N * loss) for name, r in measured(self, params, names, **how).items()}

    monkeypatch.setattr(Suite, "run", falling)
    write_corpus(tmp_path)
    tiny_train(
        tmp_path,
        tmp_path / "run",
        phases=[{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
        evalsets={"every": 1, "primary": {"held_out_of": "web"}},
        train={"steps": 8, "batch_size": 4, "seq_len": 32},
        checkpoint={"every": 2, "keep": 1},
    )
    assert next(losses, None) is None
    found = RunDirectory(tmp_path / "run")
    assert checkpoint_steps(found.checkpoints) == [8] and checkpoint_steps(found.gold) == [4]


def test_a_gold_that_is_lost_is_told_and_searched_anew(run_dir, told, texts, store):
    gold = GoldState.from_json(read_ledger(told / "checkpoints" / str(BACK))["history"]["gold"]).gold.step
    assert gold < BACK
    shutil.rmtree(run_dir / "checkpoints" / str(gold), ignore_errors=True)
    array = next((run_dir / "gold" / str(gold) / "params/d").iterdir())
    array.write_bytes(array.read_bytes()[:-1] + bytes([array.read_bytes()[-1] ^ 1]))
    # A limit on the set that comes back before the end: so that there is another gold.
    gold_of_code = {"gold": {"subject_to": {"code": {"max_increase": 1.0}}}}
    train(forgetful(texts, evalsets=gold_of_code), run_dir, resume=BACK, store_dir=store)
    run = load_run(run_dir)
    (lost,) = next(e for e in run.events if e["event"] == "resume")["gold_lost"]
    assert lost["step"] == gold and "checksum" in lost["why"]
    assert f"gold/{gold} is lost" in (run_dir / "train.log").read_text()
    assert run.gold_step is not None and run.gold_step > BACK
    assert (run_dir / "superseded/gold" / str(gold)).is_dir() and not (run_dir / "gold" / str(gold)).exists()
    until = next(i for i, e in enumerate(run.events) if e["event"] == "resume") + 1
    assert last_gold(run.events[:until]) is None and last_gold(run.events[: until - 1])["step"] == gold


def with_action(texts, action, **changes):
    return forgetful(texts, evalsets={"regression": {"action": action}}, **changes)


def without_actions(run_dir):
    """The record but for what is done about alarms, and that this was changed."""
    events, metrics = record(run_dir)
    events = [e for e in events if e["event"] != "schedule_edit"]
    return [{k: v for k, v in e.items() if k not in ("action", "config")} for e in events], metrics


def test_stop_saves_ends_with_code_0_and_may_be_resumed(run_dir, told, texts, store, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(forgetful(texts).to_json()))
    options = ["--run-dir", str(run_dir), "--store-dir", str(store), "--resume", str(SWITCH)]
    stop = "--set=evalsets.regression.action=stop"
    done = CliRunner().invoke(cli, ["train", str(config), *options, stop], catch_exceptions=False)
    assert done.exit_code == 0
    (alarm,) = [e for e in events(run_dir, "eval_regression") if e["step"] > SWITCH]
    assert alarm["step"] in (SWITCH + 5, SWITCH + 10) and alarm["action"] == "the run stops here"
    last = done.output.splitlines()[-1]
    assert re.fullmatch(
        rf"stopped at step {alarm['step']}, which was saved: (val|code|val, code) got worse; continue with --resume latest, "
        rf"or go back to before that with `\S+ branch {re.escape(str(run_dir))} --at {SWITCH} --run-dir NEW .*`",
        last,
    )
    facts = inspect_run(run_dir)
    assert load_run(run_dir).complete is None and facts["progress"]["stopped"]["step"] == alarm["step"]
    assert f"`{facts['commands']['go back']}`" in last

    train(forgetful(texts), run_dir, resume="latest", store_dir=store)
    assert [e["step"] for e in events(run_dir, "resume")][-1] == alarm["step"]
    assert without_actions(run_dir) == without_actions(told)
    assert final_state(run_dir) == final_state(told)


def test_checkpoint_keeps_the_step_of_every_alarm(run_dir, told, texts, store):
    """Also where the step is the gold, which a gate was asked about: what is kept knows of it."""
    sets = {"code": {"held_out_of": "code", "tolerance": 9.0}, "law": {"held_out_of": "law"}}
    gold = {"minimise": "law/loss", "subject_to": {"code": {"max_increase": 9.0}}, "overfit_ratio": None}
    gold["gate"] = """sh -c 'echo "{\\"accept\\": true}"'"""
    evalsets = {"sets": sets, "gold": gold, "regression": {"action": "checkpoint"}}
    changes = {"checkpoint": {"every": 25, "keep": 1}}
    train(forgetful(texts, evalsets=evalsets, **changes), run_dir, resume=SWITCH, store_dir=store)
    alarms = [e for e in events(run_dir, "eval_regression") if e["step"] > SWITCH]
    assert [e["action"] for e in alarms] == [f"kept as kept/{e['step']}" for e in alarms] and alarms
    assert checkpoint_steps(run_dir / "kept") == [e["step"] for e in alarms]
    first = alarms[0]["step"]
    assert first in [e["step"] for e in events(run_dir, "gold_checkpoint")]
    assert read_ledger(run_dir / f"kept/{first}")["history"]["gold"]["gold"]["step"] == first
    train(with_action(texts, "log"), run_dir, resume=first, store_dir=store)
    assert checkpoint_steps(run_dir / "kept") == [first]
    assert first in [e["step"] for e in events(run_dir, "gold_checkpoint")]
    assert final_state(run_dir) == final_state(told)


@pytest.mark.slow
def test_replay_raises_the_share_to_the_end_of_the_phase_and_a_resume_remembers(run_dir, texts, store):
    config = with_action(texts, "replay", checkpoint={"every": 5, "keep": 12})
    train(config, run_dir, resume=SWITCH, store_dir=store)
    edits = [e for e in events(run_dir, "schedule_edit") if e["step"] < BACK and e["kind"] == "replay"]
    first = edits[0]
    assert SWITCH < first["step"] < BACK - 5 and first["until"] == BACK  # at which eval differs by the processor
    assert first["mixture_before"]["law"] == 1.0
    raised = {e["reason"].split()[2].strip(","): e["mixture_after"] for e in edits}
    assert raised["web"]["web"] == pytest.approx(0.02, rel=0.05)
    mixtures = {row["step"]: row["mixture"] for row in load_run(run_dir).metrics}
    assert mixtures[BACK - 5]["web"] > 0 and mixtures[BACK - 5]["law"] < 1
    assert mixtures[BACK + 5] == BOTH

    whole, state = record(run_dir), final_state(run_dir)
    for step in (edits[-1]["step"], edits[-1]["step"] + 5, BACK, BACK + 5):
        train(config, run_dir, resume=step, store_dir=store)
        assert record(run_dir) == whole and final_state(run_dir) == state


def test_a_gate_may_veto_and_score(texts, store, tmp_path):
    gate = tmp_path / "gate.py"
    gate.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "assert all((folder / item).is_dir() for item in ('params', 'train', 'ledger', 'baselines'))\n"
        "step = int(folder.name)\n"
        "if step == 25:\n"
        "    sys.exit('out of memory')\n"
        "if step == 30:\n"
        "    (folder / 'notes.txt').write_text('mine')\n"
        "print(json.dumps({'accept': step != 10, 'reason': 'ten is no good', 'score': 1.0 if step >= 20 else 2.0}))\n"
    )
    run_dir = tmp_path / "run"
    config = forgetful(
        texts,
        evalsets={"gold": {"gate": f"{sys.executable} {gate}"}},
        phases=[{"name": "base", "until": "end", "mixture": {"web": 1.0}}],
        train={"steps": 30, "batch_size": 8, "seq_len": 32},
    )
    train(config, run_dir, store_dir=store)
    golds = [(e["step"], e["score"], e["path"]) for e in events(run_dir, "gold_checkpoint")]
    assert golds == [(5, 2.0, "gold/5"), (20, 1.0, "gold/20")]
    blocked = events(run_dir, "gold_blocked")
    assert not any("path" in e for e in blocked)  # nothing is kept of them
    reasons = [(e["step"], e["guard"], e["reason"]) for e in blocked]
    assert reasons == [
        (10, "gate", "gate: ten is no good"),
        (15, "gate", "gate: score 2 is not below the gold's 2 (step 5)"),
        (25, "gate", "gate: exit code 1: out of memory"),
        (30, "gate", "gate: it damaged the checkpoint gold/30: notes.txt is not in the checksum manifest"),
    ]
    assert 20 in checkpoint_steps(run_dir / "gold") and not {10, 25, 30} & set(checkpoint_steps(run_dir / "gold"))
    assert (run_dir / "superseded/gold/30/notes.txt").is_file()
    saved = read_ledger(run_dir / "gold/20")["history"]["gold"]["gold"]
    assert saved == {
        "step": 20,
        "value": pytest.approx(events(run_dir, "gold_checkpoint")[-1]["value"], abs=1e-6),
        "score": 1.0,
        "losses": {name: pytest.approx(load_run(run_dir).evals(name)[4][1], abs=1e-6) for name in ("law", "code")}
        | {"primary": pytest.approx(load_run(run_dir).evals()[4][1], abs=1e-6)},
    }


def test_a_run_that_begins_from_another_may_be_best_as_it_began_and_is_held_to_that(tmp_path, monkeypatch):
    decide, asked = gold.decide, []

    def decide_and_note(config, state, measured):
        asked.append((measured.step, measured.is_candidate, measured.limits_from_start, measured.is_last))
        return decide(config, state, measured)

    monkeypatch.setattr(gold, "decide", decide_and_note)
    phases = [{"name": "a", "until": "end", "mixture": {"web": 1.0}}]
    short = {"phases": phases, "train": {"steps": 3, "batch_size": 4, "seq_len": 32}, "optim": {"schedule": "constant"}}
    tiny_train(write_corpus(tmp_path), tmp_path / "base", **short)
    assert asked == [(0, False, False, False), (3, True, False, True)]
    tiny_train(tmp_path, tmp_path / "run", adaptation={"init_from": str(tmp_path / "base")}, **short)
    assert asked[2:] == [(0, True, True, False), (3, True, True, True)]


def test_the_alarm_of_a_set_that_counts_for_the_gold_is_its_largest_rise():
    def pair(before, now, delta, since):
        return {"baseline_loss": before, "loss": now, "delta": delta, "first_step": since}

    small, large, lost = pair(2, 2.25, 0.25, 20), pair(1.5, 2.25, 0.75, 30), pair(1, *["Infinity"] * 2, 40)
    assert _worst([small, large]) == _worst([large, small]) == Regressed(1.5, 2.25, 0.75, 30)
    assert _worst([large, pair(1, *["NaN"] * 2, 40), small]).before == _worst([lost, large]).before == 1


@pytest.mark.parametrize(
    ("done", "standing", "newly", "loss", "told"),
    [
        (3, ["law"], ["law"], 1.0, "law is replayed more"),
        (3, ["law"], [], 1.0, None),  # it is replayed more already
        (3, ["law", "primary"], ["law"], 1.0, "law is not replayed more: the added share would come from web, whose sets got worse too"),
        (3, ["law"], ["law"], float("nan"), "law: its loss is not finite, so replay cannot help"),
        (3, ["law", "own"], ["own"], 1.0, "own is held out of no source: nothing to replay"),
        (3, ["law", "own"], ["own", "law"], 1.0, "own is held out of no source: nothing to replay; law is replayed more"),
        (6, ["law"], ["law"], 1.0, "no share is raised: the phase is over"),
        (12, ["law"], ["law"], 1.0, None),
    ],
)  # fmt: skip
def test_what_replay_does_about_an_alarm(tmp_path, done, standing, newly, loss, told):
    write_corpus(tmp_path)
    (tmp_path / "own.txt").write_text("text of its own " * 40)
    sections = tiny_data(tmp_path)
    sections["phases"][0]["mixture"] = {"web": 0.5, "law": 0.5}
    sections["evalsets"]["sets"]["own"] = {"path": str(tmp_path / "own.txt")}
    sections["evalsets"]["regression"] = {"action": "replay", "replay_factor": 1.5, "replay_max_share": 0.9}
    with closing(build(build_config(sections), tmp_path / "store")) as setup:
        summary = Summary(loss=loss, perplexity=2.0, bpb=1.0, accuracy=0.5, sem=0.1, clusters="documents")
        summaries = dict.fromkeys(standing, summary)
        evaluated = Evaluated(summaries, {}, [], standing, newly, dict.fromkeys(standing, []), [], [])
        edits, action = _act(SimpleNamespace(setup=setup, history=History("now", "a")), done, evaluated)
    assert action == told
    if told and told.endswith("law is replayed more"):
        (edit,) = edits
        assert edit["reason"] == "replay of law, as law got worse"
        assert (edit["mixture_before"], edit["mixture_after"]) == ({"web": 0.5, "law": 0.5}, {"web": 0.25, "law": 0.75})
    else:
        assert edits == []


def test_an_action_without_a_consequence_is_no_replay():
    """As one that was added to the config's section alone would be."""
    regression = SimpleNamespace(action="page")
    config = SimpleNamespace(evalsets=SimpleNamespace(regression=regression))
    course = SimpleNamespace(of_trunk=lambda done: None, total_steps=12, phase_ends=(6, 12))
    run = SimpleNamespace(setup=SimpleNamespace(config=config, course=course), history=History("now", "a"))
    with pytest.raises(ValueError, match="no such action: 'page'"):
        _act(run, 3, Evaluated({}, {}, [], {}, [], {}, [], []))
