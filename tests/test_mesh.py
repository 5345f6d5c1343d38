"""Meshes of 1 to 8 simulated devices, all in one process that this file is run as: the devices are made at its start."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from tiny_run import write_corpus

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.model.counts import num_head, num_parameters, num_projections, num_trained
from curriculum.model.presets import PRESETS, LoraConfig, ModelConfig
from curriculum.model.transformer import transformer
from curriculum.run import load_run
from curriculum.schema.sections import MeshConfig
from curriculum.schema.shapes import uneven_rows
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.mesh import AXES, describe_devices, make_mesh, partition_spec, state_shardings
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.setup import build
from curriculum.train.step import clear_window, init_state, read_window
from curriculum.train.trainer import train
from evalsets.metrics import summarise

ROOT = Path(__file__).parents[1]
# What is asked of the compiler here does not need its optimizations, which take longer than all the rest.
ENVIRONMENT = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
ONE, FOUR, FSDP = (1, 1, 1), (1, 4, 1), (1, 8, 1)
MESHES = [ONE, (2, 1, 1), (8, 1, 1), FOUR, FSDP, (1, 1, 2), (2, 2, 2)]
STEPS, SAVED_AT = 6, 3
WORDS = {"web": "rain falls on the quiet green hills", "code": "def f ( x ) : return x + 1"}
# Float32 sums in another order: losses of 5 nats are one unit in the last place apart, 9e-8, after six updates.
TRAIN_RTOL, EVAL_RTOL = 1e-6, 1e-6


def config_data(folder, mesh):
    """6 steps of 2 x 8 rows; a model whose every axis 8 divides, but for one key and value head of 16."""
    return {
        "model": {
            "preset": "tiny", "vocab_size": 264, "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48,
            "max_seq_len": 32, "pos_encoding": "learned", "tie_embeddings": False,
        },
        "sources": {name: {"path": f"{folder}/{name}.jsonl", "held_out": "10%"} for name in ("code", "web")},
        "phases": [{"name": "only", "until": "end", "mixture": {"web": 0.5, "code": 0.5}}],
        "evalsets": {"every": 3, "primary": {"held_out_of": "web"}, "sets": {"code": {"held_out_of": "code"}}},
        "train": {"steps": STEPS, "batch_size": 16, "grad_accum": 2, "seq_len": 32},
        "optim": {"lr": 3e-3},
        "mesh": dict(zip(AXES, mesh, strict=True)),
        "checkpoint": {"every": SAVED_AT},
        "logging": {
            "every": 1, "tensorboard": False, "generate_every": SAVED_AT,
            "generate": {"prompt_tokens": 8, "max_tokens": 12, "temperature": 0},
        },
    }  # fmt: skip


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def as_bytes(state):
    return {path: np.asarray(leaf).tobytes() for path, leaf in paths(state).items()}


def parts(state):
    """Of how many parts the first device holds one, by array."""
    return {path: leaf.size // leaf.addressable_shards[0].data.size for path, leaf in paths(state).items()}


def train_on_mesh(setup, checkpoints):
    """6 updates and two evals by hand, with a checkpoint after 3; what was seen, as JSON."""
    state = setup.states.first()
    told = {"devices": describe_devices(setup.mesh), "losses": [], "grad_norms": [], "batches": [], "evals": []}
    for step in range(STEPS):
        batch = setup.course.feed[step]
        told["rows_a_device"] = batch.inputs_ABT.addressable_shards[0].data.shape[1]
        told["batches"].append(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in batch)).hexdigest())
        state = setup.update_at(step)(state, batch, *setup.course.knobs(step))
        row = read_window(state.window, setup.course.plan.sources)
        told["losses"].append(row["loss"])
        told["grad_norms"].append(row["grad_norm"])
        state = state._replace(window=clear_window(state.window))
        if step + 1 in (SAVED_AT, STEPS):
            told["evals"].append({name: summarise(r).loss for name, r in setup.suite_at(0).run(state.params).items()})
        if step + 1 == SAVED_AT:
            checkpoints.save(state, {}, {"primary": np.zeros((3, 1), np.float32)})
            checkpoints.wait()
            saved = as_bytes(state)
    told["programs"] = [len(setup.compiled.updates.seconds), len(setup.compiled.suites.seconds)]
    told["parts"] = parts(state)
    return told, saved


def compiled_step(setup):
    """What the update of a setup is before and after compilation."""
    lowered = setup.compiled.lower_update(setup.course.shape_at(0))
    compiled = lowered.compile()
    constraints = re.findall(r"sdy.sharding_constraint.*", lowered.as_text())
    return {
        "constraints_over_fsdp": sum('"fsdp"' in line for line in constraints),
        "all_to_all": compiled.as_text().count("all-to-all("),
        "flops": compiled.cost_analysis()["flops"],
    }


def main(folder: Path):
    """On 8 devices: every mesh by hand, checkpoints from 8 to 4 to 1 to 8, and a run that changes its mesh."""
    jax.config.update("jax_num_cpu_devices", 8)
    write_corpus(folder, WORDS)
    store, told, setups, saves, saved = folder / "store", {}, {}, {}, {}
    (folder / "checkpoints").mkdir()
    for mesh in MESHES:
        setups[mesh] = build(build_config(config_data(folder, mesh)), store)
        saves[mesh] = Checkpoints(folder / "checkpoints" / "x".join(map(str, mesh)))
        told[str(mesh)], saved[mesh] = train_on_mesh(setups[mesh], saves[mesh])
    for mesh in (ONE, FSDP):
        told[str(mesh)] |= compiled_step(setups[mesh])
    for mesh in (ONE, FSDP, MESHES[-1]):
        checkpoint, window_steps = saves[mesh].directory / str(SAVED_AT), setups[mesh].config.train.window_steps
        state = setups[mesh].states.restored(checkpoint, setups[mesh].course.plan.sources, window_steps)
        told[str(mesh)]["samples"] = setups[mesh].samples_at(SAVED_AT)(state.params)
        told[str(mesh)]["samples_again"] = setups[mesh].samples_at(SAVED_AT)(state.params)
    # A step and a checkpoint on each: what 8 devices saved goes on with 4, then with one, and again with 8.
    told["handed_on"], source, step, held = [], saves[FSDP], SAVED_AT, saved[FSDP]
    for mesh in (FOUR, ONE, FSDP):
        setup = setups[mesh]
        checkpoint = source.directory / str(step)
        state = setup.states.restored(checkpoint, setup.course.plan.sources, setup.config.train.window_steps)
        handed = {"mesh": mesh, "equal": as_bytes(state) == held, "num_arrays": len(held), "parts": parts(state)}
        state = setup.update_at(step)(state, setup.course.feed[step], *setup.course.knobs(step))
        handed["loss"] = read_window(state.window, setup.course.plan.sources)["loss"]
        handed["programs"] = len(setup.compiled.updates.seconds)
        told["handed_on"].append(handed)
        step, state = step + 1, state._replace(window=clear_window(state.window))
        source = saves[f"after {mesh}"] = Checkpoints(folder / "checkpoints" / f"handed on {step}")
        source.save(state, {}, {"primary": np.zeros((3, 1), np.float32)})
        source.wait()
        held = as_bytes(state)
    for made in setups.values():
        made.course.feed.close()
    for checkpoints in saves.values():
        checkpoints.close()
    train(build_config(config_data(folder, FSDP)), folder / "run", store_dir=store)
    train(build_config(config_data(folder, ONE)), folder / "run", resume=SAVED_AT, store_dir=store)
    told["refused"] = {}
    for mesh in ((-1, 3, 1), (2, 2, 4), (-1, 1, 16), (16, -1, 1)):
        try:
            make_mesh(MeshConfig(*mesh))
        except InputError as error:
            told["refused"][str(mesh)] = str(error)
    try:
        build(
            build_config({**config_data(folder, (-1, 1, 1)), "train": {"steps": 6, "batch_size": 12, "seq_len": 32}}),
            store,
        )
    except InputError as error:
        told["refused"]["rows"] = str(error)
    told["fitted"] = [
        list(make_mesh(MeshConfig(*mesh)).shape.values()) for mesh in ((-1, 2, 2), (2, -1, 1), (1, 1, -1), (3, 1, 2))
    ]
    (folder / "told.json").write_text(json.dumps(told))


def many_evals(folder: Path):
    """A hundred micro-batches of evals on 2 devices, each of which gathers the parameters."""
    jax.config.update("jax_num_cpu_devices", 2)
    write_corpus(folder, WORDS)
    data = config_data(folder, (1, 2, 1)) | {"train": {"steps": 6, "batch_size": 2, "seq_len": 16}}
    data["sources"]["web"]["held_out"] = "50%"
    setup = build(build_config(data), folder / "store")
    results = setup.suite_at(0).run(setup.states.first().params)
    setup.close()
    assert len(results["primary"].nats_N) > 4 * 90 and all(np.isfinite(r.nats_N).all() for r in results.values())


def test_evals_of_many_micro_batches_on_simulated_devices_come_to_an_end(tmp_path):
    command = [sys.executable, __file__, tmp_path, "many_evals"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)  # XLA ends it after a minute
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    done = subprocess.run([sys.executable, __file__, folder], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def told(folder):
    return json.loads((folder / "told.json").read_text())


@pytest.mark.slow
def test_a_mesh_writes_what_one_device_writes(told, folder):
    one = told[str(ONE)]["samples"]
    assert len(one) == 2 and all(sample["tokens"] for sample in one)
    for mesh in (ONE, FSDP, MESHES[-1]):
        assert told[str(mesh)]["samples"] == told[str(mesh)]["samples_again"] == one
    samples = [event for event in load_run(folder / "run").events if event["event"] == "generation"]
    assert [event["step"] for event in samples] == [SAVED_AT, STEPS] and samples[0]["samples"] == one


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_a_mesh_trains_and_evaluates_as_one_device_does(told, mesh):
    one, many = told[str(ONE)], told[str(mesh)]
    assert many["devices"] == {
        "platform": "cpu", "kind": "cpu", "num": np.prod(mesh), "mesh": dict(zip(AXES, mesh, strict=True))
    }  # fmt: skip
    assert many["rows_a_device"] == 8 // (mesh[0] * mesh[1])
    assert many["batches"] == one["batches"] and len(set(one["batches"])) == STEPS
    assert many["losses"] == pytest.approx(one["losses"], rel=TRAIN_RTOL)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=TRAIN_RTOL)
    assert one["losses"][-1] < one["losses"][0] - 0.5
    assert len(one["evals"]) == 2
    for of_many, of_one in zip(many["evals"], one["evals"], strict=True):
        assert of_many == pytest.approx(of_one, rel=EVAL_RTOL) and list(of_one) == ["primary", "code"]
    assert many["programs"] == one["programs"] == [1, 1]  # neither was compiled again on the way


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "split"), [((8, 1, 1), 1), ((1, 4, 1), 4), (FSDP, 8), ((1, 1, 2), 2), ((2, 2, 2), 4)])
def test_a_device_holds_its_part_of_parameters_and_moments(told, mesh, split):
    held = told[str(mesh)]["parts"]
    matrices = {path: parts for path, parts in held.items() if path.endswith(("kernel", "embedding"))}
    assert set(matrices.values()) == {split}
    assert (
        len(matrices) == 30
        and sum("/mu/" in path for path in matrices) == sum("/nu/" in path for path in matrices) == 10
    )
    assert {held[path] for path in held.keys() - matrices.keys()} == {1}
    assert {"window/nats_S2", "step", "params/norm/scale"} < held.keys()


@pytest.mark.slow
def test_gradients_are_split_and_each_device_takes_its_rows(told):
    one, many = told[str(ONE)], told[str(FSDP)]
    # For the gradient of each matrix, and for its sum; and where it comes back through what gathered the matrix: 7 of the
    # block, and twice embedding, positions and head.
    assert many["constraints_over_fsdp"] == 20 + 7 + 2 * 3
    assert many["all_to_all"] == 1  # of activations: the gradient of what the embedding gave
    assert many["flops"] < 1.1 * one["flops"] / 8


@pytest.mark.slow
@pytest.mark.parametrize(("at", "mesh", "split"), [(0, FOUR, 4), (1, ONE, 1), (2, FSDP, 8)])
def test_a_checkpoint_goes_on_with_another_number_of_devices(told, at, mesh, split):
    handed = told["handed_on"][at]
    assert handed["mesh"] == list(mesh) and handed["equal"] and handed["num_arrays"] > 40
    assert handed["parts"]["params/embed/embedding"] == handed["parts"]["opt_state/0/mu/head/kernel"] == split
    assert handed["loss"] == pytest.approx(told[str(ONE)]["losses"][SAVED_AT + at], rel=TRAIN_RTOL)
    assert handed["programs"] == 1


@pytest.mark.slow
def test_a_run_is_resumed_on_another_mesh_and_its_record_says_so(folder, told):
    run, one = load_run(folder / "run"), told[str(ONE)]
    begun, resumed = (next(e for e in run.events if e["event"] == name) for name in ("training_start", "resume"))
    assert begun["devices"]["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1} and begun["devices"]["num"] == 8
    assert resumed["devices"]["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1} and resumed["step"] == SAVED_AT
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in run.metrics] == pytest.approx(one["losses"], abs=6e-6)  # six decimals
    assert [loss for _, loss in run.evals()[1:]] == pytest.approx([e["primary"] for e in one["evals"]], abs=6e-6)


@pytest.mark.slow
def test_the_command_line_takes_simulated_devices_and_a_mesh(folder, tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(config_data(folder, (1, 1, 1))))
    program = "from curriculum.cli.main import main; main()"
    overrides = [f"--set=mesh.{axis}={size}" for axis, size in zip(AXES, (-1, 2, 2), strict=True)]
    command = [sys.executable, "-c", program, "train", "run.yaml", "--store-dir", folder / "store", "--dry-run"]
    environment = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *overrides], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mesh data 2 x fsdp 2 x tensor 2, 8 x cpu" in done.stdout


def test_too_many_devices_are_refused_before_anything_is_prepared(tmp_path):
    config = build_config(config_data("nowhere", (1, 2, 16)), check_paths=False)
    with pytest.raises(InputError) as error:
        build(config, tmp_path)
    assert str(error.value).startswith("config: mesh: got data 1 x fsdp 2 x tensor 16, which takes 32 devices")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_devices_is_refused(told):
    refused = told["refused"]
    assert refused["(-1, 3, 1)"] == (
        "got data -1 x fsdp 3 x tensor 1, expected sizes whose product 3 divides the 8 devices present (cpu); change "
        "one, or give a number for -1 to use fewer devices"
    )
    assert refused["(2, 2, 4)"] == (
        "got data 2 x fsdp 2 x tensor 4, which takes 16 devices, expected no more than the 8 devices present (cpu); make "
        "an axis smaller (on a CPU the environment variable JAX_NUM_CPU_DEVICES=16 simulates as many)"
    )
    assert "fsdp 1 x tensor 16, which takes 16 devices" in refused["(-1, 1, 16)"]
    assert refused["rows"] == (
        "config: train.batch_size: got 12 in 1 micro-steps of 12 rows, expected rows that the mesh's data x fsdp (8) "
        "divides; change batch_size, grad_accum or mesh"
    )
    assert told["fitted"] == [[2, 2, 2], [2, 4, 1], [1, 1, 8], [3, 1, 2]]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"data": 0}, "mesh.data: got 0, expected 1 or more, or -1 for all remaining devices"),
        ({"data": 2, "tensor": -2}, "mesh.tensor: got -2, expected 1 or more, or -1 for all"),
        ({"fsdp": -1}, "mesh: got -1 for data and fsdp, expected at most one -1; give the others a size"),
        (
            {"fsdp": 3},
            "train.batch_size: got 16 in 2 micro-steps of 8 rows, expected rows that the mesh's data x fsdp (3)",
        ),
        ({"data": 4, "fsdp": 4}, "expected rows that the mesh's data x fsdp (16) divides"),
        ({"sequence": 2}, "mesh.sequence: no such key"),
        ({"tensor": 7}, "mesh.tensor: got 7, which divides neither d_model (32) nor d_ff (48): nothing would be split"),
        ({"data": True}, "mesh.data: got true, expected an integer"),
    ],
)
def test_a_wrong_mesh_is_told_before_any_device_is_looked_at(mesh, expected):
    with pytest.raises(InputError) as error:
        build_config(config_data("nowhere", ONE) | {"mesh": mesh}, check_paths=False)
    assert len(error.value.problems) == 1 and expected in str(error.value)


def test_rows_that_fit_are_no_problem():
    assert uneven_rows(16, 2, 8) is None and uneven_rows(16, 2, 16) is not None
    config = build_config(config_data("nowhere", ONE) | {"mesh": {}}, check_paths=False)
    assert config.mesh == MeshConfig(data=-1, fsdp=1, tensor=1)
    build_config(config_data("nowhere", (-1, 8, 3)), check_paths=False)


# The rule, for a model of width 8 that fsdp 2 and tensor 4 divide, its 10 tokens excepted.
RULE = {
    "embed/embedding": P(None, "fsdp"),
    "positions/embedding": P("tensor", "fsdp"),
    "head/kernel": P("fsdp", None),
    **{f"blocks/000/attention/{name}/kernel": P("fsdp", "tensor") for name in ("query", "key", "value")},
    **{f"blocks/000/mlp/{name}/kernel": P("fsdp", "tensor") for name in ("gate", "up")},
    "blocks/000/attention/out/kernel": P("tensor", "fsdp"),
    "blocks/000/mlp/down/kernel": P("tensor", "fsdp"),
}
MODEL = ModelConfig(
    vocab_size=10, n_layer=1, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=4, pos_encoding="learned",
    tie_embeddings=False, bias=True, norm_type="layernorm", mlp_type="swiglu",
)  # fmt: skip


def specs(tree, sizes=(1, 2, 4)):
    return {path: sharding.spec for path, sharding in paths(state_shardings(AbstractMesh(sizes, AXES), tree)).items()}


def test_the_rule_places_every_parameter():
    placed = specs(transformer(MODEL).shapes())
    assert {path: spec for path, spec in placed.items() if path in RULE} == RULE
    vectors = placed.keys() - RULE.keys()
    assert {path.rpartition("/")[2] for path in vectors} == {"scale", "bias"} and len(vectors) == 13
    assert {placed[path] for path in vectors} == {P()}


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), optax.lion(1e-3), optax.contrib.muon(1e-3), make_optimizer(OptimConfig("sophia"))]
)
def test_moments_of_any_optimizer_lie_where_their_parameter_does(optimizer):
    state = jax.eval_shape(lambda params: init_state(params, optimizer, 3), transformer(MODEL).shapes())
    shapes, placed, found = paths(state), specs(state), 0
    for path, spec in placed.items():
        if path.startswith("opt_state/") and shapes[path].ndim == 2:
            (parameter,) = [name for name in RULE if path.endswith("/" + name)]
            assert spec == RULE[parameter], path
            found += 1
        elif not path.startswith("params/"):
            assert spec == P(), path
    assert found % len(RULE) == 0 and found > 0
    assert placed["window/nats_S2"] == P() and shapes["window/nats_S2"].shape == (3, 2)


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("cell", "kernel"), (4, 8), P("fsdp", "tensor")),
        (("w",), (4, 8), P("fsdp", "tensor")),
        (("w",), (3, 8), P(None, "tensor")),
        (("w",), (4, 6), P("fsdp", None)),
        (("w",), (3, 6), P()),
        (("experts", "up", "kernel"), (5, 4, 8), P(None, "fsdp", "tensor")),
        (("experts", "down", "kernel"), (5, 8, 4), P(None, "tensor", "fsdp")),
        (("out", "lora_a", "kernel"), (4, 8), P("fsdp", "tensor")),
        (("out", "bias"), (8,), P()),
        (("count",), (), P()),
    ],
)
def test_arrays_of_other_models(names, shape, expected):
    mesh = AbstractMesh((1, 2, 4), AXES)
    path = tuple(map(DictKey, names))
    assert partition_spec(path, shape, mesh) == expected
    assert partition_spec((GetAttrKey("params"), SequenceKey(0), *path), shape, mesh) == expected
    assert partition_spec((*path, GetAttrKey("sums")), shape, mesh) == P()
    assert partition_spec(path, shape, AbstractMesh((8, 1, 1), AXES)) == P()


@pytest.mark.parametrize("sizes", [(1, 1), (8, 1), (1, 2), (1, 8), (2, 4), (3, 5)], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        PRESETS["gpt2-124m"],  # of 50,257 rows
        MODEL,
        replace(PRESETS["llama-360m"], n_layer=2, tie_embeddings=False, qkv_bias=True, qk_norm=True),
        replace(PRESETS["tiny"], lora=LoraConfig(8, 16.0, ("query", "out", "down"))),
    ],
    ids=["gpt2", "model", "llama", "lora"],
)
def test_numbers_of_a_device_are_those_that_the_rule_gives_it(config, sizes):
    shapes, mesh = paths(transformer(config).shapes()), AbstractMesh((2, *sizes), AXES)
    placed = paths(state_shardings(mesh, transformer(config).shapes()))
    held = {path: math.prod(placed[path].shard_shape(array.shape)) for path, array in shapes.items()}
    split = dict(zip(("fsdp", "tensor"), sizes, strict=True))
    assert num_parameters(config, **split) == sum(held.values()) > 0
    trained = [path for path in held if config.lora is None or "lora_" in path]
    assert num_trained(config, **split) == sum(held[path] for path in trained) > 0
    kernels = [path for path in held if path.startswith("blocks/") and path.endswith("/kernel")]
    assert num_projections(config, **split) == sum(held[path] for path in kernels) > 0
    assert num_head(config, **split) == held["embed/embedding" if config.tie_embeddings else "head/kernel"]


def test_arrays_without_a_name_follow_the_rule_too():
    mesh = AbstractMesh((1, 2, 4), AXES)
    assert partition_spec((SequenceKey(1),), (4, 8), mesh) == P("fsdp", "tensor")
    assert partition_spec((), (4, 8), mesh) == P("fsdp", "tensor")


def test_the_settings_need_no_jax():
    program = "import sys, curriculum.schema.sections; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


if __name__ == "__main__":
    {"main": main, "many_evals": many_evals}[sys.argv[2] if sys.argv[2:] else "main"](Path(sys.argv[1]))
