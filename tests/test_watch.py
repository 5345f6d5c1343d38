"""What is remembered of the eval sets, told as plain data."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from compared_runs import saved_arrays
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_data, tiny_train, worse_from, write_corpus

from curriculum.config import build_config
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.plan_warnings import evalset_warnings
from curriculum.run import load_run
from curriculum.scheduling import num_due
from curriculum.train.trainer import train
from curriculum.train.watch import Watch, _newly_warned, transfer_matrix
from evalsets.evalset import cut_windows
from evalsets.metrics import WindowResults
from evalsets.regressions import BASELINES, BEST, OK, REGRESSED, WARNED, begin, observe
from evalsets.suite import Suite


@given(st.sets(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 70), st.data())
def test_the_evals_that_are_planned_are_counted_as_one_by_one(ends, every, data):
    after = data.draw(st.integers(0, max(ends)))
    planned = [step for step in range(1, max(ends) + 1) if step % every == 0 or step in ends]
    assert num_due(ends, every, after) == sum(step > after for step in planned)


def test_a_set_without_a_standard_error_has_no_intervals():
    tokens_N, document_N = np.array([10]), np.array([0])
    nats = [30.0, 20.0, 25.0]

    def results(step):
        return WindowResults(np.array([nats[step]]), tokens_N, tokens_N, 4 * tokens_N, document_N)

    watched = begin(7, 0, np.array([nats[0]]), tokens_N)
    for step in (1, 2):
        nats_N = results(step).nats_N
        watched, _ = observe(watched, 7 + step, step - 1, nats_N, tokens_N, document_N, tolerance=0.01, level=0.0)

    def transfer_of(bounds, *nats):
        of_ends = {end: {"primary": np.array([n])} for (_, _, end), n in zip(bounds, nats, strict=True)}
        return transfer_matrix(
            bounds, Watch({"primary": watched}), of_ends, {"primary": results(0)}, from_scratch=False
        )

    found = transfer_of([("a", 0, 8), ("b", 8, 9)], *nats[1:])
    assert found == {
        "phases": ["a", "b"],
        "steps": [8, 9],
        "sets": {
            "val": {
                "start": 3.0,
                "start_step": 7,
                "loss": [2.0, 2.5],
                "forgetting": {"value": 0.5, "interval": None, "best_phase": "a"},
                "gain": {"value": 0.5, "interval": None},
            }
        },
    }
    known = transfer_of([("a", 0, 8)], 35.0)["sets"]["val"]["forgetting"]
    assert known == {"value": 0.5, "interval": None, "best_phase": "the start"}
    best_last = transfer_of([("a", 0, 8)], nats[1])
    assert best_last["sets"]["val"]["forgetting"] == {"value": 0.0, "interval": [0.0, 0.0], "best_phase": "a"}


def test_of_many_sets_that_may_be_worse_those_with_the_largest_t_are_named():
    def newly(t):
        of_best = np.array([False, False, True])
        return SimpleNamespace(
            states_B=np.where(of_best, WARNED, OK),
            states_before_B=np.full(3, OK),
            t_B=np.array([9.0, 9.0, t]),
            delta_B=np.array([0.0, 0.0, 0.25 + t / 10]),
            sem_B=np.full(3, 0.1),
            critical=5.0,
        )

    (note,) = _newly_warned({f"s{i}": newly(2 + i / 10) for i in range(10)})
    # A tolerance of 0.25, and 5 times the standard error.
    told = [f"s{i} {0.45 + i / 100:+.4f} against best (an alarm needs more than +0.7500)" for i in range(9, 1, -1)]
    assert note == f"maybe worse: {', '.join(told)}, 2 more"
    assert _newly_warned({}) == []
    alarmed = newly(3.0)  # that it is worse than the best too is no news where an alarm against another eval stands
    alarmed.states_B[0] = REGRESSED
    assert _newly_warned({"s": alarmed}) == []


def test_a_memory_is_the_same_after_it_is_saved():
    tokens_N, document_N = np.full(40, 8), np.arange(40)
    watched = begin(0, -1, tokens_N * 2.0, tokens_N)
    watched, _ = observe(watched, 1, 0, tokens_N * 3.0, tokens_N, document_N, tolerance=0.01, level=0.01)
    watch = Watch({"primary": watched})
    saved = watch.to_json()
    again = Watch.of(saved, watch.baselines()).sets["primary"]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(again, watched, strict=True))
    del saved["sets"]["primary"]["history_items_H"]  # as an older version wrote it
    assert np.isnan(Watch.of(saved, watch.baselines()).sets["primary"].history_items_H).all()


@pytest.mark.parametrize(
    ("since", "step", "newly"),
    [
        (None, 300, True),
        (210, 300, False),  # its source was given more for the alarm of 210, to the end of the phase
        (210, 380, True),  # a new phase, which knows nothing of that
        (360, 380, True),  # at the end of a phase nothing is raised
        (365, 380, False),
    ],
)
def test_a_set_is_newly_worse_with_its_first_alarm_in_a_phase(monkeypatch, since, step, newly):
    monkeypatch.setattr(Watch, "_compared", lambda self, *_: (self, {}))
    monkeypatch.setattr(Watch, "_verdicts", lambda self, *_: (dict(self.standing), [], ["code"]))
    monkeypatch.setattr(Watch, "_notes", lambda *_: ([], ()))
    bounds = (("one", 0, 200), ("two", 200, 360), ("three", 360, 500))
    course = SimpleNamespace(schedule=SimpleNamespace(phase_bounds=bounds))
    setup = SimpleNamespace(course=course, corpus=SimpleNamespace(evalsets={}))
    watch = Watch(standing={} if since is None else {"code": [{"baseline": "best", "first_step": since}]})
    _, evaluated = watch.with_eval(setup, step, {})
    assert evaluated.newly == (["code"] if newly else [])


def test_what_joins_a_standing_alarm_raises_none(monkeypatch):
    def pair(setup, step, name, comparison, b):
        return {"baseline": BASELINES[b], "first_step": int(comparison.first_steps_B[b])}

    def compared(*first_steps):
        regressed_B = np.where(np.array(first_steps) == -1, OK, REGRESSED)
        before_B = np.where(np.array(first_steps) == 30, REGRESSED, OK) * (np.arange(3) == BEST)
        return SimpleNamespace(states_before_B=before_B, states_B=regressed_B, first_steps_B=np.array(first_steps))

    comparisons = {"joins": compared(30, -1, 30), "stands": compared(-1, -1, 30), "another": compared(-1, 40, 30)}
    monkeypatch.setattr("curriculum.train.watch._pair", pair)
    monkeypatch.setattr("curriculum.train.watch.summarise", lambda result: result)
    monkeypatch.setattr(Watch, "_compared", lambda self, *_: (self, comparisons))
    monkeypatch.setattr(Watch, "_notes", lambda *_: ([], ()))
    course = SimpleNamespace(schedule=SimpleNamespace(phase_bounds=(("one", 0, 200),)))
    setup = SimpleNamespace(course=course, corpus=SimpleNamespace(evalsets=comparisons))
    watch = Watch(standing={name: [{"baseline": "best", "first_step": 30}] for name in comparisons})
    _, evaluated = watch.with_eval(setup, 40, {})
    assert evaluated.worse == ["another"]
    assert evaluated.joined == [{"baseline": "start", "first_step": 30}]


def test_a_set_of_copies_and_one_of_a_single_document_are_told():
    def warned(texts, name="primary"):
        documents = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return list(evalset_warnings([cut_windows(name, documents, np.ones(128, np.int64), 0, 4)]))

    no_error = "no standard error, and no verdict on whether it got worse; give it more documents"
    one = f"eval set law is one document of 2 windows: {no_error}"
    copies = "copies count as one document in its standard errors and verdicts; remove the copies from its text"
    assert warned(["one", "other"]) == warned(["one", "other", "last", "one", "other"]) == []
    assert warned(["one", "other"] * 2) == [f"eval set val has 4 documents, only 2 of them distinct: {copies}"]
    assert warned(["a text"], "law") == [one]
    assert warned(["abc"], "law") == [one.replace("2 windows", "1 window")]
    assert warned(["a text"] * 1200, "law") == [
        f"eval set law has 1,200 documents, only 1 of them distinct: {copies}",
        one,
    ]


def test_a_set_that_was_gone_at_the_switch_is_compared_with_its_own_first_eval_in_the_phase(tmp_path, monkeypatch):
    """While it is gone no alarm of another set tells of the one that it had."""
    measured, worse = Suite.run, set()

    def run(self, params, names=None, **how):
        results = measured(self, params, names, **how)
        name = "law" if "law" in results else "primary"
        if next(steps) in worse:
            results[name] = results[name]._replace(nats_N=3 * results[name].nats_N)
        return results

    def told_of(events):
        return [e for e in load_run(tmp_path / "run").events if e["event"] in events]

    sections = {
        "phases": [
            {"name": "a", "until": 4, "mixture": {"web": 1.0}},
            {"name": "b", "until": "end", "mixture": {"law": 1.0}},
        ],
        "train": {"steps": 8, "batch_size": 4, "seq_len": 32},
        "checkpoint": {"every": 2, "keep": 50},
    }
    evalsets = {"every": 1, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}}
    without = {**evalsets, "sets": {}}
    monkeypatch.setattr(Suite, "run", run)
    write_corpus(tmp_path)
    steps, worse = iter(range(9)), {2, 3, 4, 5, 6, 7, 8}
    tiny_train(tmp_path, tmp_path / "run", **sections, evalsets=evalsets)
    steps, worse = iter(range(3, 9)), {8}
    tiny_train(tmp_path, tmp_path / "run", 2, **sections, evalsets=without)
    alarms = [(e["step"], {o["set"] for o in e["offenders"]}) for e in told_of(("eval_regression",))]
    assert alarms == [(2, {"law"}), (8, {"val"})]
    steps, worse = iter([7, 8]), {8}
    tiny_train(tmp_path, tmp_path / "run", 6, **sections, evalsets=evalsets)
    told = [
        (e["event"], e["step"], [(o["baseline"], o["baseline_step"]) for o in e["offenders"]])
        for e in told_of(("eval_regression", "eval_recovered"))
    ]
    assert told == [
        ("eval_regression", 2, [("start", 0), ("phase_start", 0), ("best", 1)]),
        ("eval_recovered", 7, [("start", 0), ("best", 1)]),
        ("eval_regression", 8, [("start", 0), ("phase_start", 7), ("best", 7)]),
    ]


def test_a_set_above_the_untrained_model_raises_no_alarm_before_its_source_is_read(tmp_path, monkeypatch):
    measured, evals = Suite.run, []

    def rising(self, params, names=None, **how):
        """The set law rises from eval to eval; val does not change."""
        results = measured(self, params, names, **how)
        evals.append(results)
        nats_N = (1 + 0.1 * len(evals)) * evals[0]["law"].nats_N
        return {"primary": evals[0]["primary"], "law": results["law"]._replace(nats_N=nats_N)}

    monkeypatch.setattr(Suite, "run", rising)
    data = tiny_data(
        write_corpus(tmp_path),
        phases=[
            {"name": "a", "until": 4, "mixture": {"web": 1.0}},
            {"name": "b", "until": "end", "mixture": {"law": 1.0}},
        ],
        evalsets={"every": 1, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}},
        train={"steps": 8, "batch_size": 4, "seq_len": 32},
    )
    train(build_config(data), tmp_path / "run", store_dir=tmp_path / "store")
    events = load_run(tmp_path / "run").events
    notes = [(e["step"], note) for e in events for note in e.get("notes", []) if "untrained" in note]
    (step, note), (alarm, *_) = *notes, [e for e in events if e["event"] == "eval_regression"]
    assert (
        step == 1
        and note.startswith("above the untrained model: law +0.")
        and note.endswith("; no alarm, as their source has not been read yet")
    )
    assert alarm["step"] == 5 and {o["set"] for o in alarm["offenders"]} == {"law"}


def test_an_alarm_tells_of_a_source_that_is_gone(tmp_path, monkeypatch):
    def begin_with(mixture):
        return tiny_data(
            write_corpus(tmp_path),
            phases=[
                {"name": "a", "until": 2, "mixture": mixture},
                {"name": "b", "until": "end", "mixture": {"web": 1.0}},
            ],
            evalsets={"every": 1, "primary": {"held_out_of": "web"}},
            train={"steps": 4, "batch_size": 4, "seq_len": 32},
        )

    train(build_config(begin_with({"law": 0.5, "web": 0.5})), tmp_path / "run", store_dir=tmp_path / "store")
    worse_from(monkeypatch, 0)
    gone = begin_with({"web": 1.0})
    del gone["sources"]["law"]
    train(build_config(gone), tmp_path / "run", resume=2, accept_past=True, store_dir=tmp_path / "store")
    (alarm,) = [e for e in load_run(tmp_path / "run").events if e["event"] == "eval_regression"]
    changes = [(o["baseline_step"], o["mixture_change"]) for o in alarm["offenders"]]
    assert alarm["step"] == 3 and changes[0] == (0, {"web": [0.5, 1.0], "law": [0.5, 0.0]})


def test_a_step_that_an_alarm_keeps_is_kept_by_a_resume_if_a_kill_came_before(tmp_path, monkeypatch):
    evalsets = tiny_data(tmp_path)["evalsets"] | {"regression": {"action": "checkpoint"}}
    sections = {"evalsets": evalsets, "checkpoint": {"every": 3, "keep": 9}}
    worse_from(monkeypatch, 2)
    tiny_train(write_corpus(tmp_path), tmp_path / "run", **sections)
    (alarm, *_) = [e for e in load_run(tmp_path / "run").events if e["event"] == "eval_regression"]
    assert (alarm["step"], alarm["action"]) == (6, "kept as kept/6")
    monkeypatch.undo()
    for step, kept in ((6, [6]), (3, [])):  # at 3 the alarm is yet to come, and does not come
        shutil.copytree(tmp_path / "run", tmp_path / f"{step}")
        shutil.rmtree(tmp_path / f"{step}/kept")
        tiny_train(tmp_path, tmp_path / f"{step}", step, **sections)
        assert checkpoint_steps(tmp_path / f"{step}/kept") == kept
    assert saved_arrays(tmp_path / "6/kept/6") == saved_arrays(tmp_path / "run/kept/6")


def test_a_step_that_an_alarm_keeps_can_be_gone_back_to_with_its_gold(tmp_path, monkeypatch):
    sections = {
        "evalsets": tiny_data(tmp_path)["evalsets"] | {"regression": {"action": "checkpoint"}},
        "checkpoint": {"every": 3, "keep": 1},
        "optim": tiny_data(tmp_path)["optim"] | {"allow_jump": True},
    }
    run = tmp_path / "run"
    worse_from(monkeypatch, 2, num_evals=1)  # at step 6
    tiny_train(write_corpus(tmp_path), run, **sections)
    monkeypatch.undo()
    for resume in ("latest", 6):  # to a resume it is known from the checkpoint
        assert checkpoint_steps(run / "kept") == [6] and 3 in checkpoint_steps(run / "gold")
        tiny_train(tmp_path, run, resume, **sections, train={"steps": 15, "batch_size": 4, "seq_len": 32})
        golds = [(e["step"], e["previous_step"]) for e in load_run(run).events if e["event"] == "gold_checkpoint"]
        assert golds[:2] == [(3, None), (9, 3)]


def test_an_alarm_names_a_raised_rate_and_another_shape(tmp_path, monkeypatch):
    worse_from(monkeypatch, 4)
    tiny_train(
        write_corpus(tmp_path),
        tmp_path / "run",
        phases=[
            {"name": "a", "until": 3, "mixture": {"web": 1.0}},
            {
                "name": "b",
                "until": "end",
                "mixture": {"web": 1.0},
                "lr": {"peak": 1.2e-3},
                "batch_size": 2,
                "grad_accum": 2,
            },
        ],
        evalsets={"every": 1, "primary": {"held_out_of": "web"}},
        train={"steps": 5, "batch_size": 4, "seq_len": 32},
        optim={"lr": 1e-3, "schedule": "constant", "warmup_steps": 2},
    )
    run = load_run(tmp_path / "run")
    (alarm, *_) = [e for e in run.events if e["event"] == "eval_regression"]
    rates = {o["baseline"]: (o["baseline_step"], o["rate_rise"]) for o in alarm["offenders"]}
    assert alarm["step"] == 4
    raised = [1e-3, 1.2e-3]  # since step 0 too: up to the end of the warmup, 1e-3, is no rise
    assert rates == {"start": (0, raised), "phase_start": (3, raised), "best": (3, raised)}
    assert alarm["offenders"][0]["shape_change"] == {"batch_size": [4, 2]}
    told = "(since step 3: batch_size 4 → 2, learning rate 0.001 → 0.0012)"
    assert told in (tmp_path / "run/train.log").read_text()


def test_an_alarm_names_what_was_read_again(tmp_path, monkeypatch):
    worse_from(monkeypatch, 4)
    tiny_train(
        write_corpus(tmp_path),
        tmp_path / "run",
        sources={name: {"path": str(tmp_path / f"{name}.jsonl"), "held_out": "80%"} for name in ("web", "law")},
        phases=[{"name": "a", "until": "end", "mixture": {"web": 0.75, "law": 0.25}}],
        evalsets={"every": 2, "primary": {"held_out_of": "web"}},
        train={"steps": 12, "batch_size": 16, "seq_len": 32},
    )
    run = load_run(tmp_path / "run")
    (alarm, *_) = [e for e in run.events if e["event"] == "eval_regression"]
    size = run.events[0]["sources"]["web"]["tokens_per_epoch"]
    then, now = (round(step * 12 * 32 / size, 3) for step in (6, 8))  # 12 of 16 sequences an update
    assert alarm["step"] == 8 and now > 1.1
    law = 8 * 4 * 32 / run.events[0]["sources"]["law"]["tokens_per_epoch"]
    assert 0 < law < 1  # is read for the first time
    again = {o["baseline"]: o["repeated"] for o in alarm["offenders"]}
    assert again == {"start": {"web": [0.0, now]}, "phase_start": {"web": [0.0, now]}, "best": {"web": [then, now]}}
    assert f"(since step 6: epochs of web {then:.2f} → {now:.2f})" in (tmp_path / "run/train.log").read_text()


def test_that_no_more_verdicts_are_possible_is_told_once(tmp_path):
    """A run that goes on with a higher confidence than what it has spent allows."""
    phases = [{"name": "a", "until": "end", "mixture": {"web": 1.0}}]
    write_corpus(tmp_path)
    for resume, steps, confidence in ((None, 6, 0.6), ("latest", 12, 0.999), ("latest", 15, 0.999)):
        evalsets = tiny_data(tmp_path)["evalsets"] | {"regression": {"confidence": confidence}}
        sizes = {"steps": steps, "batch_size": 4, "seq_len": 32}
        optim = {"lr": 3e-3, "schedule": "constant"}
        tiny_train(tmp_path, tmp_path / "run", resume, phases=phases, evalsets=evalsets, train=sizes, optim=optim)
    notes = [(e["step"], note) for e in load_run(tmp_path / "run").events for note in e.get("notes", [])]
    ((step, told),) = [(step, note) for step, note in notes if note.startswith("no more verdicts: ")]
    assert step == 9 and told.endswith(" is used up; lower the confidence to allow more comparisons")


def test_a_set_too_small_for_its_tolerance_is_told_once_in_the_life_of_a_run(tmp_path, monkeypatch):
    sections = {
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
        "evalsets": {
            "every": 1,
            "primary": {"held_out_of": "web", "tolerance": 9.0},
            "sets": {"law": {"held_out_of": "law", "tolerance": 1e-7}},
        },
        "optim": {"lr": 3e-3, "schedule": "constant"},
        "checkpoint": {"every": 9},
    }

    def told(name="run"):
        notes = [(e["step"], note) for e in load_run(tmp_path / name).events for note in e.get("notes", [])]
        return [(step, note) for step, note in notes if not note.startswith("maybe worse: ")]

    write_corpus(tmp_path)
    tiny_train(tmp_path, tmp_path / "run", **sections, train={"steps": 9, "batch_size": 4, "seq_len": 32})
    (rise_step, rise), (step, small) = found = told()
    assert rise_step == step == 9 and rise.startswith("smallest rise that an eval finds with 80 % power, in nats: val ")
    assert small.startswith("eval set law is too small for its tolerance of 1e-07 nats: the choice of its ")
    assert small.endswith(" alone hides rises of twice that; give it more text, or a higher tolerance")
    tiny_train(tmp_path, tmp_path / "run", "latest", **sections, train={"steps": 18, "batch_size": 4, "seq_len": 32})
    assert len(load_run(tmp_path / "run").evals()) == 19 and told() == found
    monkeypatch.setattr("curriculum.record.wording.MAX_RISE", 9.0)  # no rise of which can be found: it is the tolerance
    tiny_train(tmp_path, tmp_path / "few", **sections, train={"steps": 9, "batch_size": 4, "seq_len": 32})
    assert ": val above 9, law 0" in told("few")[0][1]


def test_a_smallest_rise_that_is_of_the_documents_alone_will_not_become_less(tmp_path, monkeypatch):
    """Evals whose losses are equal, while their documents rise and fall."""
    rng = np.random.default_rng(0)
    measured = Suite.run

    def even(self, params, names=None, **how):
        def moved(r):
            own_N = rng.normal(0, 0.1, r.document_N.max() + 1)[r.document_N]
            own_N -= np.sum(own_N * r.tokens_N) / np.sum(r.tokens_N)
            return r._replace(nats_N=r.tokens_N * (3 + own_N))

        return {name: moved(r) for name, r in measured(self, params, names, **how).items()}

    monkeypatch.setattr(Suite, "run", even)
    evalsets = {"every": 1, "primary": {"held_out_of": "web"}}
    phases = [{"name": "a", "until": "end", "mixture": {"web": 1.0}}]
    write_corpus(tmp_path)
    train_section = {"steps": 9, "batch_size": 4, "seq_len": 32}
    tiny_train(tmp_path, tmp_path / "run", phases=phases, evalsets=evalsets, train=train_section)
    notes = [note for e in load_run(tmp_path / "run").events for note in e.get("notes", [])]
    (rise,) = [note for note in notes if note.startswith("smallest rise")]
    assert re.search(r"nats: val 0\.\d{4}$", rise)
