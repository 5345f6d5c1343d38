"""Run directories with damaged files: said in a line, and nothing is made of them."""

import shutil
from pathlib import Path

import pytest
from test_evaluate import folder, trained  # noqa: F401  (fixtures)
from written_run import command, write_run

from curriculum.branch import branch
from curriculum.config import build_config
from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.export import export
from curriculum.find_checkpoint import CHECKPOINT_ITEMS
from curriculum.record.windows import read_results
from curriculum.run import load_run
from curriculum.schema.adaptation import find_base
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.trainer import train


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(item):
    """Cut the files of saved arrays: what a full disk or a broken copy leaves."""
    for path in [*Path(item).glob("d/*"), *Path(item).glob("ocdbt.process_0/d/*")]:
        truncate(path)


def beginning_from(base):
    data = load_run("run").config.to_json()
    return build_config(data | {"adaptation": {"init_from": base}})


@pytest.mark.parametrize("file", ["manifest.ocdbt", "_METADATA", "d", "ocdbt.process_0/d"])
def test_arrays_of_which_any_file_is_cut_cannot_be_read(folder, file):  # noqa: F811
    params = Path("run/checkpoints/2/params")
    for path in [params / file] if (params / file).is_file() else (params / file).iterdir():
        truncate(path)
    with pytest.raises(
        InputError, match=r"checkpoints/2/params: cannot be read: .*; use the checkpoint of another step"
    ):
        load_params(params)


def test_a_checkpoint_that_cannot_be_read_is_told_and_nothing_is_made(folder):  # noqa: F811
    damage("run/checkpoints/2/params")
    shutil.rmtree("run/gold/2", ignore_errors=True)
    damaged = r"checkpoints/2: is damaged: params/.* bytes, the checksum manifest says .*\(those that verify: .*4"
    with pytest.raises(InputError, match=f"--step 2: .*{damaged}"):
        evaluate("run", step=2, store_dir="store")
    with pytest.raises(InputError, match=f"--step 2: .*{damaged}"):
        export("run", "exported", step=2)
    with pytest.raises(InputError, match=damaged):
        train(beginning_from("run/checkpoints/2"), "new", store_dir="store")
    with pytest.raises(InputError, match=f"--at 3: .*{damaged}"):
        branch("run", 3, "branched", overrides=["train.steps=6"], store_dir="store")
    assert not [name for name in ("exported", "new", "branched") if Path(name).exists()]


def test_a_checkpoint_that_cannot_go_on_is_told(folder):  # noqa: F811
    config = build_config(load_run("run").config.to_json() | {"train": {"steps": 6, "batch_size": 4, "seq_len": 32}})
    damage("run/checkpoints/4/train")
    damage("run/gold/4/train")
    before = sorted(Path("run").rglob("*"))
    with pytest.raises(InputError, match="--resume 4: .*checkpoints/4: is damaged: train/.*checksum"):
        train(config, "run", resume=4, store_dir="store")
    assert sorted(Path("run").rglob("*")) == before
    damage("run/checkpoints/2/train")
    damage("run/gold/2/train")
    with pytest.raises(InputError, match="checkpoints/4: is damaged"):
        branch("run", 4, "branched", overrides=["train.steps=6"], store_dir="store")
    assert not Path("branched").exists()


@pytest.mark.parametrize("content", ["[]", "{}", '"x"', "{", '{"name": "x", "sources": {}}'])
def test_a_config_of_another_shape_is_told(tmp_path, content):
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0})
    (path / "config.resolved.json").write_text(content)
    for read in (load_run, evaluate, find_base_config, lambda run: branch(run, 60, tmp_path / "branched")):
        with pytest.raises(InputError, match=r"config.resolved.json: (got|has no|cannot be read)"):
            read(path)
    assert not (tmp_path / "branched").exists()


def find_base_config(run):
    for item in CHECKPOINT_ITEMS:
        (run / "checkpoints/60" / item).mkdir(parents=True, exist_ok=True)
    write_manifest(run / "checkpoints/60")
    return find_base(run).config


def test_a_command_says_a_damaged_record_in_a_line(tmp_path):
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0})
    events, metrics = (path / name for name in ("events.jsonl", "metrics.jsonl"))
    for file, line, words in ((metrics, "x", "metrics.jsonl"), (events, '{"step": 1}', "events.jsonl:")):
        whole = file.read_bytes()
        file.write_bytes(whole + line.encode() + b"\n")
        for arguments in (["inspect", path], ["report", path, "-o", tmp_path / "r.html"]):
            code, out, errors, _ = command(*arguments)
            assert (code, out) == (2, "") and words in errors and "Traceback" not in errors
        file.write_bytes(whole)
    assert not (tmp_path / "r.html").exists()


def test_results_of_an_eval_that_are_cut_are_told(folder):  # noqa: F811
    truncate(Path("run/evals/2.npz"))
    with pytest.raises(InputError, match=r"evals/2.npz: cannot be read: .*; expected the arrays"):
        read_results(Path("run/evals/2.npz"))
    assert read_results(Path("run/evals/4.npz")).keys() == {"primary", "web", "law"}
    assert read_results(Path("run/evals/3.npz")) == {}
