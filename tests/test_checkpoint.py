"""Checkpoints that can be believed: what is restored verifies, and what is damaged is told and gone round."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import assert_same_run, flip_bit, last_state, tiny_data, tiny_train, write_corpus

from curriculum.config import build_config
from curriculum.disk import manifest
from curriculum.disk.durable import rename_whole
from curriculum.disk.lock import RunLock
from curriculum.disk.manifest import damage, write_manifest
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.export import export
from curriculum.find_checkpoint import CheckpointGone, find_checkpoint, read_ledger, saved_steps, undamaged
from curriculum.plan_resumed import plan_resumed
from curriculum.record.sentences import verdict
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory, put_back_replaced, replaced_as
from curriculum.saved_weights import chosen_again, find_weights, ledger_beside
from curriculum.schema.adaptation import find_base
from curriculum.train import trainer
from curriculum.train.checkpoints.arrays import in_turn, load_params, save_params
from curriculum.train.checkpoints.finite import NonFiniteState
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.resuming.opening import claim
from curriculum.train.resuming.resumed import to_resume
from curriculum.train.step import init_state


def test_arrays_below_a_path_that_is_not_utf_8_are_told(tmp_path):
    """As the name of a run is in the C locale: orbax would end in its own code."""
    save_params(tmp_path / "here", {"w": np.arange(4.0)})
    there = tmp_path / os.fsdecode(b"r\xff")
    (tmp_path / "here").rename(there)
    with pytest.raises(InputError, match=r"r\\xff: the path is not read as UTF-8, .* UTF-8 locale"):
        load_params(there)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def whole(place):
    """12 steps in one go; checkpoints 8, 10, 12 and gold 12 stay. Nobody may change it."""
    tiny_train(place, place / "whole")
    return place / "whole"


def test_a_gold_is_hard_links_of_the_checkpoint_of_its_step(whole):
    files = [path for path in (whole / "gold/12").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert path.samefile(whole / "checkpoints/12" / path.relative_to(whole / "gold/12")), path


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def resumed_step(run):
    return to_resume(RunDirectory(run), "latest").step


# --- what verifies ------------------------------------------------------------------------------------------


def test_a_checkpoint_is_whole_when_it_has_its_name(whole):
    assert resumed_step(whole) == 12
    for folder in (whole / "checkpoints/8", whole / "checkpoints/12", whole / "gold/12"):
        assert damage(folder) is None and len(files_of(folder)) > 15
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["10", "12", "8"]


def test_a_flipped_bit_in_any_file_is_never_restored(run):
    directory, files = RunDirectory(run), files_of(run / "checkpoints/12")
    shutil.rmtree(run / "gold")
    assert {f.relative_to(run / "checkpoints/12").parts[0] for f in files} > {"params", "train", "ledger", "baselines"}
    for path in files:
        if path.stat().st_size:
            flip_bit(path)
            assert resumed_step(run) == 10, path
            with pytest.raises(InputError, match=r"--resume 12: .*checkpoints/12: is damaged: .*checksum"):
                find_checkpoint(directory, 12, option="--resume")
            flip_bit(path)
    assert resumed_step(run) == 12


def cut(folder):
    path = max(files_of(folder), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def half_delete(folder):
    shutil.rmtree(folder / "params/ocdbt.process_0")


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


DAMAGES = [cut, empty, half_delete, lose_manifest]


@pytest.mark.parametrize("break_it", DAMAGES)
def test_a_damaged_step_is_passed_over(run, break_it):
    break_it(run / "checkpoints/12")
    assert resumed_step(run) == 10
    break_it(run / "checkpoints/10")
    assert resumed_step(run) == 8
    break_it(run / "checkpoints/8")
    assert to_resume(RunDirectory(run), "latest").folder == run / "gold/12"
    break_it(run / "gold/12")
    assert to_resume(RunDirectory(run), "latest").folder == run / "gold/9"
    shutil.rmtree(run / "gold")
    assert to_resume(RunDirectory(run), "latest") is None


def test_what_is_asked_for_and_damaged_is_told_with_what_verifies(run):
    directory = RunDirectory(run)
    half_delete(run / "checkpoints/10")
    flip_bit(run / "gold/12/ledger/metadata")
    with pytest.raises(InputError) as told:
        find_checkpoint(directory, "gold", option="--resume")
    # Which older golds are still there depends on when the checkpoints that spoke of them went.
    assert re.fullmatch(
        re.escape(
            f"--resume gold: {run}/gold/12: is damaged: ledger/metadata has another checksum than the manifest says; "
        )
        + r"restore it from a copy, or use another step \(those that verify: 8, 12; in gold/: (3, )?6, 9\)",
        str(told.value),
    )
    with pytest.raises(InputError, match=r"--step 10: .*/10: is damaged: params/.* is missing: the checksum manifest"):
        find_checkpoint(directory, "10")
    assert find_checkpoint(directory, 12) == (12, run / "checkpoints/12")
    flip_bit(run / "checkpoints/12/manifest.json")
    with pytest.raises(
        InputError,
        match=r"--step latest: .*12: is damaged: manifest.json .*those that verify: 8; in gold/: (3, )?6, 9\)",
    ):
        find_checkpoint(directory, "latest")
    flip_bit(run / "gold/12/ledger/metadata")
    assert find_checkpoint(directory, 12) == (12, run / "gold/12")


def test_nothing_is_made_from_a_damaged_checkpoint(run, place, tmp_path):
    flip_bit(next((run / "gold/12/params/d").iterdir()))
    flip_bit(next((run / "checkpoints/12/params/d").iterdir()))
    config = tiny_data(place, adaptation={"init_from": str(run / "checkpoints/12")})
    for refused in (
        lambda: evaluate(run, store_dir=place / "store"),
        lambda: export(run, tmp_path / "exported"),
        lambda: find_base(run, "params/"),
        lambda: find_base(run / "gold/12", "params/"),
        lambda: train_new(config, tmp_path / "new", place),
    ):
        with pytest.raises(InputError, match="/12: is damaged: params/.*checksum"):
            refused()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_what_is_not_read_of_a_checkpoint_is_not_verified(run, place, tmp_path):
    for folder in ("gold/12", "checkpoints/12"):
        flip_bit(max((run / folder / "train/d").iterdir(), key=lambda path: path.stat().st_size))
    assert evaluate(run, store_dir=place / "store").step == 12
    assert export(run, tmp_path / "exported") == 12
    train_new(tiny_data(place, adaptation={"init_from": str(run)}), tmp_path / "new", place)
    both = tiny_data(place, adaptation={"init_from": str(run), "keep_optimizer": True})
    with pytest.raises(InputError, match=r"^config: adaptation.init_from: .*gold/12: is damaged: train/.*checksum"):
        train_new(both, tmp_path / "more", place)
    for folder in ("gold/12", "checkpoints/12"):
        flip_bit(run / folder / "ledger/metadata")
    with pytest.raises(InputError, match="/12: is damaged: ledger/.*checksum"):
        evaluate(run, store_dir=place / "store")


def train_new(config, run_dir, place):
    from curriculum.train.trainer import train

    train(build_config(config), run_dir, store_dir=place / "store")


# --- resume -------------------------------------------------------------------------------------------------


def test_a_finished_run_goes_back_to_what_verifies(run, whole, place, capsys):
    path = next((run / "checkpoints/12/params/d").iterdir())
    flip_bit(path)
    flip_bit(run / "checkpoints/8/ledger/metadata")
    tiny_train(place, run, "latest")
    errors = capsys.readouterr().err
    assert f"{run}/checkpoints/12: is damaged: params/d/{path.name} has another checksum" in errors
    assert f"moved to {run}/superseded/12" in errors and f"{run}: the run continues from step 10" in errors
    assert "Traceback" not in errors
    assert_same_run(run, whole)
    resume = next(e for e in load_run(run).events if e["event"] == "resume")
    assert resume["step"] == 10 and resume["trained_to"] == 12
    assert verdict(resume).startswith(
        "resumed at step 10 of 12; at least 2 steps after it will be trained again; step 8 is"
    )
    assert [(d["step"], d["moved_to"]) for d in resume["damaged"]] == [(8, "superseded/8"), (12, "superseded/12")]
    assert all("checksum" in d["why"] for d in resume["damaged"])
    assert (run / "superseded/12/params/d" / path.name).exists() and (run / "superseded/8").is_dir()


def test_without_a_checkpoint_the_gold_serves(run, whole, place, capsys):
    for step in (8, 10, 12):
        half_delete(run / f"checkpoints/{step}")
    tiny_train(place, run, "latest", train={"steps": 12, "batch_size": 4, "seq_len": 32})
    assert "the run continues from step 12" in capsys.readouterr().err
    assert damage(run / "checkpoints/12") is None and last_state(run) == last_state(whole)
    assert sorted(p.name for p in (run / "superseded").iterdir() if p.name.isdecimal()) == ["10", "12", "8"]


def test_a_gold_is_gone_on_from_where_the_disk_has_no_hard_links(run, whole, place, monkeypatch):
    def refused(path, to):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    shutil.rmtree(run / "checkpoints")
    tiny_train(place, run, "latest", train={"steps": 12, "batch_size": 4, "seq_len": 32})
    assert damage(run / "checkpoints/12") is None and last_state(run) == last_state(whole)


def test_a_checkpoint_that_cannot_be_taken_over_is_one_short_line(run, place, monkeypatch):
    def full(path, to):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copy2", full)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError) as error:
        tiny_train(place, run, "latest", train={"steps": 12, "batch_size": 4, "seq_len": 32})
    (problem,) = error.value.problems
    assert "No space left on device" in problem and "nothing was trained" in problem and problem.count("/gold/") < 2


def test_a_gold_that_is_damaged_is_taken_from_the_checkpoint_of_its_step(run, place, monkeypatch):
    def ends(*arguments):
        raise KeyboardInterrupt

    flip_bit(next((run / "gold/12/params/d").iterdir()))
    monkeypatch.setattr(trainer, "_begin", ends)
    longer = {"train": {"steps": 14, "batch_size": 4, "seq_len": 32}, "optim": {"lr": 3e-4, "schedule": "constant"}}
    with pytest.raises(KeyboardInterrupt):
        tiny_train(place, run, "latest", **longer)
    assert damage(run / "gold/12") is None and "another checksum" in damage(run / "superseded/gold/12")


def test_a_resume_reads_no_more_than_it_needs_before_its_first_update(place, tmp_path, monkeypatch):
    """Of the gold one copy, of older checkpoints the ledger, of means what says where they end: each file once."""
    phases = [{"name": name, "until": until, "mixture": {"web": 1.0}} for name, until in (("a", 4), ("b", 8))]
    phases.append({"name": "c", "until": "end", "mixture": {"web": 1.0}, "lr": {"peak": 3.0}})  # 8 stays the gold
    sections = {
        "phases": phases,
        "optim": {"lr": 3e-3, "schedule": "constant", "allow_jump": True},
        "averages": {"phase_mean": 2},
    }
    run = tmp_path / "run"
    tiny_train(place, run, **sections)
    assert {"checkpoints/8", "gold/8", "averages/a"} < {str(p.relative_to(run)) for p in run.glob("*/*")}
    read, checksum = [], manifest.file_checksum

    def counted(path):
        read.append(str(path.relative_to(run)))
        return checksum(path)

    def ends(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "file_checksum", counted)
    monkeypatch.setattr(trainer, "_begin", ends)
    with pytest.raises(KeyboardInterrupt):
        tiny_train(place, run, resume="latest", train={"steps": 16, "batch_size": 4, "seq_len": 32}, **sections)
    assert len(read) == len(set(read)) > 10
    whole = {name: [path for path in read if path.startswith(name)] for name in ("checkpoints/12/", "gold/8/")}
    assert {name: len(paths) for name, paths in whole.items()} == {
        name: len(files_of(run / name)) - 1
        for name in whole  # but for the manifest
    }
    assert {"/".join(path.split("/")[:3]) for path in read if not path.startswith(tuple(whole))} == {
        *(f"checkpoints/{step}/ledger" for step in (8, 10)),
        *(f"averages/{phase}/mean.json" for phase in "abc"),
    }


@pytest.mark.parametrize("path, mode", [("params", 0o000), ("manifest.json", 0o000), ("ledger/metadata", 0o200)])
def test_what_may_not_be_read_is_not_taken_for_damaged(run, path, mode):
    """Another user's files, say: the run is not begun anew, nothing is moved. Root reads everything, and steps down."""
    for step in (8, 10, 12):
        (run / "checkpoints" / str(step) / path).chmod(mode)
    code = """
import os, sys
from pathlib import Path
from curriculum.run_directory import RunDirectory, replaced_as
from curriculum.train.resuming.resumed import to_resume
if os.geteuid() == 0:
    os.setuid(65534)
to_resume(RunDirectory(Path(".")), "latest")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=run, capture_output=True, text=True)
    last = f"checkpoints/12/{path}: cannot be read: Permission denied, so checkpoints/12 cannot be verified"
    assert done.returncode == 1 and last in done.stderr.splitlines()[-1]
    (run / "checkpoints").chmod(0o000)
    done = subprocess.run([sys.executable, "-c", code], cwd=run, capture_output=True, text=True)
    assert done.returncode == 1 and "checkpoints: cannot be listed: Permission denied" in done.stderr.splitlines()[-1]
    (run / "checkpoints").chmod(0o700)


def test_a_record_that_is_damaged_is_not_trained_on(place, run):
    """As many bytes as before: at the end no view could read the run, and the checkpoints before it would be gone."""
    events = run / "events.jsonl"
    lines = events.read_bytes().splitlines()
    lines[4] = b"#" * len(lines[4])
    events.write_bytes(b"\n".join([*lines, b""]))
    before = {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"}
    with pytest.raises(InputError, match=r"events.jsonl:5: got '####.*restore the file from a copy"):
        tiny_train(place, run, 8)
    assert {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"} == before


def test_results_of_an_eval_that_are_damaged_do_not_hold_the_run_up(place, run, capsys):
    for folder in ("checkpoints/12", "gold/12"):
        shutil.rmtree(run / folder)
    flip_bit(run / "evals/6.npz")  # of the end of phase a, which the end of the run is compared with
    complete = tiny_train(place, run, "latest")
    assert [of_set["loss"][0] for of_set in complete["transfer"]["sets"].values()] == [None, None]
    assert all(of_set["loss"][1] for of_set in complete["transfer"]["sets"].values())
    assert re.search(r"evals/6.npz: cannot be read: .*moved to .*superseded/evals/6.npz", capsys.readouterr().err)
    assert (run / "superseded/evals/6.npz").exists() and not (run / "evals/6.npz").exists()
    assert last_state(run) == last_state(place / "whole")


def test_a_checkpoint_that_was_deleted_meanwhile_is_not_called_damaged(run):
    """A reader found it while the run trains, which then let it go."""
    _, folder = find_checkpoint(RunDirectory(run), 8)
    shutil.rmtree(folder)
    for read in (lambda: undamaged(folder), lambda: load_params(folder / "params")):
        with pytest.raises(
            InputError, match=r"checkpoints/8: is gone: a training run keeps only its newest .*try again"
        ) as told:
            read()
        there = (
            f"{run}/checkpoints now holds 10, 12, and the newest in the record is 12; put it back, or take another step"
        )
        assert str(told.value).endswith(f"if none trains here, it was moved, or its disk is away: {there}")


def test_a_checkpoint_that_goes_while_it_is_read_is_chosen_anew_unless_it_was_named(run, capsys):
    directory, chosen = RunDirectory(run), []

    @chosen_again
    def read(*, step):
        folder = find_weights(directory, step, "raw")[1].parent
        chosen.append(f"{folder.parent.name}/{folder.name}")
        if len(chosen) <= num_gone:  # deleted by a run that trains
            shutil.rmtree(folder)
        return read_ledger(folder)["step"]

    num_gone = 1
    assert read(step="latest") == 10 and chosen == ["checkpoints/12", "checkpoints/10"]
    assert capsys.readouterr().err == f"{run}/checkpoints/12: is gone by now; the one after it is used\n"
    num_gone = 3
    with pytest.raises(CheckpointGone, match="checkpoints/10: is gone: a training run keeps only its newest"):
        read(step=10)
    assert len(chosen) == 3


def test_a_checkpoint_that_is_deleted_after_it_was_found_is_not_taken_for_a_mean(run):
    directory = RunDirectory(run)
    _, arrays = find_weights(directory, 10, "raw")
    assert ledger_beside(directory, arrays)["step"] == 10
    shutil.rmtree(arrays.parent)
    with pytest.raises(CheckpointGone, match="checkpoints/10: is gone"):
        ledger_beside(directory, arrays)


def test_where_nothing_verifies_the_run_begins_anew(run, whole, place, capsys):
    for folder in [*(run / "checkpoints").iterdir(), *(run / "gold").iterdir()]:
        empty(folder)
    tiny_train(place, run, "latest")
    assert "no checkpoint verifies: the run starts over" in capsys.readouterr().err
    assert_same_run(run, whole)


def test_a_run_whose_checkpoints_are_all_gone_does_not_begin_anew(run, place):
    """Their disk may be away. The record is left as it is."""
    for folder in ("checkpoints", "gold"):
        shutil.rmtree(run / folder)
    before = {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"}
    told = (
        f"{run}/checkpoints: holds no checkpoint, nor do {run}/gold and {run}/kept, but the record has those of 6 steps "
        f"up to 12: if they were moved, or their disk is away, put them back; to begin at step 0, give another --run-dir,"
        f" or move {run}/events.jsonl away"
    )
    for ask in (
        lambda: tiny_train(place, run, "latest"),
        lambda: plan_resumed(build_config(tiny_data(place)), run, store_dir=place / "store"),
    ):
        with pytest.raises(InputError) as error:
            ask()
        assert str(error.value) == told
    assert {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"} == before
    with pytest.raises(
        InputError, match=f"^{run}: has no checkpoint any more, though its record has some up to step 12;"
    ):
        find_checkpoint(RunDirectory(run))
    (run / "events.jsonl").rename(run / "old.jsonl")
    tiny_train(place, run, "latest")
    assert [e["step"] for e in load_run(run).events if e["event"] == "checkpoint"] == [2, 4, 6, 8, 10, 12]


def test_a_gold_that_serves_because_all_checkpoints_are_gone_is_told(run, place, capsys):
    shutil.rmtree(run / "gold")
    shutil.copytree(run / "checkpoints/10", run / "gold/10")
    away = (run / "checkpoints").rename(run.parent / "away")
    told = (
        f"{run}/checkpoints: holds no checkpoint, though the record has some up to step 12: the newest is gold/10; if they "
        "were moved, or their disk is away, stop, and put them back"
    )
    assert told in plan_resumed(build_config(tiny_data(place)), run, store_dir=place / "store").warnings
    for resume, number in (("latest", 1), (10, 0)):
        with RunLock(run) as lock:
            resumed, _ = claim(RunDirectory(run), lock, resume)
        assert resumed.step == 10 and capsys.readouterr().err.splitlines().count(told) == number
    away.rename(run / "checkpoints")
    with RunLock(run) as lock:
        assert claim(RunDirectory(run), lock, "latest")[0].step == 12 and capsys.readouterr().err == ""


def test_a_checkpoint_that_may_never_have_been_whole_is_not_missed(run, place, capsys):
    """Its event comes first: a run that is killed while it saves its first one begins anew, as does one whose disk was
    full, or whose checkpoints were all damaged and set aside."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    first = next(i for i, event in enumerate(events) if event["event"] == "checkpoint")
    failed = [{**events[first], "event": "checkpoint_failed"}, *events[first + 1 : first + 4]]
    assert saved_steps(RunDirectory(run)) == [2, 4, 6, 8, 10, 12]
    for kept, steps in (
        (events[:-1], [2, 4, 6, 8, 10]),
        ([*events[: first + 1]], []),
        ([*events[: first + 1], *failed], []),
    ):
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
        assert saved_steps(RunDirectory(run)) == steps
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "superseded").mkdir()
    (run / "checkpoints/12").rename(run / "superseded/12")
    for folder in ("checkpoints", "gold"):
        shutil.rmtree(run / folder)
    tiny_train(place, run, "latest")
    assert f"{run}: the run in it has no checkpoint: nothing to resume" in capsys.readouterr().err


def test_a_run_on_two_disks_says_so(run, place, monkeypatch):
    def across(path, to):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path), None, str(to))

    monkeypatch.setattr(Path, "rename", across)
    told = (
        f"checkpoints/12: Invalid cross-device link: .*its folder is on another disk than {run}: put all of the run on"
    )
    with pytest.raises(InputError, match=told):
        tiny_train(place, run, 10)


def test_where_there_is_nothing_to_resume_that_is_told(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "run")
    then = "nothing to resume; the run starts at step 0\n"
    for there in ("holds no run", "the run in it has no checkpoint"):
        with RunLock(directory.path) as lock:
            assert claim(directory, lock, "latest") == (None, None)
        assert capsys.readouterr().err == f"{directory.path}: {there}: {then}"
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
    with RunLock(tmp_path / "other") as lock:
        assert claim(RunDirectory(tmp_path / "other"), lock, None) == (None, None)
    assert capsys.readouterr().err == ""


def test_arrays_of_another_type_are_never_cast(run, place):
    folder = run / "checkpoints/10/params"
    params, like = load_params(folder), load_params(run / "checkpoints/12/params")
    kernel = params["embed"]["embedding"]
    params["embed"]["embedding"] = np.asarray(kernel, np.float16)
    for gone in (folder, run / "checkpoints/12", run / "gold/12"):
        shutil.rmtree(gone)
    save_params(folder, params)
    write_manifest(folder.parent, 10)
    with pytest.raises(InputError) as told:
        load_params(folder, like)
    shape = list(kernel.shape)
    assert str(told.value) == (
        f"{folder}: array embed.embedding: got float16 {shape}, expected float32 {shape}; use a checkpoint of this "
        "model and optimizer"
    )
    before = {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"}
    with pytest.raises(InputError, match="array embed.embedding: got float16"):
        tiny_train(place, run, "latest")
    assert {path: path.read_bytes() for path in files_of(run) if path.name != ".lock"} == before


# --- saving -------------------------------------------------------------------------------------------------


def state_at(step, value=1.0):
    state = init_state({"w": jnp.full((3, 4), value)}, optax.adam(1e-3), 1)
    return state._replace(step=np.int32(step))


def save(checkpoints, step, value=1.0):
    checkpoints.save(state_at(step, value), {"step": step}, {"primary": np.zeros((3, 1), np.float32)})


def test_of_a_link_to_a_step_only_the_link_goes(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    save(checkpoints, 1)
    checkpoints.wait()
    (tmp_path / "checkpoints/1").rename(tmp_path / "1")
    (tmp_path / "checkpoints/1").symlink_to(tmp_path / "1")
    save(checkpoints, 2)
    checkpoints.wait()
    assert checkpoints.steps() == [2] and damage(tmp_path / "1") is None
    (tmp_path / "checkpoints/.1.deleting").write_text("a file, which no process of ours leaves")
    checkpoints.set_aside_after(2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    checkpoints.close()


def test_the_newest_stay_and_the_planned_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, (4, 3))
    assert checkpoints.steps() == [] and not (tmp_path / "checkpoints").exists()
    for step in (1, 2, 4, 5, 8, 9, 12, 13, 16, 17):
        save(checkpoints, step)
    checkpoints.close()
    assert checkpoints.steps() == [8, 12, 16, 17]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "16", "17", "8"]
    assert all(damage(tmp_path / f"checkpoints/{step}") is None for step in (8, 12, 16, 17))
    assert json.loads((tmp_path / "checkpoints/17/manifest.json").read_text())["step"] == 17


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_is_no_failed_save(tmp_path, monkeypatch, capfd):
    checkpoints, rename = Checkpoints(tmp_path / "checkpoints", 1), Path.rename

    def refused(path, target):
        if path.name == "1":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    save(checkpoints, 1)
    checkpoints.wait()
    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", refused)
        save(checkpoints, 2)
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2] and damage(tmp_path / "checkpoints/2") is None
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line.startswith(f"{tmp_path}/checkpoints/1: is not needed any more, but could") and "Permission denied" in line
    )
    save(checkpoints, 3)
    checkpoints.close()
    assert checkpoints.steps() == [3]  # the next save tries again
    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", lambda path, target: refused(path.with_name("1"), target))
        checkpoints.drop(3)
        with pytest.raises(PermissionError):
            checkpoints.delete(3)
    assert checkpoints.steps() == [3] and "checkpoints/3: is not needed any more" in capfd.readouterr().err
    checkpoints.drop(3)
    assert checkpoints.steps() == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for name in (".3.saving", ".4.saving.orbax-tmp", ".2.deleting/params", ".1.adopted", ".1.replaced", ".other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoints.steps() == []
    checkpoints.set_aside_after(5)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [".other"]


@pytest.mark.parametrize("refused", ["fsync", "rename"])
def test_a_checkpoint_stays_if_the_disk_refuses_the_one_that_replaces_it(tmp_path, monkeypatch, refused):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 3)
    checkpoints.wait()
    before = {path: path.read_bytes() for path in files_of(tmp_path / "checkpoints")}
    rename, fsync = Path.rename, os.fsync

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def renamed(path, target):
        return full() if path.name == ".3.saving" and refused == "rename" else rename(path, target)

    def forced(descriptor):
        written = (tmp_path / "checkpoints/.3.saving/manifest.json").exists()
        return full() if written and refused == "fsync" else fsync(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", renamed)
        disk.setattr(os, "fsync", forced)
        save(checkpoints, 3, 2.0)
        with pytest.raises(OSError, match="No space left on device"):
            checkpoints.wait()
    checkpoints.close()
    assert {path: path.read_bytes() for path in files_of(tmp_path / "checkpoints")} == before


def test_a_replaced_checkpoint_that_cannot_be_deleted_is_no_failed_save(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 3)
    checkpoints.wait()
    rmdir = os.rmdir

    def refuse(path, **how):
        if str(path).endswith((".replaced", ".deleting")):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        rmdir(path, **how)

    with monkeypatch.context() as disk:
        disk.setattr(os, "rmdir", refuse)
        save(checkpoints, 3, 2.0)
        checkpoints.close()
    assert (load_params(tmp_path / "checkpoints/3/params")["w"] == 2.0).all()


def test_a_checkpoint_is_found_whose_replacement_was_killed_between_their_names(whole, tmp_path, monkeypatch):
    """`checkpoint.keep: 1` leaves no other."""
    run, rename = RunDirectory(tmp_path / "run"), Path.rename
    run.checkpoints.mkdir(parents=True)
    shutil.copytree(whole / "checkpoints/12", run.checkpoints / "12")
    shutil.copytree(whole / "checkpoints/12", run.checkpoints / ".12.saving")

    def killed(path, target):
        if path.name == ".12.saving":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as disk, pytest.raises(KeyboardInterrupt):
        disk.setattr(Path, "rename", killed)
        rename_whole(run.checkpoints / ".12.saving", run.checkpoints / "12", replaced_as(run.checkpoints / "12"))
    assert not (run.checkpoints / "12").exists()
    with RunLock(run.path) as lock:
        assert claim(run, lock, "latest")[0].folder == run.checkpoints / "12"


def test_a_ctrl_c_while_a_checkpoint_is_read_is_not_taken_for_a_fault_of_its(tmp_path, monkeypatch):
    async def interrupted(**_):
        raise KeyboardInterrupt

    save_params(tmp_path / "arrays", {"w": np.ones(3)})
    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization._read_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_params(tmp_path / "arrays")


def test_what_the_disk_kept_of_a_replaced_checkpoint_does_not_come_back_once_there_is_a_later_one(tmp_path):
    for name in ("16", ".12.replaced", ".x.replaced"):
        (tmp_path / name).mkdir()
    put_back_replaced(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".12.replaced", ".x.replaced", "16"]


def test_a_file_with_the_name_of_a_step_is_in_no_saves_way(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "7").write_text("not ours")
    Checkpoints(tmp_path / "checkpoints").set_aside_after(5)
    assert os.listdir(tmp_path / "checkpoints") == []
    assert (tmp_path / "superseded" / "7").read_text() == "not ours"


def test_a_save_that_would_not_be_made_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3)
    save(checkpoints, 60)
    checkpoints.wait()
    with pytest.raises(RuntimeError, match="step 0 was not saved: step 60 already exists"):
        save(checkpoints, 0)
    checkpoints.close()


@pytest.mark.parametrize("part", ["params", "opt_state", "ema"])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, part):
    checkpoints, state = Checkpoints(tmp_path / "checkpoints"), state_at(3)
    if part == "opt_state":
        adam, *rest = state.opt_state
        bad = {"opt_state": (adam._replace(mu={"w": adam.mu["w"].at[1, 2].set(np.inf)}), *rest)}
    else:
        bad = {part: {"w": state.params["w"].at[2, 3].set(np.nan)}}
    with pytest.raises(NonFiniteState, match=rf"^{part}\..*w is not finite after step 3$"):
        checkpoints.save(state._replace(**bad), {}, {})
    assert not (tmp_path / "checkpoints").exists()
    save(checkpoints, 3)
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_a_save_that_fails_in_the_background_is_raised_and_leaves_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    save(checkpoints, 1)
    checkpoints.wait()
    broken = "curriculum.train.checkpoints.folder.write_manifest"
    monkeypatch.setattr(broken, lambda *_: (_ for _ in ()).throw(ZeroDivisionError("broken")))
    save(checkpoints, 2)
    with pytest.raises(ZeroDivisionError, match="broken"):
        save(checkpoints, 3)
    monkeypatch.undo()
    checkpoints.wait()  # it is raised once
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    save(checkpoints, 3)
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]


def test_an_update_may_take_the_state_over_at_once(tmp_path):
    checkpoints, state = Checkpoints(tmp_path / "checkpoints"), jax.device_put(state_at(3))
    before = jax.tree.map(np.array, state.params)
    started, go_on = threading.Event(), threading.Event()
    in_turn.submit(lambda: started.set() or go_on.wait(60))
    assert started.wait(60)
    checkpoints.save(state, {}, {"set": np.zeros((1, 2), np.float32)})
    add_one = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    after = jax.block_until_ready(add_one(state))
    assert jax.tree.leaves(state.params)[0].is_deleted()
    assert not (tmp_path / "checkpoints").exists()  # nothing of the save was begun until now
    go_on.set()
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "checkpoints/3/params"), before)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 1), after.params, before)


def test_a_single_process_writes_its_arrays_as_numpys_and_orbax_says_nothing(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(jax.device_put(state_at(3)), {}, {"set": np.zeros((1, 2), np.float32)})
    checkpoints.close()
    for item in ("params", "train", "baselines"):
        written = json.loads((tmp_path / "checkpoints/3" / item / "_METADATA").read_text())["tree_metadata"].values()
        assert written and {array["value_metadata"]["value_type"] for array in written} <= {"np.ndarray", "None"}
    assert [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []


def test_saves_of_several_folders_follow_one_another(tmp_path):
    """None waits for the other in the foreground, and none takes another's temporary folders for its own."""
    places = [Checkpoints(tmp_path / name, keep=None) for name in ("checkpoints", "gold", "kept")]
    for step in range(1, 9):
        for place in places:
            save(place, step)
        save_params(tmp_path / f"mean{step}", {"w": np.full(3, step)})
    for place in places:
        place.close()
        assert place.steps() == list(range(1, 9))
        assert all(damage(place.directory / str(step)) is None for step in place.steps())
    assert [load_params(tmp_path / f"mean{step}")["w"][0] for step in range(1, 9)] == list(range(1, 9))


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_directory_that_is_gone_ends_the_run(place, tmp_path, monkeypatch, capsys, moved):
    log = trainer.log

    def gone_at_5(run, done):
        log(run, done)
        if done == 5:
            run.settle(done)
            run_dir.rename(tmp_path / "elsewhere") if moved else shutil.rmtree(run_dir)

    monkeypatch.setattr(trainer, "log", gone_at_5)
    run_dir = tmp_path / "run"
    told = (
        "run: was moved or removed while the run trained; if it is elsewhere, move it back, in place of what a save may"
    )
    with pytest.raises(InputError, match=told):
        tiny_train(place, run_dir, logging={"every": 5, "tensorboard": False})
    assert "stopped" not in capsys.readouterr().out  # where to resume from says the error, if anywhere
    assert not run_dir.exists()  # else `mv` would move the run into what is there
    if moved:
        (tmp_path / "elsewhere").rename(run_dir)
        monkeypatch.undo()
        tiny_train(place, run_dir, "latest", logging={"every": 5, "tensorboard": False})
        assert load_run(run_dir).complete["step"] == 12


def test_a_finished_run_is_finished_whoever_hears_it(place, run, monkeypatch):
    """As where a scheduler's pipe has no reader any more, or a daemon has closed its output."""
    closed, (reader, writer) = io.StringIO(), os.pipe()
    closed.close()
    os.close(reader)
    with open(writer, "w") as unread, open("/dev/full", "w") as full:
        for stdout in (closed, unread, full, None):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert tiny_train(place, run, "latest")["step"] == 12


@pytest.mark.parametrize("removed", [True, False])
def test_what_fails_in_a_folder_that_was_removed_hides_no_other_error(tmp_path, monkeypatch, removed):
    """A save under way fails as it is waited for, which is told, and once more as its writer is closed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.resolved.json").touch()
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    save(checkpoints, 1)
    checkpoints.wait()
    close = checkpoints._writer.close

    def fails():
        close()
        raise ValueError('NOT_FOUND: Error writing "primary/0.0" in OCDBT database')

    monkeypatch.setattr(checkpoints._writer, "close", fails)
    if removed:
        shutil.rmtree(tmp_path / "run")
    with nullcontext() if removed else pytest.raises(ValueError, match="NOT_FOUND"):
        checkpoints.close()


def test_a_line_that_is_broken_after_the_checkpoint_is_cut_off(place, run, whole):
    events = run / "events.jsonl"
    *before, last = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join([*before, b"\0\0\n", last]))
    tiny_train(place, run, resume=8)
    kinds = [[event["event"] for event in load_run(path).events] for path in (whole, run)]
    assert "resume" in kinds[1] and [kind for kind in kinds[1] if kind != "resume"] == kinds[0]


def test_a_resume_with_other_software_is_told(place, run, monkeypatch, capsys):
    begun = load_run(run).start["software"]
    assert begun["jax"] == jax.__version__ and begun["jax_enable_x64"] == "False" and len(begun["code"]) == 16
    longer = {"steps": 13, "batch_size": 4, "seq_len": 32}
    other = {**begun, "jax": "0.0.1", "XLA_FLAGS": "--xla_x=1", "code": "0" * 16}
    monkeypatch.setattr("curriculum.train.fields.software", lambda: other)
    tiny_train(place, run, 10, train=longer)
    [resumed] = [event for event in load_run(run).events if event["event"] == "resume"]
    assert resumed["software"] == other and resumed["software_changed"] == {
        "jax": [jax.__version__, "0.0.1"], "XLA_FLAGS": [begun["XLA_FLAGS"], "--xla_x=1"], "code": [begun["code"], "0" * 16],
    }  # fmt: skip
    told = f"goes on with other software, perhaps not bit for bit: jax {jax.__version__} → 0.0.1, XLA_FLAGS "
    assert told in (out := capsys.readouterr().out) and "→ --xla_x=1, the code of curriculum" in out
    tiny_train(place, run, 10, train={**longer, "steps": 14})  # with the same as the start before
    assert "software_changed" not in [event for event in load_run(run).events if event["event"] == "resume"][-1]
