"""Export: what stands in the files is what stands in the checkpoint, and what cannot be exported is told."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run_here
from safetensors import safe_open
from safetensors.numpy import load_file
from tiny_run import tiny_train, write_corpus
from written_run import command, write_run

from curriculum.cli.options import step_text
from curriculum.config import build_config
from curriculum.data.chat import CHATML, ChatConfig, Template
from curriculum.data.tokenizers.vocabulary import char_tokenizer
from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.export import export, load_exported
from curriculum.generate import load_generator
from curriculum.model.formats.hf_config import read_hf_config
from curriculum.model.formats.safetensors_writer import rounded_all, save_arrays, write_safetensors
from curriculum.run import load_run
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.trainer import train

CURRICULUM = str(Path(sys.executable).parent / "curriculum")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`run`: 4 steps, checkpoints at 2 and 4, 257 ids padded to 264. `adapters`: 2 steps of LoRA from its step 4.

    The corpus is gone when they are exported.
    """
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
    base = str(folder / "run/checkpoints/4")
    adaptation = {"init_from": base, "lora": {"rank": 4, "alpha": 6, "targets": ["query", "down"]}}
    data |= {"adaptation": adaptation, "train": {**data["train"], "steps": 2}}
    train(build_config(data), folder / "adapters", store_dir=folder / "store")
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "store/stores")
    return folder


@pytest.fixture(scope="module")
def run(runs):
    return runs / "run"


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


def with_head(run, copied, value):
    """A copy of the run whose last checkpoint has this value all over its head."""
    from orbax.checkpoint import StandardCheckpointer

    shutil.copytree(run, copied)
    with StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(copied / "checkpoints/4/params")
        params["head"]["kernel"] = np.full((32, 264), value, np.float32)
        checkpointer.save(copied / "checkpoints/4/params", params, force=True)
    write_manifest(copied / "checkpoints/4", 4)
    return copied


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_refused(run, tmp_path, value):
    spoilt = with_head(run, tmp_path / "spoilt", value)
    with pytest.raises(
        InputError, match=r"checkpoints/4/params: 1 of \d+ arrays, such as head\.kernel, hold values that are"
    ):
        export(spoilt, tmp_path / "out", step="latest")
    assert not (tmp_path / "out").exists() and export(spoilt, tmp_path / "out", step=2) == 2


def test_a_value_too_large_is_told_by_name(run, tmp_path):
    array = np.array([1.0, 65519.0, -65520.0, np.inf, np.nan, 7e4], np.float32)  # 65520 is the first to become infinite
    with pytest.raises(InputError) as error:
        list(rounded_all([("blocks.000.x", array)], "f16"))
    assert str(error.value) == (
        "--dtype f16: 2 of 6 values of blocks.000.x are too large for it, such as -65520; use another: f32, bf16, f16"
    )
    ((_, fits),) = rounded_all([("x", array[:2])], "f16")
    assert fits.tolist() == [1.0, 65504.0]
    huge = with_head(run, tmp_path / "huge", 7e4)
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


def test_a_link_to_no_folder_yet_is_where_it_leads_to(run, tmp_path):
    (tmp_path / "link").symlink_to("elsewhere/out")
    export(run, tmp_path / "link", format="safetensors")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere/out/model.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link"]


@pytest.mark.parametrize("where", [".", "link"])
def test_an_empty_folder_by_another_name_is_written_into(run, tmp_path, monkeypatch, where):
    """It stays the folder that it was, for a shell stands in it or a link leads to it."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(out)
    monkeypatch.chdir(out if where == "." else tmp_path / "elsewhere")
    before = out.stat().st_ino
    assert export(run, where) == 4
    assert (out.stat().st_ino, (tmp_path / "elsewhere/link").is_symlink()) == (before, True)
    assert_same(load_file(out / "model.safetensors"), saved_params(run, 4))
    assert sorted(path.name for path in out.iterdir()) == ["model.json", "model.safetensors", "tokenizer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_export_left_goes_with_the_next(run, tmp_path, monkeypatch, is_there):
    out = tmp_path / "out"
    if is_there:
        out.mkdir()

    def die(folder, *_):
        scratch = folder.parent  # its copy is like that of a process that is gone: nobody holds it
        shutil.copytree(scratch, scratch.with_name(f"{scratch.name}k"))
        raise OSError("killed")

    monkeypatch.setattr("curriculum.export.write_safetensors", die)
    with pytest.raises(InputError, match="killed"):
        export(run, out)
    monkeypatch.undo()
    assert export(run, tmp_path / "other") == 4
    (left,) = tmp_path.rglob(".making.*")
    assert (left / "whole").is_dir()
    assert export(run, out) == 4
    assert sorted(path.name for path in out.iterdir()) == ["model.json", "model.safetensors", "tokenizer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_an_export_under_way_is_left_alone_by_another_of_its_name(run, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def write(folder, *arguments):
        monkeypatch.undo()
        assert export(run, out) == 4
        shutil.rmtree(out)
        write_safetensors(folder, *arguments)

    monkeypatch.setattr("curriculum.export.write_safetensors", write)
    assert export(run, out, step=2) == 2
    assert_same(load_file(out / "model.safetensors"), saved_params(run, 2))


def test_gold_is_what_is_exported_where_there_is_gold(run, tmp_path):
    golden = tmp_path / "golden"
    shutil.copytree(run, golden)
    shutil.rmtree(golden / "gold")
    (golden / "gold").mkdir()
    (golden / "checkpoints/2").rename(golden / "gold/2")
    with open(golden / "events.jsonl", "a") as file:
        file.write(
            '{"event": "gold_checkpoint", "step": 2, "timestamp": "then", "elapsed_s": 1, "tokens_processed": 256}\n'
        )
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


def test_the_same_arrays_are_the_same_bytes(tmp_path):
    arrays = {"b": np.ones((2, 3), np.float32), "a": np.arange(4, dtype=np.float16)}
    metadata = {"format": "pt", "weights": 'mean:"größer"', "step": "4"}
    for i in range(8):  # three keys stand in one of six orders
        save_arrays(arrays, tmp_path / f"{i}", metadata)
    assert len({(tmp_path / f"{i}").read_bytes() for i in range(8)}) == 1
    with safe_open(tmp_path / "0", "numpy") as file:
        assert file.metadata() == metadata
        assert all(np.array_equal(file.get_tensor(name), array) for name, array in arrays.items())


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
        (["run", "--step", "3"], "--step 3: run has no checkpoint of that step; available: 2, 4"),
        (["run", "--step", "newest"], "--step newest: expected 'latest', 'gold' or the step of a checkpoint"),
        (["run", "--step", "٢"], "--step ٢: expected 'latest', 'gold' or the step of a checkpoint"),
        (["run", "--format", "safetensor"], "--format safetensor: unknown value; did you mean 'safetensors'?"),
        (["run", "--weights", "best"], "--weights best: unknown value; expected one of: raw"),
        (
            ["run", "--dtype", "fp16"],
            "--dtype fp16: unknown value; did you mean 'f16'? expected one of: f32, bf16",
        ),
        (["run", "--dtype", "q8_0"], "--dtype q8_0: only --format gguf has it; expected one of: f32, bf16, f16"),
        (["run", "--format", "gguf", "--dtype", "q8"], "--dtype q8: unknown value; did you mean 'q8_0'?"),
        (["run", "--merge"], "--merge: run trained no adapters (adaptation.lora); leave it out"),
        (["run", "-o", "full"], "-o full: already exists; expected a new or an empty folder"),
        (["run", "-o", "full/note"], "-o full/note: already exists"),
        (["run", "-o", "full/note/x"], "-o full/note/x: cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_told(run, tmp_path, monkeypatch, arguments, words):
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
    code, _, errors = run_here("export", "--format", "safetensors", "-o", "out", *arguments)  # of two the last counts
    assert code == 2 and f"error: {words}" in errors
    assert (
        sorted(path.name for path in tmp_path.rglob("*")) == before and (tmp_path / "full/note").read_text() == "kept"
    )


def test_what_was_written_is_told_as_json(run, tmp_path):
    out = tmp_path / "out"
    code, told, _ = run_here("export", run, "--format", "safetensors", "--step", "latest", "-o", out, "--json")
    found = json.loads(told)
    files = found.pop("files")
    assert code == 0 and files["model.safetensors"] == (out / "model.safetensors").stat().st_size
    assert files["tokenizer/tokenizer.json"] and len(files) == len([f for f in out.rglob("*") if f.is_file()])
    step = json.loads((run / "training_state.json").read_text())["step"]
    assert found == {
        "run": str(run), "step": step, "output": str(out), "format": "safetensors", "weights": "raw", "dtype": "f32",
        "merge": False,
    }  # fmt: skip


def test_which_checkpoint_was_taken_is_told_of_a_run_without_a_record_too(tmp_path):
    gold = {"metric": "primary/loss", "value": 3.0, "previous": None, "previous_step": None}
    run = write_run(tmp_path / "run", {"val": lambda step: 3.0}, more={60: [("gold_checkpoint", gold)]})
    assert step_text(run, 60, None, "raw") == step_text(str(run), 60, "gold", "ema") == "step 60 (gold)"
    assert (
        step_text(run, 60, "latest", "raw")
        == step_text(run, 100, None, "raw").replace("100", "60")
        == "step 60 (latest)"
    )
    assert step_text(run, 60, "60", "raw") == step_text(run, 60, None, "mean:a") == "step 60"
    (run / "events.jsonl").unlink()
    assert step_text(run, 100, None, "raw") == "step 100 (latest)"


def test_a_gold_that_is_the_beginning_of_the_run_is_told(tmp_path, monkeypatch):
    def told(*options):
        return run_here("export", "run", "--format", "hf", "-o", "out", *options)[2].splitlines()

    write_run(tmp_path / "run", {"val": lambda step: 3.0})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("curriculum.export.export", lambda *_, step, **__: 0)
    hint = "note: step 0 is what the run began with; --step latest takes the last checkpoint"
    assert told() == [hint] and told("--step", "0") == []


def test_the_command(run, tmp_path):
    command = [CURRICULUM, *"export --format safetensors --step 2".split(), str(run), "-o", "deep/out"]
    on_a_card = os.environ | {"JAX_PLATFORMS": "cuda"}  # which it leaves alone
    done = subprocess.run(command, cwd=tmp_path, env=on_a_card, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"deep/out: step 2 of {run}, safetensors, raw weights, f32\n"
    assert_same(load_file(tmp_path / "deep/out/model.safetensors"), saved_params(run, 2))
    missing = subprocess.run(command[:-2], capture_output=True, text=True)
    assert missing.returncode == 2 and "Missing option '-o'" in missing.stderr


@pytest.mark.parametrize("format", ["safetensors", "hf", "gguf"])
def test_a_full_disk_is_told(run, tmp_path, format):
    command = ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh", CURRICULUM, *f"export --format {format} -o out".split(), run]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # a file cut short would stay
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: -o out: cannot be written: "), done.stderr
    assert "is the disk full?" in done.stderr or "File too large" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_failure_leaves_nothing(run, tmp_path):
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    shutil.copytree(run, broken)
    (broken / "tokenizer/gone").symlink_to("nowhere")
    empty.mkdir()
    for out in (empty, tmp_path / "out"):
        with pytest.raises(InputError, match=f"-o .*{out.name}: cannot be written: .*tokenizer/gone"):
            export(broken, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty"] and not list(empty.iterdir())
    shutil.rmtree(broken / "tokenizer")
    with pytest.raises(InputError, match="broken/tokenizer: is missing; restore it from a copy"):
        export(broken, tmp_path / "out")


# Each tensor of transformers for this model, and what it is made of.
LINEARS = {"self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
           "self_attn.o_proj": "attention.out", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
           "mlp.down_proj": "mlp.down"}  # fmt: skip


def as_transformers_has_them(arrays):
    """By hand: kernels [in, out] turned round, the padding from id 257 on cut off."""
    expected = {
        "model.embed_tokens.weight": arrays["embed.embedding"][:257],
        "lm_head.weight": arrays["head.kernel"].T[:257],
        "model.norm.weight": arrays["norm.scale"],
    }
    for i in range(2):
        ours, theirs = f"blocks.00{i}", f"model.layers.{i}"
        expected |= {f"{theirs}.{t}.weight": arrays[f"{ours}.{o}.kernel"].T for t, o in LINEARS.items()}
        expected[f"{theirs}.input_layernorm.weight"] = arrays[f"{ours}.attention_norm.scale"]
        expected[f"{theirs}.post_attention_layernorm.weight"] = arrays[f"{ours}.mlp_norm.scale"]
    return expected


@pytest.fixture(scope="module")
def hf_folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "out"
    assert export(run, folder, format="hf", step="latest") == 4
    return folder


def test_a_folder_for_transformers(run, hf_folder):
    assert sorted(path.name for path in hf_folder.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert_same(load_file(hf_folder / "model.safetensors"), as_transformers_has_them(saved_params(run, 4)))
    with safe_open(hf_folder / "model.safetensors", "numpy") as file:
        metadata = file.metadata()
    lineage = json.loads(metadata.pop("curriculum.lineage"))
    assert metadata == {"format": "pt", "step": "4", "weights": "raw"}
    assert (lineage["init_from"], lineage["step"], lineage["mixture"]) == (run.name, 4, {"web": 1.0})
    config = json.loads((hf_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 257
    assert config["dtype"] == "float32" and config["bos_token_id"] == config["eos_token_id"] == 256
    assert json.loads((hf_folder / "generation_config.json").read_text()) == {"bos_token_id": 256, "eos_token_id": 256}
    assert json.loads((hf_folder / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    card = (hf_folder / "README.md").read_text()
    assert (
        "# small\n" in card
        and "the parameters after step 4 of 4" in card
        and "| a | 0 to 4 | web 1 | web 512 |" in card
    )
    assert [path.name for path in hf_folder.parent.iterdir()] == ["out"]
    for path in hf_folder.iterdir():  # others may read it who may read the run
        assert path.stat().st_mode & 0o777 == (run / "model.json").stat().st_mode & 0o777, path
    assert read_hf_config(hf_folder).vocab_size == 257  # a run can begin from it


def test_a_folder_in_half_the_size(run, tmp_path):
    export(run, tmp_path / "out", format="hf", step="latest", dtype="bf16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out/model.safetensors")  # numpy has no such type: ml_dtypes has
    expected = as_transformers_has_them(saved_params(run, 4))
    assert stored.keys() == expected.keys()
    for name, array in stored.items():
        assert np.ascontiguousarray(array).view(np.uint16).tolist() == to_bf16_bits(np.array(expected[name])).tolist()
    assert "| stored as | bf16 |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
def test_transformers_computes_what_the_run_does(run, hf_folder):
    """Slow is the import of the two; tests/test_parity.py has every family."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from curriculum.model.presets import ModelConfig
    from curriculum.model.transformer import transformer

    model = transformer(ModelConfig.of(json.loads((run / "model.json").read_text())))
    params = load_params(run / "checkpoints/4/params")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf_folder)
    ids = [tokenizer.bos_token_id, *tokenizer.encode("five six séven <|endoftext|>", add_special_tokens=False)]
    assert ids[0] == 256 and bytes(ids[1:]).decode() == "five six séven <|endoftext|>"
    features = np.asarray(model.forward(params, np.array([ids]), None, None))
    ours = (features @ np.asarray(params["head"]["kernel"]))[..., :257]
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits.numpy()
    assert logits.shape == ours.shape and np.abs(logits - ours).max() <= 2e-5 * np.abs(logits).max()


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """2 steps on text, then 2 on conversations, in a template of its own."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 200)
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three"}]
    (folder / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    data = {
        "name": "chat",
        "chat": {"user": "Q: {content}\n", "assistant": "A: {content}\n"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "d_ff": 48},
        "tokenizer": {"kind": "byte"},
        "sources": {
            "web": {"path": str(folder / "text.txt"), "held_out": "10%"},
            "talks": {"path": str(folder / "talks.jsonl"), "format": "messages"},
        },
        "phases": [
            {"name": "text", "until": 2, "mixture": {"web": 1.0}},
            {"name": "chat", "until": "end", "mixture": {"talks": 1.0}},
        ],
        "evalsets": {"primary": {"held_out_of": "web"}},
        "train": {"steps": 4, "batch_size": 4, "seq_len": 32},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
    }
    train(build_config(data), folder / "run", store_dir=folder / "store")
    return folder / "run"


def exported_template(folder):
    return json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")


def test_conversations_bring_their_template(chat_run, tmp_path):
    from gguf import GGUFReader

    export(chat_run, tmp_path / "hf", format="hf", step=4)
    export(chat_run, tmp_path / "gguf", format="gguf", step=4)
    template = exported_template(tmp_path / "hf")
    assert """{{- "Q: " + message['content'] + "\\n" }}""" in template
    assert GGUFReader(tmp_path / "gguf/model.gguf").fields["tokenizer.chat_template"].contents() == template
    for format in ("hf", "gguf"):
        card = (tmp_path / format / "README.md").read_text()
        assert "Once upon a time" not in card and "\nQ: Who are you?\nA: \n" in card
        assert ("tokenizer.apply_chat_template(messages, add_generation_prompt=True" in card) == (format == "hf")
        ids = "[text]" if format == "hf" else "[[256, *'Q: Who are you?\\nA: '.encode()]]"
        assert f"ids = torch.tensor({ids})" in card  # the template begins with bos_token, so do bytes
        assert 'Its roles are system, user, assistant. An answer ends before `"\\n"`.' in card
    assert "llama-cli -m model.gguf --jinja -cnv" in card


def test_what_saw_no_conversation_has_no_template(chat_run, run, tmp_path):
    for source, step in ((chat_run, 2), (run, 4)):
        folder = tmp_path / str(step)
        export(source, folder, format="hf", step=step)
        assert exported_template(folder) is None
        assert "Once upon a time" in (folder / "README.md").read_text()


def test_a_run_that_begins_from_one_that_knows_conversations_knows_its_template(
    chat_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    model = load_run(chat_run).config.to_json()["model"]
    of_text = {"adaptation": {"init_from": str(chat_run / "checkpoints/4")}, "model": model}
    tiny_train(tmp_path, Path("text"), **of_text)
    chat = {"system": CHATML.system, "user": "Q: {content}\n", "assistant": "A: {content}\n", "tool": None}
    lineage = load_run("text").start["lineage"]
    assert lineage["chat"] == chat
    tiny_train(tmp_path, Path("later"), adaptation={"init_from": "text"}, model=model)
    export("later", "hf", format="hf", step="latest")
    export(chat_run, "of_base", format="hf", step=4)
    assert exported_template(Path("hf")) == exported_template(Path("of_base")) is not None
    assert load_generator("later", step="latest").template == Template(ChatConfig(**chat))
    with pytest.raises(InputError, match=re.escape("prompts: got 'the fox', expected a list, as in ['the fox']")):
        load_generator("later", step="latest").prompts("the fox")
    assert load_generator("later", step="latest").knows_chat
    untaught = load_generator(chat_run, step=2)  # before the first conversation
    assert untaught.template == Template(ChatConfig(**chat)) and not untaught.knows_chat
    tiny_train(tmp_path, Path("untaught"), adaptation={"init_from": str(chat_run / "checkpoints/2")}, model=model)
    assert "chat" not in load_run("untaught").start["lineage"]

    talks = {"path": str(chat_run.parent / "talks.jsonl"), "format": "messages", "held_out": 0}
    train_on = {
        "sources": {"talks": talks, "web": {"path": "web.jsonl", "held_out": "20%"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"talks": 1.0}}],
        "evalsets": {"primary": {"held_out_of": "web"}},
        **of_text,
    }
    other = {"user": "U: {content}\n", "assistant": chat["assistant"]}
    for name, given, warns in (
        ("inherits", {}, False),
        ("same", {"chat": chat}, False),
        ("other", {"chat": other}, True),
    ):
        tiny_train(tmp_path, Path(name), **train_on, **given)
        run = load_run(name)
        assert run.config.chat.user == ("U: {content}\n" if name == "other" else chat["user"])
        of_base = f"conversations are written by another template than {chat_run / 'checkpoints/4'} was trained with: "
        warned = [w for w in run.start["warnings"] if "another template" in w]
        assert warned == [of_base + r'chat.user is "Q: {content}\n" there'] * warns
    longer = {"steps": 14, "batch_size": 4, "seq_len": 32}
    tiny_train(tmp_path, Path("inherits"), resume=10, **train_on, train=longer)
    assert load_run("inherits").config.chat.user == chat["user"]


def test_biases_of_query_key_and_value_go_out_as_a_class_that_keeps_the_tokenizer(tmp_path):
    """Beside a Qwen2 model transformers would build Qwen's tokenizer."""
    write_corpus(tmp_path)
    model = {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 1, "n_kv_head": 1, "d_ff": 24, "qkv_bias": True}
    tiny_train(tmp_path, tmp_path / "run", model=model)
    export(tmp_path / "run", tmp_path / "hf", format="hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["model_type"], config["attention_bias"], config["mlp_bias"]) == ("llama", True, False)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    assert not tensors["model.layers.0.self_attn.o_proj.bias"].any()
    assert tensors["model.layers.0.self_attn.q_proj.bias"].any()
    assert read_hf_config(tmp_path / "hf").qkv_bias


def test_a_bare_run_makes_a_card_that_says_so(run, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    for name in ("events.jsonl", "metrics.jsonl", "evals", "gold"):
        shutil.rmtree(bare / name) if (bare / name).is_dir() else (bare / name).unlink()
    assert export(bare, tmp_path / "out", format="hf") == 4
    assert "The record of the run was missing at export" in (tmp_path / "out/README.md").read_text()


def changed(run, folder, file, **changes):
    """A copy of a run with changes in one of its JSON files, and without arrays: they are not looked at."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("params"))
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))
    return folder


def test_a_branch_is_named_by_its_directory(chat_run, tmp_path):
    from gguf import GGUFReader

    shutil.copytree(chat_run, tmp_path / "other")
    file = tmp_path / "other/config.resolved.json"
    resolved = json.loads(file.read_text())
    resolved["derived"]["branched_from"] = {"run": "runs/chat", "step": 2, "id": "x", "branched_from": None}
    file.write_text(json.dumps(resolved))
    for run, name in ((chat_run, "chat"), (tmp_path / "other", "other")):
        export(run, tmp_path / f"of_{name}", format="gguf", step=4)
        assert GGUFReader(tmp_path / f"of_{name}/model.gguf").fields["general.name"].contents() == name
        assert f"\n# {name}\n" in (tmp_path / f"of_{name}/README.md").read_text()


@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_what_no_class_has_is_told_before_anything_heavy(run, tmp_path, format):
    odd = changed(run, tmp_path / "odd", "model.json", pos_encoding="learned", n_kv_head=2)
    code, _, errors, modules = command("export", odd, "--format", format, "-o", tmp_path / "out")
    assert code == 2 and "jax" not in modules and "numpy" in modules
    for field in ("mlp_type", "norm_type", "bias"):
        assert f"model.{field}: got " in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_a_model_of_ones_own_has_no_class(run, tmp_path, format):
    own = changed(run, tmp_path / "own", "config.resolved.json", model=None)
    with pytest.raises(InputError, match=f"--format {format}: .*own was trained with a custom model"):
        export(own, tmp_path / "out", format=format)


def adapters_by_hand(runs):
    """{name of the matrix: W + 6 / 4 A B} of the run of adapters, and what those are made of."""
    adapters, base = saved_params(runs / "adapters", 2), saved_params(runs / "run", 4)
    whole = dict(base)
    for name in [name.removesuffix(".lora_a") for name in adapters if name.endswith(".lora_a")]:
        product = adapters[f"{name}.lora_a"].astype(np.float64) @ adapters[f"{name}.lora_b"]
        whole[f"{name}.kernel"] = (base[f"{name}.kernel"] + 1.5 * product).astype(np.float32)
    return adapters, base, whole


def test_adapters_are_folded_in(runs, tmp_path):
    adapters, base, whole = adapters_by_hand(runs)
    assert len(adapters) == 8  # A and B of two matrices in two layers
    assert export(runs / "adapters", tmp_path / "hf", format="hf", step="latest", merge=True) == 2
    assert_same(load_file(tmp_path / "hf/model.safetensors"), as_transformers_has_them(whole))
    assert "adapters folded in" in (tmp_path / "hf/README.md").read_text()
    export(runs / "adapters", tmp_path / "own", step="latest", merge=True)
    assert_same(load_file(tmp_path / "own/model.safetensors"), whole)
    assert (tmp_path / "own/model.json").read_text() == (runs / "run/model.json").read_text()
    moved = [name for name in whole if whole[name].tobytes() != base[name].tobytes()]
    assert sorted({name.split(".", 2)[2] for name in moved}) == ["attention.query.kernel", "mlp.down.kernel"]


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_adapters_alone_are_a_folder_for_peft(runs, tmp_path, format):
    assert export(runs / "adapters", tmp_path / "out", format=format, step="latest") == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    stored, adapters = load_file(tmp_path / "out/adapter_model.safetensors"), adapters_by_hand(runs)[0]
    prefix = "base_model.model.model.layers.1"
    assert len(stored) == 8
    assert np.array_equal(stored[f"{prefix}.mlp.down_proj.lora_A.weight"], adapters["blocks.001.mlp.down.lora_a"].T)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(runs / "run/checkpoints/4") and config["r"] == 4
    with pytest.raises(InputError, match=r"only adapters; export the run with --merge"):
        load_exported(tmp_path / "out", None)
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: peft" in card
    assert f"`curriculum export {runs / 'run'} --step 4 --format hf -o base`, and write that folder" in card


def test_adapters_alone_are_no_gguf(runs, tmp_path):
    with pytest.raises(InputError, match="--format gguf: the run trained adapters only; fold them in with --merge"):
        export(runs / "adapters", tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


def test_a_file_for_llama_cpp(run, tmp_path, capsys):
    """What stands in the file is tests/test_gguf.py's; here that it is of this step, and all that it needs."""
    import gguf

    assert export(run, tmp_path / "out", format="gguf", step=2, dtype="q8_0") == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "out/model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["general.name"] == "small"
    assert (fields["curriculum.step"], fields["curriculum.weights"]) == ("2", "raw")
    assert len(fields["tokenizer.ggml.tokens"]) == 257
    tensors, saved = {tensor.name: tensor for tensor in reader.tensors}, saved_params(run, 2)
    assert len(tensors) == len(saved)
    assert tensors["blk.1.attn_norm.weight"].data.tolist() == saved["blocks.001.attention_norm.scale"].tolist()
    assert tensors["blk.0.attn_v.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    # Rows of 48 are no multiple of 32.
    told = "q8_0: 2 matrices are stored as f16 (rows not a multiple of 32): blk.0.ffn_down.weight, blk.1."
    assert told in capsys.readouterr().err
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: gguf" in card and "| a | 0 to 2 of 4 | web 1 | web 256 |" in card


def test_a_gguf_of_bytes_says_how_ids_are_made(run, tmp_path, capsys):
    export(run, tmp_path / "out", format="gguf", step=2)
    told = "transformers reads no tokenizer without merges from a GGUF file; llama.cpp does"
    assert capsys.readouterr().err.splitlines() == [f"gguf: {told}"]
    card = (tmp_path / "out/README.md").read_text()
    assert f"\nAbout the tokenizer in `model.gguf`:\n\n- {told}\n" in card  # whose ids are those of training
    assert "AutoTokenizer" not in card and "tokenizer.bos_token_id" not in card
    assert "ids = torch.tensor([[256, *'Once upon a time'.encode()]])" in card


@pytest.mark.slow
def test_the_call_of_a_gguf_of_bytes_runs(run, chat_run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for name, source in (("text", run), ("chat", chat_run)):
        export(source, tmp_path / name, format="gguf", step="latest")
        monkeypatch.chdir(tmp_path / name)
        (code,) = re.findall(r"```python\n(.*?)\n```", Path("README.md").read_text(), re.DOTALL)
        capsys.readouterr()
        exec(code, {})
        starts = "Once upon a time" if name == "text" else "Q: Who are you?\nA: "
        assert capsys.readouterr().out.startswith(starts)


def test_adapters_are_folded_into_a_gguf(runs, tmp_path):
    import gguf

    export(runs / "adapters", tmp_path / "out", format="gguf", step="latest", merge=True)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors}
    whole = adapters_by_hand(runs)[2]
    assert np.array_equal(tensors["blk.1.ffn_down.weight"].data, whole["blocks.001.mlp.down.kernel"].T)


def test_a_tokenizer_that_llama_cpp_has_not_is_told_at_once(run, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(run, odd, ignore=shutil.ignore_patterns("params"))
    shutil.rmtree(odd / "tokenizer")
    char_tokenizer(["one two three"]).save(odd / "tokenizer")
    with pytest.raises(InputError, match="tokenizer.kind: char cannot be written as GGUF"):
        export(odd, tmp_path / "out", format="gguf")
