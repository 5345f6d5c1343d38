"""Averages of the parameters: what is averaged, that it is measured, kept, resumed and exported."""

import errno
import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import flip_bit, with_changes

from curriculum.branch import branch
from curriculum.branching.copy import copy_means
from curriculum.config import build_config
from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.export import export
from curriculum.record.console_text import eval_lines
from curriculum.record.curves import eval_curves
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.train.averages import _found, _write, adopt_parts, set_aside_means_after
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.setup import build
from curriculum.train.trainer import train
from evalsets.metrics import summarise


def config_data(folder, **averages):
    """14 steps in phases of 8 and 6, checkpoints at 3, 6, 9, 12 and the end."""
    return {
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24},
        "tokenizer": {"kind": "byte"},
        "sources": {"web": {"path": str(folder / "text.txt"), "held_out": "10%"}},
        "phases": [
            {"name": "first", "until": 8, "mixture": {"web": 1.0}},
            {"name": "last", "until": "end", "mixture": {"web": 1.0}},
        ],
        "evalsets": {"every": 4, "primary": {"held_out_of": "web"}, "sets": {"web": {"held_out_of": "web"}}},
        "train": {"steps": 14, "batch_size": 4, "seq_len": 32},
        "optim": {"schedule": "constant", "lr": 3e-2, "warmup_steps": 0},
        "averages": averages,
        "checkpoint": {"every": 3, "keep": 1},
        "logging": {"every": 1, "tensorboard": True},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    numbers = np.random.default_rng(0).integers(0, 1000, 800)
    (folder / "text.txt").write_text(" ".join(f"{n} and {n + 1}" for n in numbers))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    train(build_config(config_data(folder, ema_decay=0.5, phase_mean=3)), folder / "run", store_dir=folder / "store")
    return folder / "run"


@pytest.fixture
def copied(run, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(run, tmp_path / "run")


def evals(run):
    return {event["step"]: event for event in load_run(run).events if event["event"] == "eval"}


def assert_trees_equal(one, other):
    one, other = jax.tree.leaves_with_path(one), jax.tree.leaves_with_path(other)
    assert len(one) == len(other) > 5
    for (path, a), (_, b) in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_the_mean_is_of_the_last_scheduled_checkpoints_of_its_phase(run):
    assert json.loads((run / "averages/first/mean.json").read_text()) == {"steps": [3, 6], "end": 8}
    assert json.loads((run / "averages/last/mean.json").read_text()) == {"steps": [9, 12, 14], "end": 14}
    # One checkpoint is to be kept, but a mean in the making needs three: 9 and 12 beside the last.
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [6, 9, 12, 14]
    raw = [load_params(run / f"checkpoints/{step}/params") for step in (9, 12, 14)]
    expected = jax.tree.map(lambda *arrays: np.mean(np.asarray(arrays, np.float64), axis=0), *raw)
    mean = load_params(run / "averages/last/params")
    for e, m, last in zip(*map(jax.tree.leaves, (expected, mean, raw[-1])), strict=True):
        np.testing.assert_allclose(m, e, atol=1e-6)
        assert np.abs(m - last).max() > 1e-4


def test_averages_are_measured_beside_the_raw_parameters_under_their_own_names(run, folder):
    found = evals(run)
    assert {step: [a for a in ("ema", "phase_mean") if a in event] for step, event in found.items()} == {
        0: [], 4: ["ema"], 8: ["ema", "phase_mean"], 12: ["ema"], 14: ["ema", "phase_mean"],
    }  # fmt: skip
    event = found[14]
    keys = {"val_loss", "val_bpb", "val_sem", "eval_web", "eval_web_bpb", "eval_web_sem"}
    assert event["ema"].keys() == event["phase_mean"].keys() == keys
    assert len({event["val_loss"], event["ema"]["val_loss"], event["phase_mean"]["val_loss"]}) == 3
    setup = build(build_config(config_data(folder)), folder / "store")
    try:
        for name, saved in (("ema", "checkpoints/14/ema"), ("phase_mean", "averages/last/params")):
            results = setup.suite_at(0).run(load_params(run / saved))
            assert event[name]["eval_web"] == round(summarise(results["web"]).loss, 6)
            with np.load(run / "evals/14.npz") as windows:
                np.testing.assert_allclose(windows[f"web@{name}.nats"], results["web"].nats_N, rtol=1e-6)
                assert not np.array_equal(windows[f"web@{name}.nats"], windows["web.nats"])
    finally:
        setup.course.feed.close()


def test_views_show_every_average(run):
    event = evals(run)[14]
    lines = list(eval_lines(event, 14, 0.0))
    assert lines[2] == f"  ema: val {event['ema']['val_loss']:.4f} | web {event['ema']['eval_web']:.4f}"
    assert lines[3].startswith("  phase_mean: val ") and len(lines) == 4
    curves = eval_curves(event)
    assert curves["eval/web@phase_mean/loss"] == event["phase_mean"]["eval_web"]
    assert curves["eval/val@ema/bpb"] == event["ema"]["val_bpb"]
    assert {"web", "web@ema", "val@phase_mean"} < {path.name for path in (run / "tensorboard").iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(
    "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""),
    reason="holds as the compiler makes a user's programs, which are fused alike: run it with -m slow",
)
def test_averages_change_no_bit_of_training(run, folder, tmp_path):
    train(build_config(config_data(folder)), tmp_path / "plain", store_dir=folder / "store")
    assert_trees_equal(
        load_params(tmp_path / "plain/checkpoints/14/params"), load_params(run / "checkpoints/14/params")
    )
    losses = [[row["loss"] for row in load_run(r).metrics] for r in (run, tmp_path / "plain")]
    assert losses[0] == losses[1] and len(losses[0]) == 14
    assert not (tmp_path / "plain/averages").exists() and not (tmp_path / "plain/checkpoints/14/ema").exists()


def test_a_resumed_run_has_the_same_averages(copied, run, folder):
    """Also where a checkpoint that the mean needs is a gold by now, and no other."""
    (copied / "checkpoints/9").rename(copied / "gold/9")
    config = build_config(config_data(folder, ema_decay=0.5, phase_mean=3))
    train(config, copied, resume=12, store_dir=folder / "store")
    assert (copied / "superseded/averages/last/mean.json").exists()
    assert_same_averages(run, copied)
    assert (copied / "checkpoints/9").is_dir()  # where no newer gold has it dropped


def test_an_unchanged_branch_has_the_same_averages(copied, run, folder, tmp_path):
    """Also where a checkpoint that the mean needs is in the trunk's `kept/`, and nowhere else."""
    (copied / "kept").mkdir()
    (copied / "checkpoints/9").rename(copied / "kept/9")
    branch(copied, 13, tmp_path / "new", store_dir=folder / "store")
    assert_same_averages(run, tmp_path / "new")


def test_a_branch_takes_over_the_means_up_to_its_step(run, tmp_path, capsys):
    made = RunDirectory(tmp_path / "made")
    copy_means(made, RunDirectory(run), 13)
    assert [folder.name for folder in made.averages.iterdir()] == ["first"] and capsys.readouterr().err == ""
    assert_trees_equal(load_params(made.averages / "first/params"), load_params(run / "averages/first/params"))


@pytest.mark.parametrize("content", [b"", b'{"steps": [3, 6', b"[]", b"{}", b"\xff\xfe", None])
def test_a_branch_goes_without_a_mean_that_is_damaged(run, tmp_path, capsys, content):
    trunk, made = (RunDirectory(tmp_path / name) for name in ("trunk", "made"))
    shutil.copytree(run / "averages", trunk.averages)
    sidecar = trunk.averages / "first/mean.json"
    sidecar.unlink()
    sidecar.symlink_to("nowhere") if content is None else sidecar.write_bytes(content)
    copy_means(made, trunk, 14)
    assert [folder.name for folder in made.averages.iterdir()] == ["last"]
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"{trunk.averages}/first: is damaged: ") and "mean.json" in told


def test_means_that_cannot_be_listed_are_told(tmp_path):
    trunk = RunDirectory(tmp_path)
    copy_means(RunDirectory(tmp_path / "made"), trunk, 14)
    trunk.averages.write_text("a file")
    with pytest.raises(InputError, match="averages: cannot be listed: Not a directory; fix that"):
        copy_means(RunDirectory(tmp_path / "made"), trunk, 14)


def assert_same_averages(run, other_run):
    for saved in ("checkpoints/14/params", "checkpoints/14/ema", "averages/last/params", "averages/first/params"):
        assert_trees_equal(load_params(other_run / saved), load_params(run / saved))
    assert mean_steps(other_run, "last") == mean_steps(run, "last") == [9, 12, 14]
    one, other = evals(run)[14], evals(other_run)[14]
    assert [one[name] for name in ("ema", "phase_mean")] == [other[name] for name in ("ema", "phase_mean")]
    assert not any("of phase" in note for e in (one, other) for note in e.get("notes", ()))


def test_a_moving_average_begins_with_the_parameters_where_the_checkpoint_has_none(folder, tmp_path):
    data = config_data(folder)
    data["train"]["steps"] = 6
    data["phases"] = data["phases"][1:]
    train(build_config(data), tmp_path / "run", store_dir=folder / "store")
    before = load_params(tmp_path / "run/checkpoints/6/params")
    data["train"]["steps"] = 7
    data["averages"] = {"ema_decay": 0.25}
    train(build_config(data), tmp_path / "run", resume="latest", store_dir=folder / "store")
    after, ema = (load_params(tmp_path / f"run/checkpoints/7/{item}") for item in ("params", "ema"))
    for b, a, e in zip(*map(jax.tree.leaves, (before, after, ema)), strict=True):
        np.testing.assert_allclose(e, 0.25 * b + 0.75 * a, atol=1e-6)


def changed(folder, **changes):
    return build_config(with_changes(config_data(folder, ema_decay=0.5, phase_mean=3), changes))


def mean_steps(run, phase):
    return json.loads((run / f"averages/{phase}/mean.json").read_text())["steps"]


def notes(run, step):
    return [note for note in evals(run)[step].get("notes", ()) if "of phase" in note]


def test_checkpoints_that_are_gone_are_left_out_of_a_mean(copied, folder, capsys):
    """Resumed from 6, step 3 is not there any more; with another interval, the older ones are not scheduled."""
    train(changed(folder), copied, resume=6, store_dir=folder / "store")
    assert not (copied / "averages/first").exists()  # one checkpoint is no mean
    assert notes(copied, 8) == ["no mean of phase first is taken: checkpoint 3 is gone"]
    assert "\n  no mean of phase first is taken: checkpoint 3 is gone\n" in capsys.readouterr().out
    assert mean_steps(copied, "last") == [9, 12, 14]
    train(changed(folder, checkpoint__every=4), copied, resume=9, store_dir=folder / "store")
    assert mean_steps(copied, "last") == [12, 14] and notes(copied, 14) == []


def test_a_checkpoint_that_is_damaged_is_left_out_of_a_mean(copied, folder):
    """Resumed from 9: of those before it, a resume verifies the ledger only."""
    arrays = max((copied / "checkpoints/9/params").rglob("*"), key=lambda path: path.stat().st_size)
    for path in ("checkpoints/14", "averages/last"):
        shutil.rmtree(copied / path)
    flip_bit(arrays)
    train(changed(folder), copied, resume="latest", store_dir=folder / "store")
    assert mean_steps(copied, "last") == [12, 14]
    (note,) = notes(copied, 14)
    said, _, why = note.partition(": params/")
    assert said == "the mean of phase last covers only the checkpoints 12 and 14: checkpoint 9 is damaged"
    assert why.endswith("has another checksum than the manifest says")


def test_a_mean_takes_a_checkpoint_whose_parameters_are_whole_wherever_it_is(run, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints/12")
    shutil.copytree(run / "checkpoints/14", tmp_path / "gold/14")
    for place in ("9/train", "14/params", "6/params"):
        arrays = (path for path in (tmp_path / "checkpoints" / place).rglob("*") if path.is_file())
        flip_bit(max(arrays, key=lambda path: path.stat().st_size))
    found = {step: _found(RunDirectory(tmp_path), step) for step in (6, 9, 12, 14)}
    assert found[6][0] is None and found[6][1].startswith("is damaged: params/")
    assert found[9] == ("checkpoints/9", "") and found[12] == (None, "is gone") and found[14] == ("gold/14", "")


@pytest.mark.parametrize(("phase_mean", "adopted"), [(3, [6, 9, 12]), (2, [9, 12])])
def test_what_a_mean_may_need_is_taken_from_the_golds_and_the_kept_ones(run, folder, tmp_path, phase_mean, adopted):
    for place, step in (("gold", 6), ("kept", 9), ("gold", 12), ("gold", 14)):
        shutil.copytree(run / f"checkpoints/{step}", tmp_path / place / str(step))
    config, checkpoints = (
        build_config(config_data(folder, phase_mean=phase_mean)),
        Checkpoints(tmp_path / "checkpoints"),
    )
    adopt_parts(config, RunDirectory(tmp_path), checkpoints, 14)
    assert checkpoints.steps() == adopted


def test_a_mean_of_a_phase_that_is_over_where_a_run_goes_on_stays(run, tmp_path):
    shutil.copytree(run / "averages", tmp_path / "averages")
    for step, names in ((14, ["first", "last"]), (13, ["first"]), (8, ["first"]), (7, [])):
        set_aside_means_after(RunDirectory(tmp_path), step)
        assert sorted(path.name for path in (tmp_path / "averages").iterdir()) == names


def test_a_mean_may_be_asked_for_on_a_resume(folder, tmp_path):
    data = config_data(folder)
    train(build_config(data), tmp_path / "run", store_dir=folder / "store")
    train(changed(folder, train__steps=18), tmp_path / "run", resume="latest", store_dir=folder / "store")
    assert mean_steps(tmp_path / "run", "last") == [12, 15, 18]  # of one checkpoint kept, 12 was the gold


def test_a_phase_that_is_made_longer_has_another_mean_at_its_end(copied, folder):
    train(changed(folder, train__steps=18), copied, resume="latest", store_dir=folder / "store")
    assert mean_steps(copied, "last") == [12, 15, 18]


def test_a_set_added_at_the_end_of_a_phase_is_measured_with_the_mean_that_was_taken(folder, tmp_path):
    short = config_data(folder, phase_mean=3)
    short["phases"] = short["phases"][1:]
    short["train"]["steps"] = 6
    train(build_config(short), tmp_path / "run", store_dir=folder / "store")
    assert mean_steps(tmp_path / "run", "last") == [3, 6]
    before = load_params(tmp_path / "run/averages/last/params")
    shutil.rmtree(tmp_path / "run/checkpoints/3")
    short["train"]["steps"] = 7
    short["phases"] = [{"name": "last", "until": 6, "mixture": {"web": 1.0}}, short["phases"][0] | {"name": "more"}]
    short["evalsets"]["sets"]["again"] = {"held_out_of": "web"}
    train(build_config(short), tmp_path / "run", resume="latest", store_dir=folder / "store")
    (added,) = [e for e in load_run(tmp_path / "run").events if e["event"] == "eval" and "val_loss" not in e]
    assert added["step"] == 6 and added["phase_mean"].keys() == {"eval_again", "eval_again_bpb", "eval_again_sem"}
    assert_trees_equal(load_params(tmp_path / "run/averages/last/params"), before)


def test_the_arrays_of_a_mean_are_verified_where_they_are_used(copied, tmp_path):
    means = copied / "averages"
    flip_bit(next((means / "first/params/d").iterdir()))
    (means / "last/params/_METADATA").unlink()
    set_aside_means_after(RunDirectory(copied), 14)
    assert [path.name for path in means.iterdir()] == ["first"]
    assert [path.name for path in (copied / "superseded/averages").iterdir()] == ["last"]
    with pytest.raises(InputError, match="averages/first: is damaged: params/d/.* has another checksum than"):
        export(copied, tmp_path / "out", weights="mean:first")


def test_averages_are_exported_by_name(run, tmp_path):
    assert export(run, tmp_path / "ema", weights="ema") == 14
    assert export(run, tmp_path / "mean", weights="mean:first") == 8
    for name, saved in (("ema", "checkpoints/14/ema"), ("mean", "averages/first/params")):
        arrays = load_file(tmp_path / name / "model.safetensors")
        np.testing.assert_array_equal(arrays["embed.embedding"], load_params(run / saved)["embed"]["embedding"])


def test_the_card_of_a_mean_has_what_was_measured_at_the_end_of_its_phase(run, tmp_path):
    """Which is after the last of the averaged checkpoints, here those of 3 and 6."""
    assert export(run, tmp_path / "out", format="hf", weights="mean:first") == 8
    card = (tmp_path / "out/README.md").read_text()
    assert "the mean of the last checkpoints of phase first, which ends after step 8 of 14" in card
    (val,) = [line.split(" | ") for line in card.splitlines() if line.startswith("| val (primary) |")]
    assert val[4:6] == ["8", f"{evals(run)[8]['phase_mean']['val_loss']:.4f}"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"weights": "mean:middle"}, "no mean of phase 'middle'; available: first, last"),
        ({"weights": "mean:first", "step": "9"}, "--step 9: the mean of a phase is of its last checkpoints"),
        (
            {"weights": "emma"},
            "--weights emma: unknown value; did you mean 'ema'? expected one of: raw, ema, mean",
        ),
    ],
)
def test_an_average_that_is_not_there_is_told(run, tmp_path, arguments, expected):
    with pytest.raises(InputError) as error:
        export(run, tmp_path / "out", **arguments)
    assert expected in str(error.value) and not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_moving_average_says_so(copied, tmp_path):
    shutil.rmtree(copied / "checkpoints/14/ema")
    write_manifest(copied / "checkpoints/14", 14)
    without = "--weights ema: step 14 of .* was saved without a moving average .*; expected raw"
    with pytest.raises(InputError, match=f"{without} or mean:first or mean:last$"):
        export(copied, tmp_path / "out", step="latest", weights="ema")
    shutil.rmtree(copied / "averages")
    with pytest.raises(InputError, match=f"{without}$"):
        export(copied, tmp_path / "out", step="latest", weights="ema")


def test_checks(folder):
    for averages, expected in (
        ({"ema_decay": 1.0}, "averages.ema_decay: got 1.0, expected less than 1"),
        ({"phase_mean": 1}, "averages.phase_mean: got 1, expected"),
    ):
        with pytest.raises(InputError, match=expected):
            build_config(config_data(folder, **averages))


@pytest.mark.parametrize(("num_processes", "left"), [(1, []), (2, [".first.partial"])])
def test_what_is_half_written_stays_where_another_process_may_still_write(tmp_path, monkeypatch, num_processes, left):
    def on_a_full_disk(folder, _):
        folder.mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("curriculum.train.averages.save_params", on_a_full_disk)
    monkeypatch.setattr("curriculum.train.averages.count", lambda: num_processes)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / "first", {}, {"steps": [4, 8], "end": 8})
    assert [path.name for path in tmp_path.iterdir()] == left
