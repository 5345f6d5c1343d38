"""Adapters beside frozen parameters: what is trained and kept, what is not, and what refuses to go on without it."""

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compared_runs import without_clock
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from noisy import noisy_params
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from started import free_port
from test_peers import meet
from test_peers import together as at_once
from tiny_run import flip_bit, tiny_data, write_corpus

from curriculum.branch import branch
from curriculum.config import build_config
from curriculum.data.tokenizers.hf_writer import write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.disk.manifest import damage, update_manifest, write_manifest
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.find_checkpoint import read_ledger
from curriculum.model.counts import num_adapters, num_parameters, num_trained
from curriculum.model.formats.hf import hf_tensors
from curriculum.model.formats.hf_config_writer import hf_config_of
from curriculum.model.formats.peft import write_peft
from curriculum.model.lora import adapters_of, frozen_of, joined, merged
from curriculum.model.loss import sum_nats
from curriculum.model.model import by_name
from curriculum.model.presets import LoraConfig, ModelConfig
from curriculum.model.transformer import forward, head, init_adapters, init_params, transformer
from curriculum.plan import plan
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.schema.adaptation import resolved_model
from curriculum.train.bases import keep_base
from curriculum.train.checkpoints.arrays import load_params, save_params
from curriculum.train.dry_run import dry_run
from curriculum.train.mesh import AXES, state_shardings
from curriculum.train.processes import together
from curriculum.train.processes.launch import Launch
from curriculum.train.resuming.start import start_of
from curriculum.train.setup import build
from curriculum.train.step import TrainState, init_state, make_train_step
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import text
from phases.batches import Batch

ALL = ("query", "key", "value", "out", "gate", "up", "down")
LLAMA = ModelConfig(
    vocab_size=37, n_layer=2, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=16, lora=LoraConfig(3, 6.0, ALL)
)
GPT2 = ModelConfig(
    vocab_size=37, n_layer=2, n_head=2, n_kv_head=2, d_model=8, d_ff=32, max_seq_len=16, pos_encoding="learned",
    mlp_type="gelu", norm_type="layernorm", bias=True, lora=LoraConfig(2, 5.0, ("query", "value", "down")),
)  # fmt: skip
LORA = {"rank": 2, "alpha": 64, "targets": ["query", "value", "gate"]}
B, T = 3, 7
RNG = np.random.default_rng(0)
TOKENS_BT1 = RNG.integers(0, LLAMA.vocab_size, (B, T + 1)).astype(np.int32)
INPUTS_BT, TARGETS_BT = TOKENS_BT1[:, :-1], TOKENS_BT1[:, 1:]
MASK_BT = RNG.random((B, T)) < 0.7


def nested(arrays):
    """The tree of parameters by dotted name."""
    tree = {}
    for name, array in arrays.items():
        *places, leaf = name.split(".")
        inside = tree
        for place in places:
            inside = inside.setdefault(place, {})
        inside[leaf] = array
    return tree


def without_adapters(config):
    return replace(config, lora=None)


def logits(config, params):
    return np.asarray(jax.jit(partial(forward, config))(params, INPUTS_BT)) @ np.asarray(head(params)).T


def test_a_model_begins_as_it_was_beside_its_adapters():
    adapted, plain = init_params(LLAMA, 5), init_params(without_adapters(LLAMA), 5)
    assert by_name(frozen_of(adapted)).keys() == by_name(plain).keys()
    assert all(np.array_equal(array, by_name(plain)[name]) for name, array in by_name(frozen_of(adapted)).items())
    adapters = by_name(adapters_of(adapted))
    assert by_name(init_adapters(LLAMA, 5)).keys() == adapters.keys() and len(adapters) == 2 * 7 * 2
    assert all(np.array_equal(array, adapters[name]) for name, array in by_name(init_adapters(LLAMA, 5)).items())
    np.testing.assert_array_equal(logits(LLAMA, adapted), logits(without_adapters(LLAMA), plain))
    assert jax.tree.structure(joined(frozen_of(adapted), adapters_of(adapted))) == jax.tree.structure(adapted)


def test_a_is_uniform_as_with_peft_and_b_is_nothing():
    config = replace(LLAMA, d_model=64, lora=LoraConfig(32, 6.0, ("query", "down")))
    adapters = by_name(init_adapters(config, 0))
    a_DR = adapters["blocks.000.attention.query.lora_a"]
    assert a_DR.shape == (64, 32) and a_DR.dtype == np.float32
    bound = 1 / 8  # kaiming_uniform with a = sqrt(5) is up to 1 / sqrt(inputs)
    assert 0.99 * bound < np.abs(a_DR).max() <= bound and abs(a_DR.mean()) < 0.05 * bound
    assert a_DR.std() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert not np.array_equal(a_DR, adapters["blocks.001.attention.query.lora_a"])
    assert not np.array_equal(a_DR, by_name(init_adapters(config, 1))["blocks.000.attention.query.lora_a"])
    bs = [array for name, array in adapters.items() if name.endswith("lora_b")]
    assert len(bs) == 4 and not any(array.any() for array in bs)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_merged_parameters_are_the_same_model(config):
    params = noisy_params(config)
    folded = merged(by_name(params), config)
    assert folded.keys() == by_name(init_params(without_adapters(config), 0)).keys()
    assert {array.dtype for array in folded.values()} == {np.dtype(np.float32)}
    expected = logits(config, params)
    np.testing.assert_allclose(logits(without_adapters(config), nested(folded)), expected, rtol=0, atol=1e-5)
    unlike = np.abs(expected - logits(config, joined(frozen_of(params), init_adapters(config, 0))))
    assert np.abs(expected).max() > 2 and unlike.max() > 0.5  # adapters that add nothing are another model


def test_an_adapter_adds_its_scaled_product():
    """One matrix by hand: value has 8 inputs and 4 outputs."""
    arrays = by_name(noisy_params(LLAMA))
    kernel_DF, a_DR, b_RF = (arrays[f"blocks.001.attention.value.{n}"] for n in ("kernel", "lora_a", "lora_b"))
    assert (kernel_DF.shape, a_DR.shape, b_RF.shape) == ((8, 4), (8, 3), (3, 4))
    expected = kernel_DF + 6.0 / 3 * np.einsum("dr,rf->df", a_DR, b_RF)
    folded = merged(arrays, LLAMA)["blocks.001.attention.value.kernel"]
    np.testing.assert_allclose(folded, expected, rtol=1e-6, atol=1e-7)  # a sum near 0 has the rounding of its parts


@pytest.mark.parametrize(
    "config", [LLAMA, pytest.param(replace(GPT2, remat="full"), marks=pytest.mark.slow)], ids=["llama", "gpt2"]
)
def test_the_gradient_is_that_of_merged_weights(config):
    """By the chain rule through W + scale A B, which the model itself never makes."""
    config = replace(config, n_layer=1)
    params = noisy_params(config)
    adapters, frozen, plain = adapters_of(params), frozen_of(params), without_adapters(config)

    def merged_nats(adapters):
        def fold(frozen, adapters):
            whole = {
                name: fold(value, adapters.get(name, {})) if isinstance(value, dict) else value
                for name, value in frozen.items()
            }
            if "lora_a" in adapters:
                whole["kernel"] += config.lora.alpha / config.lora.rank * adapters["lora_a"] @ adapters["lora_b"]
            return whole

        return sum_nats(transformer(plain), fold(frozen, adapters), INPUTS_BT, TARGETS_BT, MASK_BT)[0]

    expected = jax.jit(jax.grad(merged_nats))(adapters)
    found = gradient(config, adapters, frozen)
    for name, array in by_name(expected).items():
        np.testing.assert_allclose(
            by_name(found)[name], array, rtol=2e-4, atol=2e-5 * np.abs(array).max(), err_msg=name
        )
    assert len(by_name(expected)) >= 6 and all(np.abs(array).max() > 1e-4 for array in by_name(expected).values())


def gradient(config, adapters, frozen):
    """Of the sum of nats, as an update takes it: from how far a step at a rate of 1 goes."""
    step = make_train_step(transformer(config), optax.with_extra_args_support(optax.scale(-1.0)), 1)
    state = init_state(jax.tree.map(jnp.asarray, adapters), optax.scale(-1.0), 1)
    batch = Batch(
        inputs_ABT=INPUTS_BT[None],
        targets_ABT=TARGETS_BT[None],
        loss_mask_ABT=MASK_BT[None],
        segment_ids_ABT=np.zeros((1, B, T), np.int32),
        source_ids_AB=np.zeros((1, B), np.int32),
    )
    after = jax.jit(step)(state, batch, np.float32(1), frozen=frozen)
    assert int(after.skipped_updates) == 0
    return jax.tree.map(lambda was, now: (was - now) * MASK_BT.sum(), adapters, after.params)


def test_in_bfloat16_the_adapters_are_too():
    config = replace(LLAMA, compute_dtype="bfloat16")
    params = noisy_params(config)
    program = jax.jit(partial(forward, config)).lower(params, INPUTS_BT).as_text()
    products = re.findall(r"dot_general.*-> tensor<21x3x(\w+)>", program)
    assert len(products) == 7 and set(products) == {"bf16"}  # blocks are lowered once
    expected = logits(LLAMA, params)
    assert np.abs(logits(config, params).astype(np.float32) - expected).max() < 0.05 * np.abs(expected).max()


def num_bytes(tree):
    return sum(4 * int(np.prod(array.shape)) for array in jax.tree.leaves(tree))


def test_what_is_frozen_is_an_argument_without_a_gradient():
    config = replace(LLAMA, n_layer=1, vocab_size=501, d_ff=44, tie_embeddings=False)
    shapes, optimizer = transformer(config).shapes(), optax.with_extra_args_support(optax.adamw(1e-3))
    adapters, frozen = adapters_of(shapes), frozen_of(shapes)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer, num_sources=1), adapters)
    slots, rows = jax.ShapeDtypeStruct((2, B, T), np.int32), jax.ShapeDtypeStruct((2, B), np.int32)
    batch = Batch(slots, slots, jax.ShapeDtypeStruct((2, B, T), np.bool_), slots, rows)
    step = jax.jit(make_train_step(transformer(config), optimizer, 1, grad_clip=1.0), donate_argnums=0)
    compiled = step.lower(state, batch, jax.ShapeDtypeStruct((), np.float32), frozen=frozen).compile()
    program, sizes = compiled.as_text(), compiled.memory_analysis()
    assert sizes.argument_size_in_bytes > num_bytes(frozen) + 3 * num_bytes(adapters)
    # Out comes the state alone, in the place of the old one: adapters and two moments, and small sums.
    assert 3 * num_bytes(adapters) <= sizes.output_size_in_bytes < 3 * num_bytes(adapters) + 8000
    assert sizes.alias_size_in_bytes > 3 * num_bytes(adapters) and num_bytes(frozen) > 35_000
    # No product has the shape of a frozen matrix, as its gradient would: those of the head and of the feed-forward are
    # unlike all else. The adapters' have theirs.
    products = set(re.findall(r"f32\[([\d,]+)\]\S* (?:dot|custom-call)\(", program))
    assert products.isdisjoint({"501,8", "8,501", "8,44", "44,8"}) and products >= {"8,3", "3,44"}
    constants = re.findall(r"f32\[([\d,]+)\]\S* constant", program)
    assert all(int(np.prod([int(size) for size in shape.split(",")])) < 100 for shape in constants)


def test_adapters_lie_on_a_mesh_as_the_matrix_beside_them():
    config = replace(LLAMA, n_layer=1, lora=LoraConfig(4, 8.0, ("query", "down")))
    shardings = state_shardings(AbstractMesh((1, 2, 4), AXES), transformer(config).shapes())
    specs = {name: sharding.spec for name, sharding in by_name(shardings).items()}
    assert specs["blocks.000.attention.query.kernel"] == P("fsdp", "tensor")
    assert specs["blocks.000.attention.query.lora_a"] == P("fsdp", None)
    assert specs["blocks.000.attention.query.lora_b"] == P(None, "tensor")
    assert specs["blocks.000.mlp.down.lora_a"] == P("tensor", None)
    assert specs["blocks.000.mlp.down.lora_b"] == P(None, "fsdp")


def test_adapters_are_counted():
    # query 8 + 8, key and value 8 + 4, out 8 + 8, gate and up 8 + 12, down 12 + 8, times 3, in 2 layers
    assert num_adapters(LLAMA) == num_trained(LLAMA) == 2 * 3 * (16 + 12 + 12 + 16 + 20 + 20 + 20)
    assert num_parameters(LLAMA) == num_parameters(without_adapters(LLAMA)) + num_adapters(LLAMA)
    assert num_adapters(without_adapters(LLAMA)) == 0
    assert num_trained(without_adapters(LLAMA)) == num_parameters(without_adapters(LLAMA))
    assert ModelConfig.of(json.loads(json.dumps(LLAMA.architecture))) == LLAMA
    assert "lora" not in without_adapters(LLAMA).architecture


# Runs. Of `base` 2 steps are trained, and 4 of `run`, its adapters.


def data(place, **sections):
    model = {"preset": "tiny", "n_layer": 2, "d_model": 16, "n_head": 1, "n_kv_head": 1, "d_ff": 24}
    train = {"steps": 2, "batch_size": 4, "seq_len": 32}
    phases = [{"name": "a", "until": "end", "mixture": {"web": 1.0}}]
    return (
        tiny_data(place, model=model, train=train, phases=phases)
        | {"optim": {"lr": 1e-2, "schedule": "constant"}}
        | sections
    )


def adapting(place, **sections):
    """The config of a run beside `base`, whose model and tokenizer it takes."""
    own = {
        "name": "adapting",
        "adaptation": {"init_from": str(place / "base"), "lora": LORA},
        "train": {"steps": 4, "batch_size": 4, "seq_len": 32},
        "phases": [{"name": "b", "until": "end", "mixture": {"law": 1.0}}],
        "evalsets": {"every": 2, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}},
        "averages": {"ema_decay": 0.9, "phase_mean": 2},
    }
    return {key: value for key, value in (data(place) | own | sections).items() if key not in ("model", "tokenizer")}


def go(place, name, resume=None, **sections):
    return train(build_config(adapting(place, **sections)), place / name, resume=resume, store_dir=place / "store")


def contents(folder):
    """What each file below a folder holds, as a digest."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the runs `base` and `run`, and what was told while `run` began."""
    place = write_corpus(tmp_path_factory.mktemp("lora"))
    train(build_config(data(place)), place / "base", store_dir=place / "store")
    before = contents(place / "base")
    go(place, "run")
    assert len(before) > 20 and contents(place / "base") == before
    return place


@pytest.fixture
def copied(place, tmp_path):
    """The runs in a folder that the test may change; texts and store are shared."""
    for path in place.iterdir():
        copy = tmp_path / path.name
        shutil.copytree(path, copy) if path.name in ("base", "run") else copy.symlink_to(path)
    config = json.loads((tmp_path / "run/config.resolved.json").read_text())
    config["adaptation"]["init_from"] = str(tmp_path / "base")
    (tmp_path / "run/config.resolved.json").write_text(json.dumps(config))
    for ledger in (tmp_path / "run").glob("*/*/ledger/metadata"):
        ledger.write_text(ledger.read_text().replace(str(place / "base"), str(tmp_path / "base")))
        update_manifest(ledger.parents[1], ["ledger/metadata"])
    return tmp_path


def params_of(place, saved="run/checkpoints/4/params"):
    return by_name(load_params(place / saved))


def test_the_run_begins_with_exactly_the_losses_of_its_base(place):
    with np.load(place / "base/evals/2.npz") as base, np.load(place / "run/evals/0.npz") as run:
        assert set(base.files) == {file for file in run.files if "@" not in file} and len(base.files) >= 10
        assert all(np.array_equal(base[name], run[name]) for name in base.files)
    evals = [event for event in load_run(place / "run").events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [0, 2, 4] and evals[2]["eval_law"] < evals[0]["eval_law"] - 0.01


def test_only_adapters_are_trained_and_kept(place):
    config = resolved_model(load_run(place / "run").config, 257)
    first, last = by_name(init_adapters(config, 1337)), params_of(place)
    assert {name.rpartition(".")[2] for name in last} == {"lora_a", "lora_b"} and len(last) == 2 * 2 * 3
    assert last.keys() == first.keys() and not any(np.array_equal(last[name], first[name]) for name in last)
    state = by_name(load_params(place / "run/checkpoints/4/train")["opt_state"])
    moments = {name: array.shape for name, array in state.items() if array.ndim}
    assert sorted(moments.values()) == sorted([array.shape for array in last.values()] * 2)
    assert sum(array.nbytes for array in last.values()) == 4 * num_adapters(config)
    for item in ("ema", "params"):
        assert params_of(place, f"run/checkpoints/4/{item}").keys() == last.keys()
    assert params_of(place, "run/averages/b/params").keys() == last.keys()


def test_what_is_trained_and_the_whole_are_both_told(place):
    run = load_run(place / "run")
    config = resolved_model(run.config, 257)
    model = run.events[0]["model"]
    assert (model["num_parameters"], model["num_trained"]) == (num_parameters(config), num_trained(config))
    assert num_trained(config) == 2 * 2 * (16 + 16 + 16 + 16 + 16 + 24) < num_parameters(config)
    assert run.events[0]["plan"]["num_trained"] == num_trained(config)
    assert re.search(
        r"^adapting: [\d.]+k parameters, 416 of them trained, 4 steps$", (place / "run/train.log").read_text(), re.M
    )
    lines = "\n".join(text(inspect_run(load_run(place / "run"))))
    assert f"{num_parameters(config):,} parameters, 416 of them trained: vocab_size 257" in lines
    assert f"parameters from {place / 'base'} (tiny), step 2" in lines
    assert "num_trained" not in load_run(place / "base").events[0]["model"]
    shown = plan(build_config(adapting(place)), store_dir=place / "store")
    assert (shown.num_parameters, shown.num_trained) == (num_parameters(config), 416)
    assert shown.memory["moments"] == 2 * 4 * 416 and shown.memory["params"] == 4 * num_parameters(config)
    assert json.loads((place / "run/model.json").read_text())["lora"] == LORA


def test_a_dry_run_takes_a_step(place):
    told = dry_run(build_config(adapting(place)), store_dir=place / "store")
    assert told["num_trained"] == 416 < told["num_parameters"]
    complete = load_run(place / "base").events[-1]
    assert told["eval_losses"]["primary"] != complete["final_val_loss"]
    assert abs(told["eval_losses"]["primary"] - complete["final_val_loss"]) < 0.05


@pytest.mark.parametrize("weights", ["raw", "ema", "mean:b"])
def test_a_checkpoint_measured_later_gives_the_same_sums(place, weights):
    """Also of the averages, which are of A and of B."""
    found = evaluate(place / "run", step=None if weights == "mean:b" else 4, weights=weights, store_dir=place / "store")
    suffix = {"raw": "", "ema": "@ema", "mean:b": "@phase_mean"}[weights]
    with np.load(place / "run/evals/4.npz") as saved:
        for name, recorded in (("val", "primary"), ("law", "law")):
            nats_N = saved[f"{recorded}{suffix}.nats"]
            assert nats_N.size > 3 and np.array_equal(found.results[name].nats_N, nats_N)
            assert weights == "raw" or not np.array_equal(nats_N, saved[f"{recorded}.nats"])


def lines_of(run):
    found = load_run(run)
    events = [event for event in found.events if event["event"] != "resume"]
    return without_clock(events), without_clock(found.metrics)


def test_after_a_kill_it_goes_on_bit_for_bit(place, copied):
    shutil.rmtree(copied / "run/checkpoints/4")
    go(copied, "run", resume="latest")
    for item in ("params", "train", "ema"):
        mine, its = (params_of(folder, f"run/checkpoints/4/{item}") for folder in (copied, place))
        assert mine.keys() == its.keys() and all(mine[name].tobytes() == its[name].tobytes() for name in mine)
    (events, metrics), (its_events, its_metrics) = lines_of(copied / "run"), lines_of(place / "run")
    assert metrics == its_metrics and len(metrics) == 4
    assert events[1:] == its_events[1:] and len(events) > 6  # the first has the path of its base in it


def test_a_branch_is_trained_beside_the_same_base(place):
    branch(place / "run", 2, place / "branched", overrides=["optim.lr=2e-2"], store_dir=place / "store")
    mine, its = params_of(place, "branched/checkpoints/4/params"), params_of(place)
    assert mine.keys() == its.keys() and not any(np.array_equal(mine[name], its[name]) for name in mine)
    start = load_run(place / "branched").config
    assert start.adaptation.lora == LoraConfig(2, 64.0, ("query", "value", "gate"))
    with np.load(place / "branched/evals/2.npz") as branched, np.load(place / "run/evals/2.npz") as run:
        assert np.array_equal(branched["primary.nats"], run["primary.nats"]) and run["primary.nats"].size > 3


def resumed(place):
    """As the command does: what the run has of its own is not asked of the base."""
    config = build_config(adapting(place), continues=place / "run")
    return train(config, place / "run", resume=2, store_dir=place / "store")


GONE = ("resumed", "evaluated")


def without_its_base(place, how):
    """The message of going on, or of an eval."""
    before = contents(place / "run")
    with pytest.raises(InputError) as told:
        resumed(place) if how == "resumed" else evaluate(place / "run", step=2, store_dir=place / "store")
    assert {k: v for k, v in contents(place / "run").items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }
    return str(told.value)


def test_with_links_to_its_base_it_goes_on_without_it(copied):
    before = load_run(copied / "run").evals()
    shutil.rmtree(copied / "base")
    loss = evaluate(copied / "run", step=2, store_dir=copied / "store").summaries["val"].loss
    assert loss == pytest.approx(dict(before)[2], rel=1e-6)


@pytest.mark.parametrize("how", GONE)
def test_without_its_base_it_does_not_go_on(copied, how, monkeypatch):
    shutil.rmtree(copied / "run/frozen")  # as of a run on another disk
    shutil.rmtree(copied / "base")
    told = without_its_base(copied, how)
    assert (
        f"adaptation.init_from: '{copied / 'base'}' is gone (paths are relative to the working folder); expected step 2"
        " of run tiny that the run began from" in told
    )
    assert "adapters only" in told
    assert told.endswith("; move or link it back to that path, or restore it from a copy")
    monkeypatch.chdir(copied / "run")
    started_in = load_run(copied / "run").resolved["derived"]["started_in"]
    told = without_its_base(copied, how).splitlines()
    assert len(told) == 2 and told[1].startswith(
        f"the run {copied}/run was started in {started_in}: start this command"
    )
    monkeypatch.undo()
    (copied / "base").mkdir()
    told = without_its_base(copied, how)
    assert f"'{copied / 'base'}' holds no run any more: its config.resolved.json is missing" in told


def test_a_link_at_the_old_path_of_a_moved_base_is_enough(copied):
    shutil.rmtree(copied / "run/frozen")  # as of a run on another disk
    before = load_run(copied / "run").evals()
    (copied / "base").rename(copied / "elsewhere")
    without_its_base(copied, "evaluated")
    (copied / "base").symlink_to(copied / "elsewhere")
    loss = evaluate(copied / "run", step=2, store_dir=copied / "store").summaries["val"].loss
    assert loss == pytest.approx(dict(before)[2], rel=1e-6)


@pytest.mark.parametrize("how", GONE)
def test_nor_where_the_base_is_another_now(copied, how):
    shutil.rmtree(copied / "run/frozen")  # as of a run on another disk
    checkpoints = [folder for folder in (copied / "base").glob("*/2") if folder.parent.name in ("checkpoints", "gold")]
    assert len(checkpoints) == 2
    for folder in checkpoints:
        params = jax.tree.map(np.array, load_params(folder / "params"))
        params["blocks"]["001"]["mlp"]["up"]["kernel"][3, 5] += 1e-3
        shutil.rmtree(folder / "params")
        save_params(folder / "params", params)
        (folder / "manifest.json").unlink()
        write_manifest(folder, 2)
    told = without_its_base(copied, how)
    assert "holds other parameters than when the run began (xxh3_128 " in told
    assert f"expected {load_run(copied / 'run').events[0]['lineage']['frozen']})" in told


def test_a_damaged_base_is_told(copied):
    shutil.rmtree(copied / "run/frozen")  # as of a run on another disk
    for folder in (copied / "base/checkpoints/2", copied / "base/gold/2"):
        (folder / "ledger/metadata").write_text("{}")
    told = without_its_base(copied, "resumed")
    assert "is damaged" in told and "expected step 2 of run tiny" in told


def test_one_process_reads_the_base_for_its_checksums_and_the_others_find_the_same(copied, monkeypatch):
    config, saved = build_config(adapting(copied), continues=copied / "run"), read_ledger(copied / "run/checkpoints/2")
    port = free_port()
    both = meet(*(Launch("127.0.0.1", port, 2, i) for i in range(2)))
    for peers, place in zip(both, ("checkpoints", "gold"), strict=True):
        # Of the step that the run began from one of two is damaged; and the other too, once it was read.
        flip_bit(max((copied / "base" / place / "2/params").rglob("*"), key=lambda path: path.stat().st_size))
        monkeypatch.setattr(together, "_peers", peers)
        assert start_of(config, saved).frozen.checkpoint == copied / "base/gold/2"
    for peers, told in zip(both, (["is damaged"], []), strict=True):
        monkeypatch.setattr(together, "_peers", peers)
        with pytest.raises(InputError) as raised:
            start_of(config, saved)
        assert raised.value.in_every_process and len(raised.value.problems) == len(told)
        assert all(what in problem for what, problem in zip(told, raised.value.problems, strict=True))
    at_once(*(peers.close for peers in both))


def test_it_finds_its_base_again_wherever_that_keeps_the_step(copied):
    """The gold one at first, which is not there any more; there is a later gold now."""
    assert (copied / "base/gold/2").is_dir()
    shutil.rmtree(copied / "base/gold")
    assert resumed(copied)["total_steps"] == 4


def test_it_goes_on_where_its_base_has_deleted_the_step(place, copied):
    """From hard links of its own, as does a branch of it. Elsewhere they are as good as another base."""
    (kept,) = (place / "run/frozen").iterdir()
    assert kept.name == "2" and sorted(path.name for path in kept.iterdir()) == ["ledger", "manifest.json", "params"]
    assert damage(kept) is None
    files = [path for path in (kept / "params").rglob("*") if path.is_file()]
    assert files and all(path.samefile(place / "base/checkpoints/2" / path.relative_to(kept)) for path in files)
    for folder in (copied / "base").glob("*/2"):
        shutil.rmtree(folder)
    branch(copied / "run", 2, copied / "second", store_dir=copied / "store")
    assert resumed(copied)["total_steps"] == 4
    mine, its = params_of(copied), params_of(place)
    assert all(mine[name].tobytes() == its[name].tobytes() for name in its)
    shutil.rmtree(copied / "run")
    loss = evaluate(copied / "second", step=4, store_dir=copied / "store").summaries["val"].loss
    assert loss == pytest.approx(dict(load_run(place / "run").evals())[4], rel=1e-6)
    flip_bit(max((copied / "second/frozen/2/params").rglob("*"), key=lambda path: path.stat().st_size))
    with pytest.raises(InputError, match="base: has no checkpoint .*expected step 2 of run tiny"):
        evaluate(copied / "second", step=4, store_dir=copied / "store")


def test_without_hard_links_it_keeps_nothing_of_its_base(place, tmp_path, monkeypatch):
    def refused(path, to, **_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    keep_base(RunDirectory(tmp_path), load_run(place / "run").events[0]["lineage"])
    assert not list((tmp_path / "frozen").iterdir())


@pytest.fixture
def folder(copied):
    """`base` as a Hugging Face folder, beside it."""
    folder = copied / "hf"
    folder.mkdir()
    config = resolved_model(load_run(copied / "base").config, 257)
    arrays = params_of(copied, "base/checkpoints/2/params")
    tokenizer = load_tokenizer(copied / "base/tokenizer")
    settings = hf_config_of(config, bos=tokenizer.bos, eos=tokenizer.eot)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(hf_tensors(config, arrays)), folder / "model.safetensors", {"format": "pt"})
    write_hf_tokenizer(tokenizer, folder)
    return folder


def test_beside_a_folder_it_is_the_run_beside_the_same_checkpoint(place, copied, folder):
    """Bit for bit; and the folder, too, has to be what it was."""
    own = adapting(copied, adaptation={"init_from": str(folder), "lora": LORA})
    train(build_config(own), copied / "beside", store_dir=copied / "store")
    mine, its = params_of(copied, "beside/checkpoints/4/params"), params_of(place)
    assert mine.keys() == its.keys() and all(np.array_equal(mine[name], its[name]) for name in its)
    lineage = load_run(copied / "beside").events[0]["lineage"]
    assert (lineage["kind"], lineage["model_type"]) == ("hf", "llama")
    assert lineage["frozen"] == load_run(place / "run").events[0]["lineage"]["frozen"]
    found = evaluate(copied / "beside", step=4, store_dir=copied / "store")
    with np.load(place / "run/evals/4.npz") as saved:
        assert np.array_equal(found.results["val"].nats_N, saved["primary.nats"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] *= 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="holds other parameters than when the run began"):
        train(build_config(own, continues=copied / "beside"), copied / "beside", resume=2, store_dir=copied / "store")
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=r"does not exist.*; expected the llama model that the run began from") as told:
        train(build_config(own, continues=copied / "beside"), copied / "beside", resume=2, store_dir=copied / "store")
    assert len(told.value.problems) == 1


def test_adapters_of_adapters_are_refused_by_name(place):
    own = adapting(place, adaptation={"init_from": str(place / "run"), "lora": LORA})
    with pytest.raises(
        InputError, match=r"adaptation.init_from: '.*run' trained adapters only .* export it with --format hf"
    ):
        build_config(own)
    with pytest.raises(InputError, match="trained adapters only"):
        build_config(adapting(place, adaptation={"init_from": str(place / "run/checkpoints/2")}))


@pytest.mark.parametrize(
    ("lora", "changed"),
    [
        (
            {**LORA, "rank": 3},
            f"config: adaptation.lora.rank: got 3, but the run was begun with {LORA['rank']}; restore it",
        ),
        ({**LORA, "alpha": 1}, "config: adaptation.lora.alpha: got 1.0, but the run was begun with "),
        (None, "config: adaptation.lora: got null, but the run was begun with {"),
    ],
)
def test_the_adapters_of_a_run_cannot_change(place, lora, changed):
    with pytest.raises(InputError) as told:
        go(place, "run", resume=2, adaptation={"init_from": str(place / "base"), "lora": lora})
    (problem,) = told.value.problems
    assert problem.startswith(changed)


@pytest.mark.parametrize(
    ("adaptation", "sections", "expected"),
    [
        ({"init_from": None}, {}, "adaptation.lora: needs adaptation.init_from"),
        ({"keep_optimizer": True}, {}, "adaptation.keep_optimizer: got true, but the base run's optimizer"),
        (
            {"lora": {"rank": 17, "targets": ["gate"]}},
            {},
            "adaptation.lora.rank: got 17, expected at most 16: gate is 16",
        ),
        ({"lora": {**LORA, "rank": 0}}, {}, "adaptation.lora.rank: "),
        ({"lora": {**LORA, "alpha": 0}}, {}, "adaptation.lora.alpha: "),
        ({"lora": {**LORA, "targets": ["query", "head"]}}, {}, 'adaptation.lora.targets[1]: got "head"'),
        ({"lora": {**LORA, "targets": []}}, {}, "adaptation.lora.targets: got none"),
        ({"lora": {**LORA, "targets": ["up", "up"]}}, {}, "adaptation.lora.targets: names up 2 times"),
        ({"lora": {**LORA, "ranks": 2}}, {}, "adaptation.lora.ranks"),
        ({}, {"model": None}, "adaptation.lora: a custom model (model: null) has no adapters"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_done(place, adaptation, sections, expected):
    own = adapting(place, adaptation={"init_from": str(place / "base"), "lora": LORA} | adaptation)
    if adaptation.get("init_from", "") is None:
        own |= {"model": data(place)["model"], "tokenizer": {"kind": "byte"}}
    with pytest.raises(InputError) as told:
        build_config(own | sections)
    assert any(expected in problem for problem in told.value.problems), told.value


def test_gelu_has_no_gate():
    own = data(Path("nowhere")) | {"adaptation": {"init_from": None, "lora": LORA}}
    own["model"] = {**own["model"], "mlp_type": "gelu"}
    with pytest.raises(
        InputError, match="adaptation.lora.targets: got gate, but the model's mlp_type is gelu: .* query"
    ):
        build_config(own, check_paths=False)


def test_a_model_of_ones_own_has_no_adapters(place):
    config = build_config(adapting(place))
    with pytest.raises(InputError, match="adaptation.lora: a custom model"):
        build(config, place / "store", make_model=lambda vocab_size: None, start=start_of(config))


# What peft reads; that it does is shown in test_parity_lora.py.


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_folder_for_peft_says_what_the_adapters_add(config, tmp_path):
    arrays = by_name(noisy_params(config))
    write_peft(tmp_path, config, arrays, "some/base")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert settings["base_model_name_or_path"] == "some/base" and settings["peft_type"] == "LORA"
    added = {
        name: (array - arrays[name]).astype(np.float64)
        for name, array in merged(arrays, config).items()
        if array is not arrays[name]
    }

    def adds(module, layer):  # [inputs, outputs]
        a_RD, b_FR = (tensors[f"base_model.model.{module}.lora_{of}.weight"].astype(np.float64) for of in "AB")
        rank = settings["rank_pattern"].get(layer, settings["r"])
        assert len(a_RD) == rank
        return (settings["alpha_pattern"].get(layer, settings["lora_alpha"]) / rank * b_FR @ a_RD).T

    if config is LLAMA:
        assert settings["rank_pattern"] == {} and len(tensors) == 2 * 14 and not settings["fan_in_fan_out"]
        assert settings["target_modules"][:2] == ["self_attn.q_proj", "self_attn.k_proj"]
        assert len(settings["target_modules"]) == 7
        found = {"attention.out": adds("model.layers.1.self_attn.o_proj", "self_attn.o_proj")}
        found["mlp.gate"] = adds("model.layers.1.mlp.gate_proj", "mlp.gate_proj")
    else:
        assert (settings["r"], settings["lora_alpha"]) == (2, 5) and settings["fan_in_fan_out"]
        assert settings["rank_pattern"] == {"attn.c_attn": 4} and settings["alpha_pattern"] == {"attn.c_attn": 10}
        assert settings["target_modules"] == ["attn.c_attn", "mlp.c_proj"] and len(tensors) == 2 * 4
        fused = adds("transformer.h.1.attn.c_attn", "attn.c_attn")
        assert fused.shape == (8, 24) and not fused[:, 8:16].any()
        found = {"attention.query": fused[:, :8], "attention.value": fused[:, 16:]}
        found["mlp.down"] = adds("transformer.h.1.mlp.c_proj", "mlp.c_proj")
    for name, array in found.items():
        np.testing.assert_allclose(array, added[f"blocks.001.{name}.kernel"], atol=1e-6)
        assert np.abs(array).max() > 0.1


def test_it_is_written_in_half_the_size_too(tmp_path):
    metadata = {"step": "4", "weights": "ema"}
    half = {name: np.asarray(array, np.float16) for name, array in by_name(noisy_params(LLAMA)).items()}
    write_peft(tmp_path, LLAMA, half, "base", metadata)
    with safe_open(tmp_path / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", **metadata}
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
    mode = (tmp_path / "adapter_model.safetensors").stat().st_mode & 0o777
    assert mode == tmp_path.stat().st_mode & 0o666


def test_the_state_of_a_run_is_its_adapters(place):
    config = build_config(adapting(place))
    setup = build(config, place / "store", start=start_of(config))
    state = setup.states.first()
    assert isinstance(state, TrainState) and by_name(state.params).keys() == by_name(setup.states.like.params).keys()
    first = by_name(init_adapters(resolved_model(config, 257), config.seed))
    assert all(np.array_equal(array, first[name]) for name, array in by_name(state.params).items())
    whole = by_name(setup.states.whole(state.params))
    saved = params_of(place, "base/checkpoints/2/params")
    assert saved and all(np.array_equal(whole[name], array) for name, array in saved.items())
    assert whole.keys() == saved.keys() | by_name(state.params).keys()
    # To the compiled function it is an argument, and so is the same at every step.
    assert setup.update_at(0).keywords["frozen"] is setup.states.frozen
    after = setup.update_at(0)(state, setup.course.feed[0], *setup.course.knobs(0))
    assert by_name(after.params).keys() == by_name(setup.states.like.params).keys() and int(after.step) == 1
    assert all(np.array_equal(array, saved[name]) for name, array in by_name(setup.states.frozen).items())
    setup.course.feed.close()
