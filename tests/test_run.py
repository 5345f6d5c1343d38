"""A run directory read back: which checkpoint is meant."""

import json
import shutil

import pytest
from locked import locked_by_another
from written_run import write_run

from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.find_checkpoint import CHECKPOINT_ITEMS, checkpoint_steps, find_checkpoint, read_ledger
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory


def make_checkpoint(folder, items=CHECKPOINT_ITEMS):
    for item in items:
        (folder / item).mkdir(parents=True)
    write_manifest(folder)
    return folder


@pytest.fixture
def directory(tmp_path):
    """Checkpoints 90, 100 and 120, gold at 70 with 110 pending beside it, 50 kept; and what is no checkpoint."""
    for step in ("checkpoints/90", "checkpoints/100", "checkpoints/120", "gold/70", "gold/110", "kept/50"):
        make_checkpoint(tmp_path / step)
    make_checkpoint(tmp_path / "checkpoints/140.orbax-checkpoint-tmp-1")
    (tmp_path / "checkpoints/150").write_text("a file")
    write_events(tmp_path, 30, 70)
    return RunDirectory(tmp_path)


def test_a_run_is_shown_by_its_directory(tmp_path):
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0}))
    assert len(run.events) > 5 and len(repr(run)) < 200 and str(tmp_path / "run") in repr(run)


def write_events(folder, *gold_steps):
    events = [("training_start", 0), *(("gold_checkpoint", step) for step in gold_steps), ("eval", 80)]
    stamps = {"timestamp": "then", "elapsed_s": 1.0, "tokens_processed": 100}
    lines = [json.dumps({"event": name, "step": step, **stamps}) + "\n" for name, step in events]
    (folder / "events.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", "checkpoints/120"),
        ("gold", "gold/70"),
        (None, "gold/70"),
        (100, "checkpoints/100"),
        ("100", "checkpoints/100"),
        ("090", "checkpoints/90"),
        (110, "gold/110"),
        ("50", "kept/50"),
    ],
)
def test_the_checkpoint_that_is_meant(directory, wanted, found):
    assert find_checkpoint(directory, wanted) == (int(found.partition("/")[2]), directory.path / found)
    assert checkpoint_steps(directory.checkpoints) == [90, 100, 120]
    make_checkpoint(directory.checkpoints / "130", ("params", "ledger"))
    assert checkpoint_steps(directory.checkpoints) == [90, 100, 120]


def test_without_gold_it_is_the_latest(directory):
    write_events(directory.path)
    assert find_checkpoint(directory) == (120, directory.checkpoints / "120")
    (directory.path / "events.jsonl").unlink()
    assert find_checkpoint(directory) == (120, directory.checkpoints / "120")
    with pytest.raises(InputError, match="--step gold: .* has no gold checkpoint; available: 90, 100, 120; in gold/"):
        find_checkpoint(directory, "gold")


@pytest.mark.parametrize("wanted", [None, "gold"])
def test_a_gold_that_is_gone_is_not_replaced_by_another(directory, wanted):
    write_events(directory.path, 70, 60)
    with pytest.raises(InputError) as told:
        find_checkpoint(directory, wanted)
    assert str(told.value) == (
        f"{directory.gold}/60: is gone, but the record names it as the gold checkpoint: give --step latest or another "
        "step (available: 90, 100, 120; in gold/: 70, 110; in kept/: 50), restore it from a copy, or, if the run was "
        "killed while it was being saved, resume the run, which saves it again"
    )
    assert find_checkpoint(directory, "latest")[0] == 120 and find_checkpoint(directory, 70)[0] == 70


@pytest.mark.parametrize("wanted", [None, "gold"])
def test_while_a_gold_is_being_saved_it_is_the_one_before(directory, wanted, capsys):
    with locked_by_another(directory.path):
        write_events(directory.path, 110, 70, 60)
        assert find_checkpoint(directory, wanted) == (70, directory.gold / "70")
        saved = f"{directory.gold}/60: is being saved; "
        assert capsys.readouterr().err == f"{saved}gold/70, the one before it, is used\n"
        write_events(directory.path, 60)
        if wanted is None:
            assert find_checkpoint(directory) == (120, directory.checkpoints / "120")
        else:
            with pytest.raises(InputError, match="has no gold checkpoint; available: 90"):
                find_checkpoint(directory, wanted)
        assert capsys.readouterr().err == f"{saved}there is none before it\n"


@pytest.mark.parametrize("wanted", [None, "gold"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 3000, b'{"event": "training_start", "st'])
def test_a_record_without_a_line_beside_a_gold_is_told(directory, wanted, content):
    record = directory.path / "events.jsonl"
    record.write_bytes(content)
    with pytest.raises(InputError) as told:
        find_checkpoint(directory, wanted)
    assert str(told.value) == (
        f"{record}: has no complete line to say which checkpoint is the gold one; restore it from a copy, or give a "
        "step (available: 90, 100, 120; in gold/: 70, 110; in kept/: 50)"
    )
    assert find_checkpoint(directory, "latest")[0] == 120 and find_checkpoint(directory, 70)[0] == 70
    shutil.rmtree(directory.gold)
    if wanted is None:
        assert find_checkpoint(directory)[0] == 120


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("newest", "--resume newest: expected 'latest', 'gold' or the step of a checkpoint"),
        ("-5", "--resume -5: expected"),
        ("٢", "--resume ٢: expected"),
        (13, "--resume 13: {run} has no checkpoint of that step; available: 90, 100, 120; in gold/: 70, 110; "
              "in kept/: 50"),
        ("140", "--resume 140: {run} has no checkpoint of that step"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_told(directory, wanted, words):
    with pytest.raises(InputError) as told:
        find_checkpoint(directory, wanted, option="--resume")
    assert str(told.value).startswith(words.format(run=directory.path))


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(InputError, match="holds no run; expected a directory made by `curriculum train`"):
        find_checkpoint(RunDirectory(tmp_path), "latest")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(InputError, match="has no checkpoint yet; train it up to its first save"):
        find_checkpoint(RunDirectory(tmp_path), "latest")
    make_checkpoint(tmp_path / "kept/7")
    with pytest.raises(InputError, match="--step latest: .*checkpoints is empty; available: in kept/: 7"):
        find_checkpoint(RunDirectory(tmp_path), "latest")


def test_a_ledger_is_read_without_jax(tmp_path):
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger/metadata").write_text('{"step": 7}')
    assert read_ledger(tmp_path) == {"step": 7}
    (tmp_path / "ledger/metadata").write_text('{"step"')
    with pytest.raises(InputError, match="ledger/metadata: cannot be read"):
        read_ledger(tmp_path)


def test_a_set_that_a_run_has_not_is_no_empty_curve(tmp_path):
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0, "law": lambda step: 4.0}))
    assert run.evals("law")[0] == (0, 4.0) and len(run.evals()) == len(run.evals("law")) == 6
    assert run.evals("primary") == run.evals("val")
    assert run.evals("law@ema") == []  # it was not measured
    measured = [event for event in run.events if event["event"] == "eval"]
    measured[-1]["ema"] = {"val_loss": 2.5, "eval_law": 3.5}
    assert run.evals("law@ema") == [(measured[-1]["step"], 3.5)]
    assert run.evals("primary@ema") == run.evals("val@ema") == [(measured[-1]["step"], 2.5)]
    with pytest.raises(InputError, match="run: lav: no such eval set.*'law'.*eval sets: law, val"):
        run.evals("lav@ema")
    with pytest.raises(InputError, match="run: law@eman: no such average.*averages: ema, phase_mean"):
        run.evals("law@eman")
