"""What a run would do that goes on with a config, told before it does: held against what it then does."""

import copy
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import run
from tiny_run import flip_bit, tiny_data, with_changes, write_corpus

from curriculum.cli.plan import table
from curriculum.config import build_config
from curriculum.data.corpus import load_corpus
from curriculum.disk.lock import RunLock
from curriculum.errors import InputError
from curriculum.plan_resumed import plan_resumed
from curriculum.run import load_run
from curriculum.train import trainer
from curriculum.train.resuming import opening
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run

STEP = 8  # of 12, in the second phase, and before the decay


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of 12 steps, `run`, its text, and `store`."""
    place = write_corpus(tmp_path_factory.mktemp("planned"))
    (place / "val.txt").write_text("a lazy dog jumps over the party of the first part\n" * 8)
    shutil.copy(place / "web.jsonl", place / "more.jsonl")
    train(config_of(place), place / "run", store_dir=place / "store")
    return place


def data_of(place):
    data = tiny_data(place, evalsets={"every": 3, "primary": {"path": str(place / "val.txt")}})
    return {**data, "sources": {name: {"path": str(place / f"{name}.jsonl")} for name in ("web", "law")}}


def config_of(place, **changes):
    return build_config(with_changes(copy.deepcopy(data_of(place)), changes))


def files_of(folder):
    """Every file with its content and time."""
    found = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(folder).rglob("*") if path.is_file()}
    assert found
    return found


def planned_and_trained(place, copied, step=STEP, accept_past=False, begun="run", **changes):
    """(plan, run) of the config that goes on, the run being trained in a copy that the plan was made of."""
    shutil.copytree(place / begun, copied)
    config, before = config_of(place, **changes), files_of(copied)
    planned = plan_resumed(config, copied, step, accept_past=accept_past, store_dir=place / "store")
    assert files_of(copied) == before
    train(config, copied, resume=step, accept_past=accept_past, store_dir=place / "store")
    return planned, load_run(copied)


def test_it_needs_no_jax(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from curriculum.config import build_config\n"
        "from curriculum.plan_resumed import plan_resumed\n"
        "config = build_config(json.loads(Path('c.json').read_text()))\n"
        f"planned = plan_resumed(config, {str(tmp_path / 'run')!r}, {STEP}, store_dir='store')\n"
        "print(planned.resumes['step'], *({'jax', 'optax', 'orbax', 'tensorboard', 'datasets'} & set(sys.modules)))\n"
    )
    (place / "c.json").write_text(json.dumps(with_changes(copy.deepcopy(data_of(place)), {"optim__lr": 4e-3})))
    done = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{STEP}\n"), done.stderr


PHASES = [{"name": "a", "until": 6, "mixture": {"web": 1.0}}, {"name": "b", "until": "end", "mixture": {"law": 1.0}}]
SHORTER = [PHASES[0], {**PHASES[1], "until": 10}, {"name": "c", "until": "end", "mixture": {"web": 0.5, "law": 0.5}}]
EDITS = {
    "more steps": {"train__steps": 20},
    "another mixture from now on": {"phases": [PHASES[0], {**PHASES[1], "mixture": {"web": 0.25, "law": 0.75}}]},
    "a phase more": {"phases": SHORTER},
    "another rate": {"optim__lr": 4e-3},
    "what is no schedule": {"optim__weight_decay": 0.05},
    "a set less often": {"evalsets__every": 4},
    "a set more": {"evalsets__sets": {"more": {"path": "val.txt"}}},
    "an end here": {"train__steps": STEP},
    "a phase that begins here": {"phases": [PHASES[0], {**PHASES[1], "until": STEP}, SHORTER[2]]},
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_plan_is_what_the_run_does(edit, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    planned, run = planned_and_trained(place, tmp_path / "run", **EDITS[edit])
    (told,) = (e for e in run.events if e["event"] == "schedule_edit")
    at = next(i for i, event in enumerate(run.events) if event["event"] == "resume")
    ahead = [event["event"] for event in run.events[at:]]
    assert (planned.evals["num"], planned.checkpoints["num"]) == (ahead.count("eval"), ahead.count("checkpoint"))
    said = planned.resumes["edit"]
    assert said["changes"] and {**{key: told[key] for key in said}, "warnings": []} == said
    assert list(planned.phases) == run.plan["phases"]
    assert planned.total_steps == run.complete["total_steps"] == max(row["step"] for row in run.metrics)
    assert planned.total_tokens == run.complete["total_tokens"]
    (next_lr,) = [row["lr"] for row in run.metrics if row["step"] == STEP + 1] or [None]
    assert planned.resumes["lr"] == next_lr and (next_lr is None) == (edit == "an end here")


def test_a_ramp_that_an_edit_lengthens_is_told_with_the_step_of_its_end(place, tmp_path):
    def ramp_of(steps):
        return {"phases": [PHASES[0], {**PHASES[1], "ramp_steps": steps}]}

    train(config_of(place, **ramp_of(4)), place / "ramped", store_dir=place / "store")
    planned, run = planned_and_trained(place, tmp_path / "run", begun="ramped", **ramp_of(6))
    # Of the steps 6 to 11 two were taken: update 8 is the third of six.
    turn = {"step": 8, "mixture": {"law": 1.0}, "ramp_end": 12}
    assert planned.phases[1]["remixed"] == [turn] and run.plan["phases"] == list(planned.phases)
    (told,) = (e for e in run.events if e["event"] == "schedule_edit")
    assert told["mixture_after"] == pytest.approx({"law": 1 / 2, "web": 1 / 2})
    assert inspect_run(run)["phases"][1]["edits"] == [{**turn, "kind": "config"}]
    assert "6 to 12 (ramp 4, from step 8 a ramp to step 12), trained to 8" in "\n".join(table(planned))


def test_a_mesh_has_to_divide_the_rows_of_phases_ahead_alone(place, tmp_path):
    phases = [{**PHASES[0], "batch_size": 3}, PHASES[1]]
    data = with_changes(data_of(place), {"phases": phases, "checkpoint": {"every": 2, "keep": 9}})
    train(build_config(data), tmp_path / "run", store_dir=place / "store")
    on_two = build_config({**data, "mesh": {"data": 2}}, continues=tmp_path / "run")
    assert plan_resumed(on_two, tmp_path / "run", STEP, store_dir=place / "store").resumes["step"] == STEP
    with pytest.raises(InputError, match=r"phases\[0\].batch_size: got 3 .* data x fsdp \(2\) divides"):
        plan_resumed(on_two, tmp_path / "run", 4, store_dir=place / "store")
    with pytest.raises(InputError, match=r"phases\[0\].batch_size: got 3 .* data x fsdp \(2\) divides"):
        build_config({**data, "mesh": {"data": 2}})


def test_without_an_edit_nothing_changes(place, tmp_path):
    planned, run = planned_and_trained(place, tmp_path / "run")
    assert planned.resumes["edit"] is None and planned.resumes["step"] == STEP
    assert not [e for e in run.events if e["event"] == "schedule_edit"]
    assert list(planned.phases) == run.plan["phases"]


def test_an_accepted_past_is_counted_as_it_was_trained(place, tmp_path):
    law = {"sources": {"law": {"path": str(place / "law.jsonl")}}, "phases": [{**PHASES[1], "name": "b"}]}
    with pytest.raises(InputError, match="a is gone"):
        plan_resumed(config_of(place, **law), place / "run", STEP, store_dir=place / "store")
    planned, run = planned_and_trained(place, tmp_path / "run", accept_past=True, **law)
    (told,) = (e for e in run.events if e["event"] == "schedule_edit")
    assert planned.resumes["edit"]["accepted_past"] and told["reason"] == planned.resumes["edit"]["reason"]
    rows = {(row.phase, row.source): row for row in planned.rows}
    assert rows["a", "web"].tokens == 6 * 4 * 32  # as many steps of as many rows and tokens
    assert rows["b", "law"].tokens == 6 * 4 * 32
    # Of web, which the config no longer has, the run knows the size of an epoch.
    web = run.start["sources"]["web"]["tokens_per_epoch"]
    assert rows["a", "web"].epochs_so_far == pytest.approx(6 * 4 * 32 / web)


def test_what_is_asked_of_a_phase_that_became_larger_on_its_way_counts_its_tokens(place):
    """Of its 6 updates, 2 of law alone and 4 of eight times as many rows, a quarter of them web: 32 / 34 * 0.25."""
    size = config_of(place).train.batch_size
    phases = [PHASES[0], {**PHASES[1], "mixture": {"web": 0.25, "law": 0.75}, "batch_size": 8 * size}]
    told = plan_resumed(config_of(place, phases=phases), place / "run", STEP, store_dir=place / "store")
    web = next(row for row in told.rows if (row.phase, row.source) == ("b", "web"))
    assert web.share_asked == pytest.approx(32 / 34 * 0.25) == web.share_given


def test_a_source_that_was_never_read_may_go(place, tmp_path):
    """Not even its name is in the schedule then."""
    alone = [{**PHASES[0], "until": 10}, PHASES[1]]  # up to 10 nothing of law is read
    train(config_of(place, phases=alone), tmp_path / "run", store_dir=place / "store")
    web = {"sources": {"web": {"path": str(place / "web.jsonl")}}, "phases": [{**PHASES[0], "until": "end"}]}
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "run", copied)
    planned = plan_resumed(config_of(place, **web), tmp_path / "run", STEP, store_dir=place / "store")
    train(config_of(place, **web), copied, resume=STEP, store_dir=place / "store")
    assert list(planned.phases) == load_run(copied).plan["phases"]
    assert [row.source for row in planned.rows] == ["web"]


REFUSED = {
    "phases[0].mixture": {"phases": [{**PHASES[0], "mixture": {"web": 0.5, "law": 0.5}}, PHASES[1]]},
    "seed": {"seed": 5},
    "model": {"model__n_layer": 2},
    "optim.name": {"optim__name": "lion"},
    "tokenizer": {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
    "packing.mode": {"packing": {"mode": "best_fit"}},
    "train.steps": {"train__steps": 4},
    "train.seq_len": {"train__seq_len": 64},
    "adaptation.keep_optimizer": {"adaptation": {"init_from": "nowhere", "keep_optimizer": True}},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_training_refuses_is_refused_alike(path, place):
    config = config_of(place, **{k: v for k, v in REFUSED[path].items() if k != "adaptation"})
    if "adaptation" in REFUSED[path]:  # the file is not read for its base again where a run goes on
        config = build_config({**data_of(place), **REFUSED[path]}, check_paths=False)
    load_corpus(config, place / "store")  # what is not prepared is not looked at
    before = files_of(place / "run")
    with pytest.raises(InputError) as planned:
        plan_resumed(config, place / "run", STEP, store_dir=place / "store")
    assert files_of(place / "run") == before
    with pytest.raises(InputError) as trained:
        train(config, place / "run", resume=STEP, store_dir=place / "store")
    assert (planned.value.problems, planned.value.details) == (trained.value.problems, trained.value.details)


def test_an_earlier_checkpoint_that_would_do_is_named_alike(place):
    config = config_of(place, train__steps=20)  # the rate has decayed at 12
    with pytest.raises(InputError) as planned:
        plan_resumed(config, place / "run", store_dir=place / "store")
    with pytest.raises(InputError) as trained:
        train(config, place / "run", resume="latest", store_dir=place / "store")
    assert planned.value.problems == trained.value.problems
    assert planned.value.details == trained.value.details != []
    assert planned.value.details[-1].endswith("--resume 10")


def test_a_plan_asks_for_no_login_and_a_run_asks_once_its_schedule_is_known_to_resolve(place, monkeypatch):
    asked = []
    for module in (opening, trainer):
        monkeypatch.setattr(module, "check_wandb", asked.append)
    wandb = {"project": "p", "mode": "online"}
    for train__steps in (16, 20):  # at 20 the rate jumps, as it has decayed at 12
        config = config_of(place, train__steps=train__steps, logging__wandb=wandb)
        with suppress(InputError):
            plan_resumed(config, place / "run", store_dir=place / "store")
    with pytest.raises(InputError, match="the learning rate jumps"):
        train(config, place / "run", resume="latest", store_dir=place / "store")
    assert asked == []


def test_a_source_whose_documents_an_eval_set_has_is_unknown_while_the_set_is(place, tmp_path):
    """What an eval set has of a source is not trained on: which text that leaves is known with the set alone."""
    rows = [json.dumps({"text": f"whereas the party of part {i} shall"}) for i in range(200)]
    (tmp_path / "law.jsonl").write_text("\n".join(rows))
    (tmp_path / "some.jsonl").write_text("\n".join(rows[:2]))
    law, some = ({"path": str(tmp_path / name)} for name in ("law.jsonl", "some.jsonl"))
    config = config_of(place, sources__law=law, evalsets__sets={"some": some})
    train(config, tmp_path / "run", store_dir=tmp_path / "store")
    assert load_run(tmp_path / "run").start["sources"]["law"]["dropped_documents"] == {"some": 2}
    (tmp_path / "some.jsonl").touch()  # not looked at again until it is prepared
    told = plan_resumed(config, tmp_path / "run", STEP, store_dir=tmp_path / "store")
    assert told.resumes["edit"] is None
    assert any("measured on: eval sets some (run" in warning for warning in told.warnings)


@pytest.mark.parametrize("which", ["web.jsonl", "val.txt"])
def test_text_that_changed_is_unknown_until_it_is_prepared_and_then_refused(which, place, tmp_path):
    for path in place.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    data = json.loads(json.dumps(data_of(place)).replace(str(place), str(tmp_path)))
    store, run = tmp_path / "store", tmp_path / "run"
    config = build_config(data)
    load_corpus(config, store)
    text = (tmp_path / which).read_text()
    (tmp_path / which).write_text(text.replace("party", "parties").replace("brown", "red"))
    name, kind = {"web.jsonl": ("web", "sources"), "val.txt": ("primary", "eval sets")}[which]
    told = plan_resumed(config, run, STEP, store_dir=store)
    assert told.resumes["edit"] is None
    unknown = "not prepared yet, so it cannot be checked against the text that the run was trained or measured on: "
    assert [w for w in told.warnings if w.startswith(f"{unknown}{kind} {name} (run `curriculum prepare")]
    load_corpus(config, store)
    with pytest.raises(InputError, match=f"{name}: i(s not the set that|ts training text has changed)"):
        plan_resumed(config, run, STEP, store_dir=store)


def test_a_run_that_trains_is_looked_at_all_the_same_and_damage_is_told(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/12"
    flip_bit(max((path for path in (newest / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size))
    with RunLock(tmp_path / "run") as lock:
        lock.take()
        told = plan_resumed(config_of(place), tmp_path / "run", store_dir=place / "store")
    assert told.resumes["step"] == 10 and newest.is_dir()
    assert told.warnings[0].startswith(f"{newest}: is damaged: ") and told.warnings[0].endswith("; skipped")


def test_a_run_that_may_not_be_written_to_is_planned_all_the_same(place, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    assert plan_resumed(config_of(place), place / "run", STEP, store_dir=place / "store").resumes["step"] == STEP
    with pytest.raises(InputError, match="is not a writable folder"):
        train(config_of(place), place / "run", resume=STEP, store_dir=place / "store")


def test_the_command(place, tmp_path):
    began = str(place / "run")

    def told(*options, **changes):
        (tmp_path / "c.yaml").write_text(json.dumps(config_of(place, **changes).to_json()))
        return run(tmp_path, "plan", "c.yaml", *options, "--store-dir", str(place / "store"))

    def of_run(step, *options, **changes):
        done = told("--resume", step, "--run-dir", began, *options, **changes)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    finished = f"{began} is finished: 12 of 12 steps; nothing is left to train"
    assert of_run("latest").splitlines()[1] == finished
    _, goes_on, same, *rest = of_run("8").splitlines()
    assert goes_on == f"{began} continues at step 8, with a learning rate of 0.003"
    assert same == "the config changes nothing that is trained or judged"
    assert any("0 to 6, trained " in line for line in rest) and any("6 to 12, trained to 8 " in line for line in rest)
    _, ends, edit, *_ = of_run("8", train__steps=8).splitlines()
    assert ends == f"{began} ends at step 8"
    assert edit == "schedule edit at step 8: train.steps 12 → 8 | b until step 8"
    edit = "schedule edit at step 8: train.steps 12 → 20 | b until step 20"
    assert of_run("8", train__steps=20).splitlines()[2] == edit
    resumes = json.loads(of_run("8", "--json", train__steps=20))["resumes"]
    assert (resumes["step"], resumes["edit"]["reason"]) == (8, "train.steps 12 → 20")
    reshaped = of_run("8", phases=[PHASES[0], {**PHASES[1], "batch_size": 8}]).splitlines()
    size = data_of(place)["train"]
    small, large = size["batch_size"] * size["seq_len"], 8 * size["seq_len"]
    assert (
        small != large
        and f"12 steps of {small:,} to {large:,} tokens = {8 * small + 4 * large:,} tokens" in reshaped[0]
    )
    shapes = [line.split("  ")[0] for line in reshaped[reshaped.index("") + 2 :]]
    assert shapes[: shapes.index("")] == ["a", "b", "b from step 8"]
    # What is trained of the phase had fewer rows than the micro-steps that are to come.
    cut = json.loads(of_run("8", "--json", phases=[PHASES[0], {**PHASES[1], "batch_size": 16, "grad_accum": 8}]))
    of_b = cut["phases"][1]
    assert (of_b["batch_size"], of_b["grad_accum"]) == (size["batch_size"], size["batch_size"]) and size[
        "batch_size"
    ] < 8
    assert [(turn["step"], turn["batch_size"], turn["grad_accum"]) for turn in of_b["reshaped"]] == [(8, 16, 8)]
    (other,) = [line for line in of_run("8", tokenizer={"kind": "char"}).splitlines() if "tokenizer: differs" in line]
    assert (
        "tokenizer: differs from the run's (kind: byte) and is not prepared yet; train will refuse it unless" in other
    )
    refused = told("--resume", "8", "--run-dir", began, seed=3)
    assert refused.returncode == 2
    assert "seed: got 3, but steps 0 to 8 were trained with 1337" in refused.stderr


def test_the_command_where_no_run_goes_on(place, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps(config_of(place).to_json()))
    done = run(tmp_path, "plan", "c.yaml", "--resume", "latest")
    assert done.returncode == 0
    begins = "warning: runs/tiny: holds no run: nothing to resume; the run starts at step 0"
    assert begins in done.stdout.splitlines() and not (tmp_path / "runs").exists()
    for options in (["--run-dir", "there"], ["--accept-past"]):
        refused = run(tmp_path, "plan", "c.yaml", *options)
        expected = f"error: {options[0]}: has no effect on the plan of a new run; give --resume, or leave it out"
        assert (refused.returncode, refused.stderr.splitlines()[0]) == (2, expected)
