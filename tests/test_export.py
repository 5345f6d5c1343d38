"""Export: what stands in the files is what stands in the checkpoint, and what cannot be exported is told."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.export import _rounded, export, write_safetensors
from curriculum.manifest import write_manifest
from curriculum.train.trainer import train

CURRICULUM = str(Path(sys.executable).parent / "curriculum")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """4 steps, checkpoints at 2 and 4, 257 ids padded to 264; the corpus is gone when it is exported."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 200)
    data = {
        "name": "small",
        "model": {"preset": "tiny", "n_layer": 2, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48,
                  "tie_embeddings": False, "vocab_size": 264},
        "tokenizer": {"kind": "byte"},
        "sources": {"web": {"path": str(folder / "text.txt"), "held_out": "10%"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
        "evalsets": {"primary": {"held_out_of": "web"}},
        "train": {"steps": 4, "batch_size": 4, "seq_len": 32},
        "optim": {"schedule": "constant", "lr": 1e-2},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    train(build_config(data), folder / "run", store_dir=folder / "store")
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "store/stores")
    return folder / "run"


def saved_params(run, step):
    """{dotted path: array} of a checkpoint, by orbax alone."""
    from orbax.checkpoint import StandardCheckpointer

    with StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((run / "checkpoints" / str(step) / "params").absolute())
    arrays = {}

    def walk(node, path):
        for key, below in node.items():
            if isinstance(below, dict):
                walk(below, f"{path}{key}.")
            else:
                arrays[f"{path}{key}"] = np.asarray(below)

    walk(tree, "")
    return arrays


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys() and len(arrays) > 10
    for name, array in arrays.items():
        assert array.dtype == np.float32 and array.shape == expected[name].shape, name
        assert array.tobytes() == expected[name].tobytes(), name


def test_what_is_exported_is_the_checkpoint_bit_for_bit(run, tmp_path):
    assert export(run, tmp_path / "out") == 4
    arrays = load_file(tmp_path / "out/model.safetensors")
    assert_same(arrays, saved_params(run, 4))
    assert arrays["blocks.001.attention.key.kernel"].shape == (32, 16) and arrays["head.kernel"].shape == (32, 264)
    with safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        assert file.metadata() == {"step": "4", "weights": "raw"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.json",
        "model.safetensors",
        "tokenizer",
    ]
    assert (tmp_path / "out/model.json").read_bytes() == (run / "model.json").read_bytes()
    files = [path.relative_to(run / "tokenizer") for path in (run / "tokenizer").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert (tmp_path / "out/tokenizer" / path).read_bytes() == (run / "tokenizer" / path).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left beside it
    for name in ("", "model.json"):  # others may read it who may read the run
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == (run / name).stat().st_mode & 0o777
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == (run / "model.json").stat().st_mode & 0o777


def to_bf16_bits(array):
    """float32 to bfloat16 bits by hand: the upper 16 bits, rounded to the nearest, ties to even."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")])
def test_half_the_size_by_flag(run, tmp_path, dtype, stored):
    assert export(run, tmp_path / "out", dtype=dtype) == 4
    expected, file = saved_params(run, 4), (tmp_path / "out/model.safetensors").read_bytes()
    header_bytes = int.from_bytes(file[:8], "little")
    header, body = json.loads(file[8 : 8 + header_bytes]), file[8 + header_bytes :]
    assert header.pop("__metadata__") == {"step": "4", "weights": "raw"}
    assert header.keys() == expected.keys() and len(header) > 10
    assert len(body) == sum(array.size for array in expected.values()) * (4 if dtype == "f32" else 2)
    for name, entry in header.items():
        array = expected[name]
        assert entry["dtype"] == stored and entry["shape"] == list(array.shape)
        with np.errstate(over="raise"):
            rounded = {"bf16": to_bf16_bits, "f16": lambda a: a.astype("<f2"), "f32": lambda a: a}[dtype](array)
        start, end = entry["data_offsets"]
        assert body[start:end] == rounded.tobytes(), name


def test_a_value_too_large_is_told_by_name(run, tmp_path):
    from orbax.checkpoint import StandardCheckpointer

    array = np.array([1.0, 65519.0, -65520.0, np.inf, np.nan, 7e4], np.float32)  # 65520 is the first to become infinite
    with pytest.raises(InputError) as error:
        _rounded("blocks.000.x", array, "f16", np.dtype("float16"))
    assert str(error.value) == (
        "--dtype f16: 2 of 6 values of blocks.000.x are too large for it, such as -65520; use another: f32, bf16, f16"
    )
    assert _rounded("x", array[:2], "f16", np.dtype("float16")).tolist() == [1.0, 65504.0]
    huge = tmp_path / "huge"
    shutil.copytree(run, huge)
    with StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(huge / "checkpoints/4/params")
        params["head"]["kernel"] = np.full((32, 264), 7e4, np.float32)
        checkpointer.save(huge / "checkpoints/4/params", params, force=True)
    write_manifest(huge / "checkpoints/4", 4)
    with pytest.raises(
        InputError, match="--dtype f16: 8448 of 8448 values of head.kernel are too large for it, such as 7"
    ):
        export(huge, tmp_path / "out", step="latest", dtype="f16")
    assert not (tmp_path / "out").exists()
    assert export(huge, tmp_path / "out", step="latest", dtype="bf16") == 4
    assert load_file(tmp_path / "out/model.safetensors")["head.kernel"].shape == (32, 264)


def test_an_earlier_step_into_an_empty_folder(run, tmp_path):
    assert export(run, tmp_path, step=2) == 2
    arrays = load_file(tmp_path / "model.safetensors")
    assert_same(arrays, saved_params(run, 2))
    assert any(array.tobytes() != saved_params(run, 4)[name].tobytes() for name, array in arrays.items())


def test_gold_is_what_is_exported_where_there_is_gold(run, tmp_path):
    golden = tmp_path / "golden"
    shutil.copytree(run, golden)
    shutil.rmtree(golden / "gold")
    (golden / "gold").mkdir()
    (golden / "checkpoints/2").rename(golden / "gold/2")
    with open(golden / "events.jsonl", "a") as file:
        file.write('{"event": "gold_checkpoint", "step": 2}\n')
    assert export(golden, tmp_path / "out") == 2
    assert_same(load_file(tmp_path / "out/model.safetensors"), saved_params(run, 2))
    assert export(golden, tmp_path / "latest", step="latest") == 4


def test_the_parameters_are_enough(run, tmp_path):
    """No data, no record: the rest of the run may be gone."""
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    for name in ("events.jsonl", "metrics.jsonl", "evals"):
        shutil.rmtree(bare / name) if (bare / name).is_dir() else (bare / name).unlink()
    assert export(bare, tmp_path / "out") == 4
    assert_same(load_file(tmp_path / "out/model.safetensors"), saved_params(run, 4))


def test_a_run_is_only_read(run, tmp_path):
    """What a save under way has written is not ours to clean up."""
    live = tmp_path / "live"
    shutil.copytree(run, live)
    unfinished = live / "checkpoints/6.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    (unfinished / "part").write_text("x")
    before = {path: path.is_file() and path.read_bytes() for path in live.rglob("*")}
    assert export(live, tmp_path / "out") == 4
    assert {path: path.is_file() and path.read_bytes() for path in live.rglob("*")} == before and len(before) > 20


def test_large_models_are_cut_and_the_index_tells_where_each_array_is(tmp_path):
    arrays = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 2), np.float32), "c": np.zeros(9, np.float32),
              "d": np.full(1, 7, np.float32)}  # fmt: skip
    write_safetensors(tmp_path, arrays.items(), {"step": "4"}, shard_bytes=32)  # 16 + 16 fit, 36 alone is too large
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"] == {"a": first, "b": first, "c": second, "d": third}
    assert index["metadata"] == {"total_size": 72, "step": "4"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [first, second, third, "model.safetensors.index.json"]
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name].tobytes() == arrays[name].tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: holds no run; expected a directory made by `curriculum train`"),
        (["young"], "young: has no checkpoint yet"),
        (["empty"], "empty: has no checkpoint yet"),
        (["run", "--step", "3"], "--step 3: run has no checkpoint of that step; there are: 2, 4"),
        (["run", "--step", "newest"], "--step newest: expected 'latest', 'gold' or the step of a checkpoint"),
        (["run", "--step", "٢"], "--step ٢: expected 'latest', 'gold' or the step of a checkpoint"),
        (["run", "--format", "safetensor"], "--format safetensor: there is no such one; did you mean 'safetensors'?"),
        (["run", "--weights", "best"], "--weights best: there is no such one; expected one of: raw"),
        (
            ["run", "--dtype", "fp16"],
            "--dtype fp16: there is no such one; did you mean 'f16'? expected one of: f32, bf16",
        ),
        (["run", "-o", "full"], "-o full: is there already; expected a new or an empty folder"),
        (["run", "-o", "full/note"], "-o full/note: is there already"),
        (["run", "-o", "full/note/x"], "-o full/note/x: cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_told(run, tmp_path, monkeypatch, capsys, arguments, words):
    from curriculum.cli.main import main

    (tmp_path / "run").symlink_to(run)
    for name in ("young", "empty"):
        (tmp_path / name).mkdir()
        for file in ("config.resolved.json", "model.json"):
            shutil.copy(run / file, tmp_path / name / file)
    (tmp_path / "empty/checkpoints").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").write_text("kept")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    given = ["curriculum", "export", "--format", "safetensors", "-o", "out", *arguments]  # of two the last counts
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and f"error: {words}" in capsys.readouterr().err
    assert (
        sorted(path.name for path in tmp_path.rglob("*")) == before and (tmp_path / "full/note").read_text() == "kept"
    )


def test_the_command(run, tmp_path):
    command = [
        CURRICULUM,
        "export",
        str(run),
        "--format",
        "safetensors",
        "--step",
        "2",
        "-o",
        str(tmp_path / "deep/out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'deep/out'}: step 2 of {run}, safetensors, raw weights, f32\n"
    assert done.stderr == ""
    assert_same(load_file(tmp_path / "deep/out/model.safetensors"), saved_params(run, 2))
    missing = subprocess.run(command[:-2], capture_output=True, text=True)
    assert missing.returncode == 2 and "Missing option '-o'" in missing.stderr


def test_a_failure_leaves_nothing(run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    shutil.rmtree(broken / "tokenizer")
    with pytest.raises(InputError, match="-o .*out: cannot be written: .*tokenizer"):
        export(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
