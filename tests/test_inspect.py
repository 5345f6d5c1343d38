"""What a run directory says of its run, finished or in progress."""

import html
import json
import math
import re
import shutil
import socket
import subprocess
import sys

import processor
import pytest
from command_line import run_here
from locked import locked_by_another
from test_trainer import config_data, corpus, store  # noqa: F401  (fixtures)
from tiny_run import tiny_data, tiny_train, write_corpus
from written_run import command, offender, without, write_run

from curriculum.config import build_config
from curriculum.disk.lock import RunLock
from curriculum.errors import InputError, no_such, no_such_path
from curriculum.find_checkpoint import CHECKPOINT_ITEMS, find_checkpoint, read_ledger
from curriculum.plan import plan
from curriculum.record import queries
from curriculum.record.queries import (
    consumption,
    eval_points,
    evalset_facts,
    last_detectable,
    standing_regressions,
    warned_sets,
)
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.saved_weights import Weights
from curriculum.train.trainer import train
from curriculum.views import inspection
from curriculum.views.compare import compare
from curriculum.views.inspection import edits_of, inspect_run
from curriculum.views.inspection_text import mixture_text, text
from curriculum.views.model_card_sections import evals, training
from curriculum.views.report import report
from curriculum.views.run_list import list_runs, runs_text

LOSSES = {"val": lambda step: 3 - step / 100, "law": lambda step: 4.0 if step in (0, 60, 100) else None}


def shown(run_dir) -> str:
    """The lines, runs of spaces made one."""
    return "\n".join(" ".join(line.split()) for line in text(inspect_run(load_run(run_dir))))


def test_what_was_set_aside_is_told_by_its_size(tmp_path):
    path = write_run(tmp_path / "run", LOSSES)
    assert inspect_run(load_run(path))["superseded_bytes"] == 0 and "superseded" not in shown(path)
    for name, num_bytes in (("20/params/a", 1_400_000), ("gold/20/params/b", 90_000)):
        file = path / "superseded" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(num_bytes))
    (path / "superseded/gold/20/params/a").hardlink_to(path / "superseded/20/params/a")  # takes nothing more
    assert inspect_run(load_run(path))["superseded_bytes"] == 1_490_000
    line = f"superseded 1.5 MB in {path}/superseded, set aside by resumes and rollbacks: may be deleted"
    assert line in shown(path).splitlines()
    shutil.rmtree(path / "superseded")
    for name, num_bytes, size in (("a", 40, "40 bytes"), ("b", 3_210, "3.2 kB")):
        (path / "superseded").mkdir(exist_ok=True)
        (path / "superseded" / name).write_bytes(bytes(num_bytes))
        assert f"superseded {size} in " in shown(path)


def test_a_finished_run(tmp_path):
    more = {80: [("gold_checkpoint", {"metric": "primary/loss", "value": 2.2, "previous": None, "path": "gold/80"})]}
    path = write_run(tmp_path / "run", LOSSES, more=more, detectable={"val": 0.0213, "law": None})
    for folder in ("checkpoints/60", "checkpoints/100"):
        for item in CHECKPOINT_ITEMS:
            (path / folder / item).mkdir(parents=True)
    (path / "checkpoints/80/params").mkdir(parents=True)  # is being saved
    with locked_by_another(path):
        assert f"primary/loss 2.2000 ({path}/gold/80, being saved)" in shown(path)
    assert f"primary/loss 2.2000 ({path}/gold/80, missing)" in shown(path)
    for item in CHECKPOINT_ITEMS:
        (path / "gold/80" / item).mkdir(parents=True)
    facts = inspect_run(load_run(path))
    progress = facts["progress"]
    assert (progress["step"], progress["tokens"], progress["phase"], progress["finished"]) == (
        100,
        10_000,
        "domain",
        True,
    )
    assert facts["checkpoints"] == {"checkpoints": [60, 100], "gold": [80], "kept": []}
    assert facts["gold"] == {
        "step": 80,
        "metric": "primary/loss",
        "value": 2.2,
        "path": "gold/80",
        "missing": False,
        "saving": False,
    }
    law = facts["evals"]["law"]
    assert (law["step"], law["num_evals"], law["detectable"]) == (100, 3, None)
    # 60 steps of 100 tokens in foundation (web 0.8, code 0.2) and 40 in domain (law 0.9, web 0.1); epochs of 10,000.
    foundation, domain = facts["phases"]
    assert foundation["done"] and foundation["tokens"] == {"web": 4_800, "code": 1_200}
    assert domain["done"] and domain["tokens"] == {"web": 400, "law": 3_600}
    assert domain["epochs"] == {"web": 0.52, "code": 0.12, "law": 0.36}
    lines = shown(path)
    resolved = json.loads((path / "config.resolved.json").read_text())
    (path / "config.resolved.json").write_text(json.dumps(resolved | {"model": None}))
    assert f"export {path} --format safetensors -o run-export" in shown(path)
    assert "progress step 100 of 100 (100.0 %), finished; 10,000 tokens" in lines
    row = load_run(path).metrics[-1]
    assert f"training loss {row['loss']:.4f}, learning rate {row['lr']:.3g}" in lines and "few documents" not in lines
    assert "model 1,000 parameters: n_layer 1, d_model 8" in lines
    assert f"export {path} --format hf -o run-export" in lines
    assert "domain 60 to 100 done law 0.9, web 0.1 web 400, law 3,600 web 0.52, code 0.12, law 0.36" in lines
    assert "val 100 2.0000 0.0000 0.7213 3.0000 2.0000 100 0.0213" in lines
    assert f"gold step 80: primary/loss 2.2000 ({path}/gold/80)" in lines
    assert "checkpoints 60, 100" in lines and "in gold 80" in lines and "kept" not in lines
    for folder in ("checkpoints", "gold"):
        shutil.rmtree(path / folder)
    assert "checkpoints none" in (left := shown(path)) and not any(line.startswith("export") for line in left)
    assert "regressed none now (law: the smallest detectable rise is not known)" in lines
    assert (
        f"--run-dir {path} --resume latest --set train.steps=MORE\n" in lines and f"report {path} -o run.html" in lines
    )


def test_a_mixture_that_was_changed_on_its_way(tmp_path):
    before = {"law": 0.9, "web": 0.1}

    def change(kind, was, now):
        edit = {"kind": kind, "phase": "domain", "mixture_before": was, "mixture_after": now, "until": 100}
        return ("schedule_edit", {**edit, "reason": "so"})

    after = {"law": 0.8, "web": 0.2}
    same, first = change("branch", before, before), change("replay", before, {"law": 0.85, "web": 0.15})
    # Of two sets that are replayed from one eval on the first mixture is no step's.
    more = {
        60: [change("replay", before, after)],
        80: [same, first, change("replay", first[1]["mixture_after"], after)],
    }
    path = write_run(tmp_path / "run", LOSSES, more=more)
    foundation, domain = inspect_run(load_run(path))["phases"]
    # What is changed at step 60 is the mixture that the phase begins with.
    assert foundation["edits"] == [] and domain["edits"] == [{"step": 80, "kind": "replay", "mixture": after}]
    lines = shown(path).splitlines()
    at = lines.index("from step 80 law 0.8, web 0.2")  # a line of its own, so that no edit widens the table
    assert lines[at - 1].startswith("domain 60 to 100 done law 0.9, web 0.1 web 400")
    assert "law 90\u00a0%, web 10\u00a0%; from step 80 law 80\u00a0%, web 20\u00a0%" in report([load_run(path)])


def test_a_mixture_that_goes_on_without_an_exhausted_source(tmp_path):
    path = write_run(tmp_path / "run", LOSSES)
    run = load_run(path)
    phase = {**run.plan["phases"][1], "remixed": [{"step": 90, "mixture": {"web": 1.0}}]}
    planned = {"step": 90, "kind": "planned", "mixture": {"web": 1.0}}
    assert edits_of(run.events, phase) == [planned]

    def raised(step):
        before, after = {"law": 0.9, "web": 0.1}, {"law": 0.8, "web": 0.2}
        edit = {"kind": "replay", "phase": "domain", "mixture_before": before, "mixture_after": after, "until": 100}
        return {"event": "schedule_edit", "step": step, **edit}

    told = {"step": 80, "kind": "replay", "mixture": {"law": 0.8, "web": 0.2}}
    start, at = run.events[0], next(i for i, e in enumerate(run.events) if e["step"] == 80)
    # Where a share is raised the source may last longer or not as long; once the run is taken up the plan knows.
    raised_since, taken_up = [*run.events[:at], raised(80)], [start, raised(80), {"event": "resume", "step": 80}]
    assert edits_of(raised_since, phase) == [told] and edits_of(taken_up, phase) == [told, planned]
    assert edits_of([start, raised(95)], phase)[0] == planned


def test_a_ramp_that_was_edited_is_told_with_its_end(tmp_path):
    """The event of the edit has the mixture of its own step, amid the ramp: it is not what the phase goes on with."""
    amid = {"law": 0.3, "web": 0.7}
    edit = {"kind": "config", "phase": "domain", "mixture_before": {"law": 0.5, "web": 0.5}, "mixture_after": amid}
    path = write_run(tmp_path / "run", LOSSES, more={80: [("schedule_edit", {**edit, "until": 100})]})
    run = load_run(path)
    ramp = {"step": 80, "mixture": {"law": 0.9, "web": 0.1}, "ramp_end": 95}
    phase = {**run.plan["phases"][1], "remixed": [ramp]}
    assert edits_of(run.events, phase) == [{**ramp, "kind": "config"}]
    text = mixture_text({**phase, "edits": edits_of(run.events, phase)}, "{:.2g}".format)
    assert text == "law 0.9, web 0.1; from step 80 law 0.9, web 0.1 (ramp to step 95)"


def test_a_branch_begins_and_is_resumed(tmp_path):
    base = write_run(tmp_path / "base", LOSSES)
    devices = json.loads((base / "events.jsonl").read_text().splitlines()[0])["devices"]
    begun = ("resume", {"devices": devices, "plan": load_run(base).plan, "evalsets": {}, "begins_branch": True})
    resumed = ("resume", {**begun[1], "begins_branch": False})
    point = {"run": "runs/b", "step": 60, "branched_from": {"run": "runs/a", "step": 20, "branched_from": None}}
    for times, said in ((0, "trained for 0s\n"), (1, "s, resumed once\n"), (2, "s, resumed 2 times\n")):
        path = write_run(tmp_path / f"{times}", LOSSES, more={60: [begun, *[resumed] * times]}, branched_from=point)
        assert inspect_run(load_run(path))["progress"]["num_resumes"] == times
        assert said in shown(path)
    assert "lineage branched from runs/b at step 60\nlineage branched from runs/a at step 20\n" in shown(path)
    assert shown(path).startswith(f"{path.name} ({path})")  # not the name that it has from its trunk


def test_a_run_in_progress(tmp_path):
    path = write_run(tmp_path / "run", LOSSES, until=80)
    with open(path / "metrics.jsonl", "a") as metrics, open(path / "events.jsonl", "a") as events:
        metrics.write(json.dumps({"step": 87}) + '\n{"step": 9')
        events.write('{"event": "eva')
    facts = inspect_run(load_run(path))
    assert (facts["progress"]["step"], facts["progress"]["finished"]) == (87, False)
    assert facts["evals"]["law"]["step"] == 60 and facts["evals"]["val"]["step"] == 80
    domain = facts["phases"][1]
    assert not domain["done"] and domain["counted_at_step"] == 80 and domain["tokens"] == {"web": 200, "law": 1_800}
    assert "not finished, in phase domain" in shown(path) and "go on" in shown(path)
    with locked_by_another(path) as pid:
        assert f"being trained by process {pid} on {socket.gethostname()}, in phase domain" in shown(path)
        with pytest.raises(InputError, match=f"is being trained by process {pid} "), RunLock(path) as lock:
            lock.take()
    assert "not finished, in phase domain" in shown(path)
    assert "60 to 100 at 80 law 0.9" in shown(path)


@pytest.mark.parametrize(
    ("law", "few"),
    [
        ({"documents": 20, "clusters": 20}, "val"),
        ({"documents": 25, "clusters": 20, "clustered_by": "blocks"}, "val and law"),  # most are copies
        ({"documents": 25, "clusters": 20, "clustered_by": "documents"}, "val"),  # five are
    ],
)
def test_sets_of_few_documents_are_told(tmp_path, law, few):
    events = write_run(tmp_path / "run", LOSSES) / "events.jsonl"
    first, *rest = events.read_text().splitlines()
    start = json.loads(first)
    start["evalsets"]["primary"] |= {"documents": 3, "clusters": 20}
    start["evalsets"]["law"] |= law
    events.write_text("\n".join([json.dumps(start), *rest]) + "\n")
    over = (
        "fewer than 20 distinct ones each, in 20 windows or more; their standard errors cover more text from the same "
        "documents, not other documents"
    )
    lines = text(inspect_run(load_run(tmp_path / "run")))
    assert f"  few documents {few}: {over}" in lines
    assert lines[1].startswith("  progress      step 100 ")  # all labels have the width of the longest
    page = html.unescape(report([load_run(tmp_path / "run")]))
    assert f"Few documents in {few}: {over}." in page


def test_a_run_that_a_source_ended_says_so_and_how_it_goes_on(tmp_path):
    path = write_run(tmp_path / "run", LOSSES, complete={"train_steps": 300})
    (path / "config.yaml").write_text("name: x")
    lines = shown(path)
    early = "finished early, of 300 steps asked for: a source with on_exhaust: stop is used up"
    assert f"progress step 100 of 100 (100.0 %), {early}; 10,000 tokens" in lines
    assert "--resume latest --set sources.NAME.max_epochs=MORE\n" in lines and "train.steps=MORE" not in lines


def test_of_many_phases_those_around_the_one_under_way_are_shown_and_of_many_sources_the_largest(tmp_path):
    mixture = {f"s{i:02}": 1.0 + i / 10 for i in range(16)}
    phases = [(f"p{i}", 10 * i, 10 * (i + 1), mixture) for i in range(60)]
    lines = text(inspect_run(load_run(write_run(tmp_path / "run", LOSSES, phases=phases, every=10, until=300))))
    shown = [line.split() for line in lines if re.match(r"  (p\d|\.\.\.)", line)]
    assert [row[0] for row in shown] == ["...", *(f"p{i}" for i in range(18, 42)), "..."]
    assert shown[0] == ["...", "18", "before", "0", "to", "180", "done"]
    assert shown[-1] == ["...", "18", "after", "420", "to", "600"]
    assert all(" s15 2.5, s14 2.4, " in line and ", s04 1.4, 4 more  " in line for line in lines if "  p18 " in line)


def test_a_folder_of_runs_has_a_line_each(tmp_path):
    runs = tmp_path / "runs"
    for number in (10, 9):
        write_run(runs / f"run{number}", LOSSES, until=80 if number == 9 else None)
    shutil.copytree(runs / "run9", runs / "torn")
    (runs / "torn/events.jsonl").write_text("{")
    without("phase")(shutil.copytree(runs / "run9", runs / "edited") / "events.jsonl")
    (runs / "no run").mkdir()
    edited, first, second, torn = told = list_runs(runs)
    assert [row["run"] for row in told] == ["edited", "run9", "run10", "torn"]
    assert edited["step"] is None and edited["state"].startswith(f"{runs}/edited/events.jsonl:2: eval has no phase; ")
    whole = inspect_run(load_run(runs / "run9"))
    assert (first["step"], first["total_steps"], second["step"]) == (80, 100, 100)
    assert first["val_loss"] == whole["evals"]["val"]["loss"] and first["regressed"] == []
    assert (first["state"], second["state"]) == ("not finished, in phase domain", "finished")
    assert torn["step"] is None and "events.jsonl" in torn["state"]
    code, out, _, imported = command("inspect", str(runs))
    header, _, line, *_ = out.splitlines()
    assert code == 0 and header.split()[:3] == ["run", "step", "of"] and line.split()[:3] == ["run9", "80", "100"]
    assert "jax" not in imported
    code, out, *_ = command("inspect", str(runs), "--json")
    assert code == 0 and json.loads(out) == told
    assert command("inspect", str(runs / "no run"))[0] == 2
    for whole in ("run9", "run10"):
        shutil.rmtree(runs / whole)
    for given in (("inspect", runs), ("inspect", runs, "--json")):
        assert run_here(*given) == (2, "", f"error: {edited['state']}\nerror: {torn['state']}\n")


def test_a_folder_of_runs_is_listed_without_a_look_at_each_set_of_each_eval(tmp_path, monkeypatch):
    """That of 60 runs with 2,000 evals of 50 sets took most of a minute. `val` need not be in the last eval."""
    write_run(tmp_path / "run", {"val": lambda step: step / 100 if step < 90 else None, "code": lambda step: 2.0})
    looked_at = []

    def counted(events):
        looked_at.append(len(events))
        return eval_points(events)

    monkeypatch.setattr(inspection, "eval_points", counted)
    [row] = list_runs(tmp_path)
    assert (row["val_loss"], row["val_bpb"], looked_at) == (0.8, round(0.8 / 4 / math.log(2), 6), [])
    val = inspect_run(load_run(tmp_path / "run"))["evals"]["val"]
    assert (row["val_loss"], row["val_bpb"]) == (val["loss"], val["bpb"]) and len(looked_at) == 1


def test_a_folder_of_runs_tells_bits_per_byte_and_that_tokenizers_differ(tmp_path):
    for number, fingerprint in enumerate("aab"):
        path = write_run(tmp_path / f"run{number}", LOSSES)
        (path / "tokenizer").mkdir()
        (path / "tokenizer/tokenizer.json").write_text(json.dumps({"fingerprint": fingerprint}))
    shutil.rmtree(tmp_path / "run1/tokenizer")
    rows = list_runs(tmp_path)
    assert [row["tokenizer"] for row in rows] == ["a", None, "b"]
    # Windows of a written run have 4 bytes a token.
    assert rows[0]["val_bpb"] == pytest.approx(rows[0]["val_loss"] / 4 / math.log(2), abs=1e-6)
    header, line, *_, last = runs_text(rows)
    assert "  val loss  val bpb  gold  " in header and f"  {rows[0]['val_bpb']:.4f}  " in line
    assert last == (
        "The runs' tokenizers differ: losses are nats per token, not comparable then; bits per byte (bpb) are."
    )
    assert len(runs_text(rows[:2])) == 3


def test_control_characters_in_names_of_folders_are_not_printed(tmp_path):
    for name in ("\x1b[31mred", "y\u202etxt.exe", "\u6cd5"):
        write_run(tmp_path / "runs" / name, LOSSES)
    report_to = tmp_path / "\x1b[0m.html"
    for arguments in (
        ("inspect", tmp_path / "runs"),
        ("inspect", tmp_path / "runs/\x1b[31mred"),
        ("compare", tmp_path / "runs"),
        ("report", tmp_path / "runs", "-o", report_to),
    ):
        code, out, errors = run_here(*arguments)
        assert code == 0 and not errors and "\\x1b[" in out
        assert not {"\x1b", "\u202e"} & {*out}
    header, *rows = run_here("inspect", tmp_path / "runs")[1].splitlines()
    assert [row.index(" 100") for row in rows] == [header.index("step")] * 2 + [header.index("step") - 1]


def test_a_folder_of_runs_is_none(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / "runs" / name, LOSSES)
    (tmp_path / "runs/no run").mkdir()
    with pytest.raises(InputError, match="runs: holds no run; expected .*; it contains runs: a, b$"):
        load_run(tmp_path / "runs")
    with pytest.raises(InputError, match="events.jsonl: holds no run; expected a directory made by .*train`$"):
        load_run(tmp_path / "runs/a/events.jsonl")


def test_a_run_directory_that_does_not_exist_is_told_with_the_one_that_is_meant(tmp_path):
    write_run(tmp_path / "runs/lawmed", LOSSES)
    (tmp_path / "runs/lawmen").mkdir()
    meant = re.escape(f"train`; it does not exist; did you mean '{tmp_path / 'runs/lawmed'}'?")
    for slip in ("runs/lawmd", "lawmed"):
        with pytest.raises(InputError, match=f"{slip}: holds no run; expected .*{meant}$"):
            load_run(tmp_path / slip)
        with pytest.raises(InputError, match=f"{slip}: holds no run; expected .*{meant}$"):
            find_checkpoint(RunDirectory(tmp_path / slip))
    with pytest.raises(InputError, match="; it does not exist$"):
        load_run(tmp_path / "x")


def test_a_name_in_another_unicode_normalization_is_said_to_be_that(tmp_path):
    """As a folder that a Mac made, and a name that was typed."""
    composed, apart = "\ud55c\uae00", "\u1112\u1161\u11ab\u1100\u1173\u11af"
    write_run(tmp_path / apart, LOSSES)
    same = "the same letters in another Unicode normalization, NFC or NFD"
    with pytest.raises(InputError, match=f"did you mean '.*{apart}'\\? \\({same}\\)$"):
        load_run(tmp_path / composed)
    assert no_such_path(tmp_path / composed).endswith(f"{apart}'? ({same}) (paths are relative to the working folder)")
    assert (
        no_such("key", composed, ["text", apart])
        == f"no such key; did you mean '{apart}'? ({same}) (keys: text, {apart})"
    )
    assert same not in no_such("key", "txt", ["text"])


def test_consumption_leaves_out_a_future_that_was_set_aside(tmp_path):
    path = write_run(tmp_path / "run", LOSSES, until=80)
    assert [row["step"] for row in consumption(load_run(path))] == [60, 80]
    lines = [e for e in (path / "events.jsonl").read_text().splitlines() if json.loads(e)["step"] <= 60]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")  # resumed from step 60; the summary is of step 80
    assert [row["step"] for row in consumption(load_run(path))] == [60]


def test_a_record_that_ends_with_a_dip_of_an_earlier_step_has_come_as_far_as_its_evals(tmp_path):
    """The eval after a dip decides on it, and the event has the step of the dip."""
    dip = {"metric": "primary/loss", "value": 2.2, "best": 2.0, "best_step": 20, "guard": "trend", "reason": "trend: a"}
    path = write_run(tmp_path / "run", LOSSES, until=80, more={80: [("gold_blocked", dip)]})
    *lines, last = (path / "events.jsonl").read_text().splitlines()
    assert json.loads(last)["event"] == "gold_blocked"
    (path / "events.jsonl").write_text("\n".join([*lines, json.dumps(json.loads(last) | {"step": 60})]) + "\n")
    (path / "metrics.jsonl").unlink()
    run = load_run(path)
    assert [row["step"] for row in consumption(run)] == [60, 80] and inspect_run(run)["progress"]["step"] == 80


def test_what_stands_after_many_evals_is_read_from_few_of_them(tmp_path, monkeypatch):
    """The evals of a long run are tens of thousands of numbers, which a list of runs need not all look at."""
    alarm = {"phase": "domain", "offenders": [offender("code", "best", 0, first_step=64)], "action": None}
    falling = {name: lambda step: 3 - step / 100 for name in ("val", "code")}
    run = load_run(write_run(tmp_path / "run", falling, every=2, more={64: [("eval_regression", alarm)]}))
    read = []
    eval_sets = queries.eval_sets
    monkeypatch.setattr(queries, "eval_sets", lambda event: read.append(event["step"]) or eval_sets(event))
    (standing,) = standing_regressions(run.events)
    assert standing["now"] == {"step": 100, "loss": 2.0} and read == [100]
    assert warned_sets(run.events) == set() and read == [100]
    # A set that only an earlier eval measured is looked for there.
    later = [{k: v for k, v in e.items() if not k.startswith("eval_code")} if e["step"] > 90 else e for e in run.events]
    (standing,) = standing_regressions(later)
    assert standing["now"] == {"step": 90, "loss": 2.1} and read == [100, 100, 98, 96, 94, 92, 90]


def test_evals_are_not_gone_through_for_each_phase(tmp_path, monkeypatch):
    edit = {"kind": "config", "phase": "domain", "mixture_before": {"law": 1.0}, "mixture_after": {"web": 1.0}}
    run = load_run(write_run(tmp_path / "run", LOSSES, more={80: [("schedule_edit", {**edit, "until": 100})]}))
    gone_through = []
    edits_of = inspection.edits_of
    monkeypatch.setattr(inspection, "edits_of", lambda e, phase: gone_through.append(len(e)) or edits_of(e, phase))
    phases = inspect_run(run)["phases"]
    assert [[e["step"] for e in phase["edits"]] for phase in phases] == [[], [80]] and gone_through == [2, 2]


def test_a_run_that_has_just_begun(tmp_path):
    path = write_run(tmp_path / "run", {"val": lambda step: None}, until=0)
    (path / "metrics.jsonl").unlink()
    (path / "training_state.json").unlink()
    lines = shown(path)
    assert "no eval yet" in lines and "checkpoints none" in lines and "gold none" in lines


def test_regressions_stand_until_they_recover_or_their_phase_ends():
    def event(kind, step, **fields):
        return {"event": kind, "step": step, **fields}

    def regressed(step, phase, *pairs):
        return event("eval_regression", step, phase=phase, offenders=[offender(*p, 0, first_step=step) for p in pairs])

    def standing(*events):
        return [(o["set"], o["baseline"]) for o in standing_regressions(events)]

    first_eval = event("eval", 0, phase="a")
    alarm = regressed(10, "a", ("general", "best"), ("general", "phase_start"), ("code", "start"))
    assert standing(first_eval) == []
    assert standing(first_eval, alarm) == [("general", "best"), ("general", "phase_start"), ("code", "start")]
    switch = event("phase_switch", 20, from_phase="a", new_phase="b")
    assert standing(first_eval, alarm, switch) == [("general", "best"), ("code", "start")]
    recovered = event("eval_recovered", 30, phase="b", offenders=[offender("code", "start", 0, first_step=10)])
    assert standing(first_eval, alarm, switch, recovered) == [("general", "best")]
    # At a boundary the verdicts come after the switch and speak of the phase that closed.
    closing = regressed(20, "a", ("law", "phase_start"), ("law", "best"))
    assert standing(first_eval, switch, closing) == [("law", "best")]
    # One whose set was not measured with the others has the step that it was measured at.
    early = {**offender("law", "best", 0, first_step=10), "step": 15}
    (stale,) = standing_regressions([first_eval, event("eval_regression", 20, phase="a", offenders=[early])])
    assert stale["step"] == 15 and standing_regressions([first_eval, closing])[0]["step"] == 20
    # What joins a standing alarm is told by the eval alone.
    joined = [offender("code", "best", 0, first_step=10), offender("code", "phase_start", 0, first_step=10)]
    joining = event("eval", 20, phase="a", joined=joined)
    assert standing(first_eval, alarm, joining)[2:] == [("code", "start"), ("code", "best"), ("code", "phase_start")]
    assert standing(first_eval, alarm, joining, switch)[1:] == [("code", "start"), ("code", "best")]
    # One of a set that the run goes on without ends.
    gone = event("resume", 20, evalsets={"primary": {}, "general": {}})
    assert standing(first_eval, alarm, gone) == [("general", "best"), ("general", "phase_start")]
    # Of the phase that runs the alarm stands, and the newest numbers are told.
    again = regressed(40, "b", ("law", "phase_start"))
    assert standing(first_eval, switch, closing, again) == [("law", "phase_start"), ("law", "best")]


def test_what_stands_regressed_is_told(tmp_path):
    alarm = {"phase": "domain", "action": None, "offenders": [offender("law", "best", 60, first_step=80)]}
    path = write_run(tmp_path / "run", LOSSES, more={80: [("eval_regression", alarm)]})
    # The numbers are those of the alarm; the set was measured once more.
    assert (
        "regressed law 2.1000 → 2.6000 at step 80 (+0.5000, 95 % +0.4000 to +0.6000) against its best at step 60 "
        "(since then: web 0.8 → 0.1), alarm since step 80; now 4.0000 at step 100\n" in shown(path)
    )
    # The start, the phase's start and the best may be one eval; an alarm that began at another step is another line.
    same = [offender("law", baseline, 60, first_step=80) for baseline in ("start", "phase_start", "best")]
    alarm["offenders"] = [*same, offender("val", "start", 0, first_step=60), offender("val", "best", 0, first_step=80)]
    path = write_run(tmp_path / "same", LOSSES, more={80: [("eval_regression", alarm)]})
    told = [line for line in shown(path).splitlines() if line.startswith("regressed")]
    assert len(told) == 3 and "against its start, phase start and best at step 60 (since then: web " in told[0]
    assert (
        "against its start at step 0 (since then: web 0.8 → 0.1), alarm since step 60" in told[1]
        and "its best at step 0 (since then: web 0.8 → 0.1), alarm since step 80" in told[2]
    )
    page = report([load_run(path)])
    assert page.count("law 2.1000 → 2.6000") == 1 and page.count("its start, phase start and best at step 60") == 1
    alarm["offenders"] = [offender("law", "best", 60, first_step=80)]
    path = write_run(tmp_path / "ended", LOSSES, more={100: [("eval_regression", alarm)]})
    assert "at step 60 (since then: web 0.8 → 0.1), alarm since step 80\n" in shown(path)


def test_a_set_that_may_be_worse_is_told_of_while_it_is_measured(tmp_path):
    start = load_run(write_run(tmp_path / "whole", LOSSES)).start
    for names, warned in ((("primary", "law"), True), (("primary",), False)):
        evalsets = {name: start["evalsets"][name] for name in names}
        resume = ("resume", {**{key: start[key] for key in ("plan", "devices")}, "evalsets": evalsets})
        losses = LOSSES | {"law": lambda step: 4.0 if step <= 60 else None}
        path = write_run(tmp_path / f"{warned}", losses, more={60: [resume]})
        lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        (at_60,) = [line for line in lines if (line["event"], line["step"]) == ("eval", 60)]
        at_60["warned"] = ["law"]
        (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert ("maybe worse law" in shown(path)) == warned
        assert ("maybe law" in report([load_run(path)])) == warned


def test_of_many_regressions_the_largest_rises_are_told(tmp_path):
    def told(num):
        pairs = [offender(f"s{i}", "best", 60, first_step=100, delta=i / 10) for i in range(1, num)]
        pairs.append(offender("lost", "best", 60, first_step=100) | {"delta": "NaN"})
        more = {100: [("eval_regression", {"phase": "domain", "action": None, "offenders": pairs})]}
        path = write_run(tmp_path / f"{num}", LOSSES, more=more, detectable={"val": 0.01, "law": 0.01})
        assert len(inspect_run(load_run(path))["regressions"]) == num
        return [line.split()[1:3] for line in shown(path).splitlines() if line.startswith("regressed")]

    assert [name for name, *_ in told(12)] == [*(f"s{i}" for i in range(1, 12)), "lost"]
    *named, rest = told(14)
    assert [name for name, *_ in named] == ["lost", *(f"s{i}" for i in range(13, 2, -1))] and rest == ["and", "2"]


def test_a_run_that_an_alarm_stopped_says_by_which_and_how_to_go_on(tmp_path):
    worse = [offender("law", "best", 0, first_step=60), offender("val", "best", 40, first_step=40)]
    alarm = ("eval_regression", {"phase": "foundation", "action": "the run stops here", "offenders": worse})
    path = write_run(tmp_path / "run", LOSSES, until=60, more={60: [alarm]})
    for step in ("0", "40"):
        for item in CHECKPOINT_ITEMS:
            (path / "checkpoints" / step / item).mkdir(parents=True)
    facts = inspect_run(load_run(path))
    told = "eval regression at step 60: law 2.6000: +0.5000 (95 % +0.4000 to +0.6000) against best at step 0 "
    stopped = facts["progress"]["stopped"]
    assert (stopped["step"], stopped["sets"]) == (60, ["law"]) and stopped["verdict"].startswith(told)
    assert "stopped by an alarm, in phase domain" in shown(path)
    assert f"trouble regression.action: stop: {told}" in shown(path)
    assert facts["commands"]["go back"].endswith(f" branch {path} --at 0 --run-dir NEW --set KEY=VALUE")
    assert f"train {path / 'config.yaml'} --run-dir {path} --resume latest" in facts["commands"]["go on"]
    with locked_by_another(path):
        assert inspect_run(load_run(path))["progress"]["stopped"] is None
    # Where an alarm is found as the run is taken up, the run ends after one more update; resumed, it goes on.
    with open(path / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 61, "loss": 3.0, "lr": 1e-3, "tokens_per_sec": None}) + "\n")
    assert "stopped by an alarm" in shown(path)
    start = load_run(path).start
    resume = ("resume", {key: start[key] for key in ("plan", "devices", "evalsets")})
    for case, later in ((resume, {}), (("eval_recovered", {"phase": "domain", "offenders": []}), {"until": 80})):
        other = write_run(tmp_path / case[0], LOSSES, **{"until": 60, **later}, more={60: [alarm, case]})
        assert inspect_run(load_run(other))["progress"]["stopped"] is None
        assert "not finished" in shown(other) and "go back" not in shown(other)


def test_a_set_that_the_run_goes_on_without_stands_in_no_view_as_regressed(tmp_path):
    alarm = {"phase": "domain", "action": "stop", "offenders": [offender("law", "best", 60, first_step=60)]}
    start = load_run(write_run(tmp_path / "whole", LOSSES)).start
    fields = {key: start[key] for key in ("plan", "devices")}

    def resumed(*names):
        return ("resume", {**fields, "evalsets": {name: start["evalsets"][name] for name in names}})

    losses = LOSSES | {"law": lambda step: 4.0 if step <= 60 else None}
    cases = {"with": resumed("primary", "law"), "without": resumed("primary")}
    for case, event in cases.items():
        path = write_run(tmp_path / case, losses, more={60: [("eval_regression", alarm), event]})
        resolved = json.loads((path / "config.resolved.json").read_text())
        del resolved["evalsets"]["sets"]["law"]
        (path / "config.resolved.json").write_text(json.dumps(resolved))
        run, gone = load_run(path), case == "without"
        assert ("regressed law 2.1000 → 2.6000" in shown(path)) != gone
        assert ("left out law: no longer measured" in shown(path)) == gone
        assert ("regressed none now" in shown(path)) == gone
        page = report([run])
        assert ("<small> no longer measured</small>" in page) == gone
        assert ('<span class="bad"> regressed</span>' in page) != gone
        # At the step of the resume itself the set was measured, and judged; where it lies says the first config.
        for step, verdict in ((60, "regressed against its best"), (80, "no longer measured" if gone else None)):
            (row,) = [r for r in evals(run, step, Weights(), None, [])[0].splitlines() if r.startswith("| law |")]
            assert row.endswith(f"| {verdict or 'regressed against its best'} |") and "| `law` |" in row
            (row,) = [r for r in evals(run, step, Weights(), None, [])[0].splitlines() if r.startswith("| val (")]
            assert row.endswith("| no alarm; the smallest detectable rise is not known |")


def test_evals_of_averages_and_what_is_not_finite(tmp_path):
    losses = {
        "val": lambda step: 3.0 if step else math.nan,
        "law": lambda step: math.nan if step > 50 else 4 - step / 100,
    }
    lost = {**offender("law", "best", 40, first_step=60), "baseline_loss": 3.6, "interval": ["NaN", "NaN"]}
    alarm = ("eval_regression", {"phase": "domain", "offenders": [lost | {"loss": "NaN", "delta": "NaN"}]})
    path = write_run(tmp_path / "run", losses, averages={"ema": lambda step: 2.5}, more={60: [alarm]})
    since = "(since then: web 0.8 → 0.1), alarm since step 60"
    assert f"regressed law 3.6000 → nan at step 60 against its best at step 40 {since}" in shown(path)
    points = eval_points(load_run(path).events)
    assert set(points) == {"val", "law", "val@ema", "law@ema"}
    assert [p.step for p in points["val@ema"]] == [20, 40, 60, 80, 100] and points["val@ema"][0].loss == 2.5
    facts = inspect_run(load_run(path))
    assert math.isnan(facts["evals"]["law"]["loss"]) and facts["evals"]["law"]["best_step"] == 40
    assert facts["evals"]["val"]["best_step"] == 20


def test_the_last_known_detectable_difference_counts():
    events = [
        {"event": "eval", "step": 0},
        {"event": "eval", "step": 10, "detectable": {"val": 0.05, "law": 0.07}},
        {"event": "eval", "step": 20, "detectable": {"val": 0.03, "law": None}},
    ]
    assert last_detectable(events) == {"val": 0.03, "law": 0.07}


def test_lineage(tmp_path):
    base = {"init_from": "runs/base/gold", "run": "first", "step": 60, "keep_optimizer": True, "lineage": None}
    of = {"init_from": "runs/mid", "run": "runs/mid", "step": None, "keep_optimizer": False, "lineage": base}
    path = write_run(
        tmp_path / "run",
        LOSSES,
        start={"lineage": of},
        branched_from={"run": "runs/trunk", "step": 1200, "branched_from": None},
    )
    lines = shown(path)
    assert "lineage branched from runs/trunk at step 1,200" in lines
    assert "lineage parameters from runs/mid\n" in lines
    assert "lineage parameters and optimizer state from runs/base/gold (first), step 60" in lines


@pytest.mark.parametrize(
    ("val", "law", "said", "detects"),
    [
        (0.0199, 0.02, None, "0.0200"),  # twice the tolerance
        (0.0199, 0.0201, "law: a rise below 0.02 may go undetected", "0.0201"),
        (0.381, 0.2, "val: a rise below 0.38 may go undetected", "0.2000"),
        (0.381, 12.5, "law: no rise below 10 would be detected", "above 10"),
        (12.5, None, "law: the smallest detectable rise is not known", ""),
    ],
)
def test_where_no_regression_stands_the_rise_that_would_show_is_told(tmp_path, val, law, said, detects):
    path = write_run(tmp_path / "run", LOSSES, detectable={"val": val, "law": law}, averages={"ema": lambda step: 2.5})
    lines, page = shown(path), report([load_run(path)])
    assert ("regressed none now" + (f" ({said})" if said else "")) in lines.splitlines()
    assert f"law 100 4.0000 0.0000 1.4427 4.0000 4.0000 0 {detects}".strip() + " law" in lines.splitlines()
    below = f"<small>{said}</small>" if said else ""
    assert f"<dt>regressed now</dt><dd>none{below}</dd>" in page
    assert ("above 10</td>" in page) == (12.5 in (val, law))
    card = evals(load_run(path), 100, Weights(), None, [])[0].splitlines()
    verdicts = [row.split(" | ")[-1] for row in card[2:]]
    told = "no alarm" if said is None else f"no alarm; {said.partition(': ')[2]}"
    assert told + " |" == verdicts[0 if said and said.startswith("val") else 1]


def test_beside_an_alarm_the_sets_without_one_are_told_of_too(tmp_path):
    alarm = {"phase": "domain", "action": None, "offenders": [offender("val", "best", 60, first_step=60)]}
    detectable = {"val": 9.0, "law": 0.38}
    path = write_run(tmp_path / "run", LOSSES, detectable=detectable, more={60: [("eval_regression", alarm)]})
    *lines, last, end = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    assert (last["event"], end["event"]) == ("eval", "training_complete")
    last["warned"] = ["law"]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, last, end)))
    told = [line for line in shown(path).splitlines() if line.startswith(("regressed", "maybe"))]
    assert told[0].startswith("regressed val 2.1000") and told[1:] == [
        "regressed no other now (law: a rise below 0.38 may go undetected)",
        "maybe worse law: risen more than chance usually explains, but too little for an alarm",
    ]
    tile = '<dd><span class="bad">val</span><small>maybe law; law: a rise below 0.38 may go undetected</small></dd>'
    assert tile in report([load_run(path)])
    for step, none in ((100, "no alarm, but it may be worse"), (80, "no alarm")):
        (row,) = [
            r for r in evals(load_run(path), step, Weights(), None, [])[0].splitlines() if r.startswith("| law |")
        ]
        assert row.endswith(f"| {none}; a rise below 0.38 may go undetected |")


def test_the_tolerance_of_a_set_of_its_own_counts(tmp_path):
    path = write_run(tmp_path / "run", LOSSES, detectable={"val": 0.1, "law": 0.9})
    resolved = json.loads((path / "config.resolved.json").read_text())
    resolved["evalsets"]["primary"]["tolerance"] = 0.05
    resolved["evalsets"]["sets"]["law"]["tolerance"] = 0.5
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    assert "regressed none now" in shown(path).splitlines()


def test_checkpoints_that_were_not_saved_are_told(tmp_path):
    def failed(step, path):
        last = {"last_good_step": 40, "next_try_step": 80}
        return ("checkpoint_failed", {"path": path, "why": "No space left on device", **last})

    path = write_run(tmp_path / "one", LOSSES, more={60: [failed(60, "checkpoints/60")]})
    assert "trouble checkpoints/60 was not saved: No space left on device" in shown(path)
    twice = {60: [failed(60, "checkpoints/60"), failed(60, "gold/60")], 80: [failed(80, "checkpoints/80")]}
    path = write_run(tmp_path / "more", LOSSES, more=twice)
    assert "trouble checkpoints/80 and 2 more were not saved: No space left on device" in shown(path)
    page = report([load_run(path)])
    assert '<p class="bad">checkpoints/80 and 2 more were not saved: No space left on device</p>' in page
    assert page.count("; the last good one is of step 40; the next is tried at step 80</td>") == 3
    tried = {60: twice[60], 80: [("checkpoint", {"path": "checkpoints/80"}), *twice[80]]}  # it failed on the way
    path = write_run(tmp_path / "tried", LOSSES, more=tried)
    assert "trouble checkpoints/80 and 2 more were not saved: No space left on device" in shown(path)
    path = write_run(tmp_path / "room", LOSSES, more=twice | {100: [("checkpoint", {"path": "checkpoints/100"})]})
    assert "trouble" not in shown(path) and inspect_run(path)["progress"]["unsaved"] is None


def test_what_went_wrong_in_training_is_a_line_each(tmp_path):
    rollback = {"told_at_step": 58, "first_bad_step": 50, "skip_steps": 5, "number": 1, "max": 1, "reason": "bad"}
    diverged = {"reason": "bad again", "first_bad_step": 70, "rollbacks": [], "last_good_step": 60}
    whole = load_run(write_run(tmp_path / "whole", LOSSES))
    more = {"plan": whole.plan, "devices": whole.start["devices"]}
    events = {40: [("rollback", {**rollback, **more})], 80: [("diverged", diverged)]}
    path = write_run(tmp_path / "run", LOSSES, until=80, more=events)
    counts = {"skipped_updates": 5, "skipped_nonfinite": 2, "skipped_outliers": 3}
    with open(path / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 80, **counts}) + "\n")
    text = shown(path)
    assert (
        "trouble skipped 5 updates up to step 80: 2 not finite, 3 with a loss or gradient norm far above the recent ones"
        in text
    )
    for few, num in ((True, 3), (False, 4)):
        calm = write_run(tmp_path / f"calm-{few}", LOSSES)
        skips = {"skipped_updates": num, "skipped_nonfinite": 0, "skipped_outliers": num}
        with open(calm / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"step": 100, **skips}) + "\n")
        told = shown(calm)
        line = f"skipped {num} updates up to step 100: {num} with a loss or"
        assert f"{'training' if few else 'trouble'} {line}" in told and ("trouble" in told) is not few
    assert "trouble rolled back once" in text
    assert "trouble diverged at step 80: bad again | the last good checkpoint is of step 60" in text
    assert "trouble" not in shown(tmp_path / "whole")
    again = {40: [("rollback", {**rollback, **more, "number": 2, "max": 2})]}  # the first was cut back with its rows
    assert "trouble rolled back 2 times" in shown(write_run(tmp_path / "again", LOSSES, until=80, more=again))


@pytest.mark.parametrize("content", ['{"step": 1', "[]", '{"step": 80}'])
def test_a_damaged_summary_hides_nothing_else(tmp_path, content):
    path = write_run(tmp_path / "run", LOSSES, until=80)
    (path / "training_state.json").write_text(content)
    facts = inspect_run(load_run(path))
    assert len(facts["problems"]) == 1 and facts["problems"][0].startswith(f"{path}/training_state.json: ")
    assert f"damaged {path}/training_state.json: " in shown(path) and facts["evals"]["val"]["step"] == 80


def test_the_module_is_the_command():
    for module in ("curriculum", "curriculum.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "inspect", "nowhere"], capture_output=True, text=True)
        assert done.returncode == 2 and "nowhere: holds no run" in done.stderr


def test_the_command_is_quick_and_imports_little(tmp_path):
    path = write_run(tmp_path / "run", {"val": lambda step: math.nan})
    code, out, _, modules = command("inspect", path, "--json")
    assert code == 0 and not modules & {"jax", "numpy", "pydantic", "matplotlib", "yaml"}
    assert json.loads(out)["evals"]["val"]["loss"] == "NaN"

    script = "import sys; sys.argv = ['c', 'inspect', sys.argv[1]]\nfrom curriculum.cli.main import main\nmain()"
    taken, _ = processor.command_seconds([sys.executable, "-c", script, path])
    bare, _ = processor.command_seconds([sys.executable, "-c", "import click, json, difflib"])
    assert taken < 3 * bare, (taken, bare)  # takes about 1.5 times as long; one of numpy makes it 3.6


def test_a_run_that_was_trained_and_extended(corpus, store, tmp_path):  # noqa: F811
    data = config_data(corpus, train__steps=8, checkpoint__every=6, optim={"lr": 1e-3, "schedule": "constant"})
    data["phases"] = [{"name": "a", "until": "end", "mixture": {"web": 1}}]
    law = data["evalsets"]["sets"].pop("law")
    train(build_config(data), tmp_path / "run", store_dir=store)
    data["phases"] = [
        {"name": "a", "until": 8, "mixture": {"web": 1}},
        {"name": "b", "until": "end", "mixture": {"law": 3, "web": 1}},
    ]
    data["train"]["steps"], data["evalsets"]["sets"]["law"] = 12, law
    train(build_config(data), tmp_path / "run", resume="latest", store_dir=store)

    run = load_run(tmp_path / "run")
    facts = inspect_run(run)
    # 8 sequences of 32 tokens a step: 8 steps of web, then 4 of 3/4 law.
    assert [phase["tokens"] for phase in facts["phases"]] == [{"web": 2048}, {"law": 768, "web": 256}]
    assert facts["checkpoints"]["checkpoints"] == [6, 8, 12]
    assert facts["progress"]["finished"] and facts["progress"]["tokens"] == 12 * 256
    assert facts["phases"][1]["epochs"]["law"] == pytest.approx(768 / run.start["sources"]["law"]["tokens_per_epoch"])
    assert "step 12 of 12 (100.0 %), finished" in shown(tmp_path / "run")
    # The set that came with the resume is known by its content, so two runs that have it can be compared.
    assert len(evalset_facts(run.events)["law"]["content_hash"]) == 32
    assert [c.name for c in compare([tmp_path / "run"] * 2).sets] == ["val", "code", "law"]


def test_a_text_that_was_replaced_and_a_source_that_was_added(tmp_path):
    place, run_dir = write_corpus(tmp_path), tmp_path / "run"
    sections = {"evalsets": {"every": 9, "primary": {"held_out_of": "web"}}, "optim": {"lr": 1e-3}}
    law = {"name": "a", "until": 2, "mixture": {"law": 1.0}}
    short = {"steps": 2, "batch_size": 4, "seq_len": 32}
    tiny_train(place, run_dir, phases=[law | {"until": "end"}], train=short, **sections)
    lines = (place / "law.jsonl").read_text().splitlines(keepends=True)
    (place / "law.jsonl").write_text("".join(lines[:20]))
    (place / "new.jsonl").write_text("".join(lines[20:]))
    new = {"name": "b", "until": "end", "mixture": {"new": 1.0}}
    data = tiny_data(place, phases=[law, new], train=short | {"steps": 3}, **sections)
    data["sources"]["new"] = {"path": str(place / "new.jsonl")}
    train(build_config(data), run_dir, resume="latest", accept_past=True, store_dir=place / "store")

    run = load_run(run_dir)
    planned = {(row.phase, row.source): row for row in plan(build_config(data), store_dir=place / "store").rows}
    a, b = inspect_run(run)["phases"]
    assert (a["tokens"], b["tokens"]) == ({"law": 256}, {"new": 128})
    assert a["epochs"] == {"law": planned["a", "law"].epochs_so_far}
    assert b["epochs"] == a["epochs"] | {"new": planned["b", "new"].epochs_so_far}
    # Of 60 documents and of 20 the last 20 % of the tokens are held out; what is read after step 2 is of the new text.
    for step, documents in ((2, 46), (3, 17)):
        card = training(run, step, None, [])[-1]
        (told,) = [[cell.strip() for cell in line.split("|")[1:]] for line in card.splitlines() if "| law |" in line]
        assert (told[2], told[4]) == (str(documents), "256")
    (told,) = [line for line in card.splitlines() if "| new |" in line]
    assert "| 40 |" in told and "| 128 |" in told and "not known" not in told


def test_a_run_whose_rate_has_decayed_is_said_to_need_a_jump(tmp_path):
    """Unless a checkpoint from before the decay is left."""
    piece = {"start": 60, "end": 100, "scale": 1.0, "piece": {"start": 60, "first": 1.0, "last": 0.1}}
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0}, complete={})
    remark = "(the rate has decayed by then; continuing at its peak needs optim.allow_jump: true)"
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    events[0]["plan"]["learning_rate"] = [piece]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert remark not in shown(path)  # no checkpoint, so nothing to train on from
    for step, told in ((100, True), (60, False)):
        for item in CHECKPOINT_ITEMS:
            (path / f"checkpoints/{step}/{item}").mkdir(parents=True)
        assert (remark in shown(path)) == told, step


def test_a_record_that_is_too_short_for_the_newest_checkpoint_is_told(tmp_path):
    place, run_dir = write_corpus(tmp_path), tmp_path / "run"
    tiny_train(place, run_dir)
    assert inspect_run(run_dir)["problems"] == []
    events = run_dir / "events.jsonl"
    saved = read_ledger(run_dir / "checkpoints/12")["offsets"]["events.jsonl"]
    events.write_bytes(events.read_bytes()[: saved - 10])  # as of a copy that was interrupted
    [problem] = inspect_run(run_dir)["problems"]
    assert problem.startswith(f"{events}: got ") and "go on from an earlier checkpoint (--resume STEP)" in problem
    with pytest.raises(InputError, match="expected a line to end at byte"):
        tiny_train(place, run_dir, resume="latest")
    tiny_train(place, run_dir, resume=9)
    assert inspect_run(run_dir)["problems"] == []
