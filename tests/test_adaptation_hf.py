"""A run that begins from a Hugging Face folder, or takes the shape of its model."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from curriculum.cli.plan import table
from curriculum.config import build_config, changed_config, config_from_json, load_config
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.errors import InputError
from curriculum.export import export
from curriculum.find_checkpoint import read_ledger
from curriculum.model.counts import num_parameters
from curriculum.model.formats.hf import hf_tensors, load_hf
from curriculum.model.formats.hf_config_writer import hf_config_of
from curriculum.model.formats.hf_weights import hf_fingerprint
from curriculum.model.model import abstract_params, parameter_name
from curriculum.model.presets import ModelConfig, RopeScaling
from curriculum.model.transformer import transformer
from curriculum.plan import plan
from curriculum.run import load_run
from curriculum.schema.adaptation import LINEAGE, find_base
from curriculum.schema.sections import MeshConfig
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.mesh import abstract_on_mesh, make_mesh
from curriculum.train.trainer import train
from curriculum.views.compare import compare
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import lineage_lines

NUM_TOKENS, NUM_ROWS = 270, 272  # the tokenizer's ids and the embedding's rows: as in Qwen's folders there are more
CONFIG = ModelConfig(
    vocab_size=NUM_ROWS, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, max_seq_len=64, qkv_bias=True,
    tie_embeddings=False, rope_scaling=RopeScaling("llama3", 2.0, 32),
)  # fmt: skip
RUN = """
name: adapted
sources: {law: {path: law.txt, held_out: 10%}}
phases: [{name: a, until: end, mixture: {law: 1}}]
evalsets: {primary: {held_out_of: law}}
train: {steps: 2, batch_size: 4, seq_len: 16}
optim: {lr: 1e-2, schedule: constant}
checkpoint: {every: 1}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with the text law.txt, run.yaml and the Hugging Face folder `hf`, whose weights are random."""
    folder = tmp_path_factory.mktemp("hf")
    text = "the party of the first part shall not be the party of the second part\n" * 60
    (folder / "law.txt").write_text(text)
    (folder / "run.yaml").write_text(RUN)
    write_model(folder / "hf", CONFIG)
    write_bpe(folder / "hf", text)
    return folder


def write_bpe(folder, text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def write_model(folder, config, seed=0):
    folder.mkdir()
    rng = np.random.default_rng(seed)
    shapes = jax.tree.leaves_with_path(abstract_params(transformer(config)))
    params = {parameter_name(path): 0.1 * rng.standard_normal(a.shape, np.float32) for path, a in shapes}
    save_file(dict(hf_tensors(config, params)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config_of(config, bos=0, eos=0)))


@pytest.fixture
def folder(pretrained, tmp_path, monkeypatch):
    """The same where the test may change it."""
    shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapted(*overrides, **options):
    return load_config("run.yaml", overrides, **{"init_from": "hf"} | options)


def test_a_run_begins_with_the_folder_and_goes_on_without_it(folder):
    config = adapted("train.steps=1")
    train(config, "run", store_dir="store")
    run = load_run("run")
    lineage = {"init_from": "hf", "kind": "hf", "model_type": "qwen2", "keep_optimizer": False, "lineage": None}
    assert run.start["lineage"] == lineage | {"fingerprint": hf_fingerprint("hf")}
    assert ModelConfig.of(json.loads(Path("run/model.json").read_text())) == CONFIG
    assert run.resolved["tokenizer"]["path"] == "hf" and run.resolved["model"]["rope_scaling"]["factor"] == 2.0
    assert load_tokenizer("run/tokenizer").fingerprint == load_tokenizer("hf").fingerprint
    assert config_from_json(run.config.to_json()) == config

    mesh = make_mesh(MeshConfig())
    like = abstract_on_mesh(mesh, abstract_params(transformer(CONFIG)))
    first = jax.tree.leaves(load_hf("hf", CONFIG, like))
    after = jax.tree.leaves(load_params(Path("run/checkpoints/1/params")))
    moved = [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(first, after, strict=True)]
    assert len(moved) == 15 and 0 < max(moved) < 0.011  # one update of adam moves by lr at most, and decay a little

    shutil.rmtree("hf")
    again = adapted("train.steps=2", continues="run")
    assert again.model == config.model and again.tokenizer == config.tokenizer
    assert train(again, "run", resume="latest", store_dir="store")["step"] == 2
    assert load_run("run").resolved["derived"]["lineage"] == run.start["lineage"]
    with pytest.raises(InputError, match="adaptation.init_from: 'hf' does not exist"):
        adapted()


def test_the_first_parameters_are_the_folders_bit_for_bit(folder):
    from curriculum.train.resuming.start import start_of
    from curriculum.train.setup import build

    config = adapted("model.vocab_size=320", "mesh.fsdp=1")
    setup = build(config, "store", start=start_of(config))
    setup.course.feed.close()
    state = setup.states.first()
    assert setup.model.num_ids == NUM_ROWS and int(state.step) == 0
    params = {parameter_name(path): np.asarray(a) for path, a in jax.tree.leaves_with_path(state.params)}
    assert params["embed.embedding"].shape == (320, 16) and not params["embed.embedding"][NUM_ROWS:].any()
    padded = ModelConfig(**vars(CONFIG) | {"vocab_size": 320, "num_ids": NUM_ROWS})
    written, came = dict(hf_tensors(padded, params)), load_file("hf/model.safetensors")
    assert written.keys() == came.keys() and len(came) == 15
    assert all(np.array_equal(written[name], came[name]) for name in came)


def test_a_folder_that_is_taken_up_again_is_the_one_it_was(folder):
    from curriculum.train.bases import base_again
    from curriculum.train.resuming.start import start_of

    config = adapted()
    lineage = start_of(config).lineage
    assert base_again(config, transformer(CONFIG), lineage) == start_of(config).base
    tensors = load_file("hf/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, "hf/model.safetensors")
    with pytest.raises(InputError, match="hf: holds other weights than when the run began"):
        base_again(config, transformer(CONFIG), lineage)
    shutil.rmtree("hf")
    with pytest.raises(InputError, match="'hf' does not exist.*; expected the qwen2 model that the run began from"):
        base_again(config, transformer(CONFIG), lineage)


def test_a_plan_says_so(folder):
    shown = plan(adapted())
    assert shown.num_parameters == num_parameters(CONFIG)
    assert "begins with the parameters of a qwen2 model (hf)" in table(shown)


def test_sections_that_agree_and_those_that_do_not(folder):
    shutil.copytree("hf", "copy")
    taken = adapted()
    assert adapted("tokenizer={kind: hf, path: copy}").tokenizer == taken.tokenizer
    assert adapted("model={from: hf}").model == taken.model
    assert adapted("model.dropout=0.1").model.dropout == 0.1
    for override, words in (
        ("model.vocab_size=271", "model.vocab_size: got 271, but hf has 272 rows; expected as many, or more"),
        (
            "model={from: hf, d_ff: 32}",
            "model: the architecture is not that of hf: d_ff 32 (there 24); leave the section "
            "out to use the same, or give no preset and only what may differ (dropout, compute_dtype, remat, attention, "
            "layers, max_seq_len, vocab_size as padding)",
        ),
        ("model.num_ids=271", "model: the architecture is not that of hf: vocab_size 271 (there 272)"),
        ("tokenizer={kind: byte}", "tokenizer.kind: got byte, but hf has hf"),
    ):
        with pytest.raises(InputError) as told:
            adapted(override)
        assert any(words in problem for problem in told.value.problems), told.value.problems


def test_what_a_folder_cannot_give(folder):
    with pytest.raises(
        InputError, match="adaptation.keep_optimizer: got true, but hf is a Hugging Face folder, which holds"
    ):
        adapted(keep_optimizer=True)

    def other(vocab_size):
        return transformer(CONFIG)

    with pytest.raises(InputError, match=r"adaptation.init_from: hf is a Hugging Face folder, .* \(make_model\)"):
        train(adapted(), "run", store_dir="store", make_model=other)
    assert not Path("run").exists()


def test_a_folder_that_is_not_whole_is_told_in_full(folder):
    os.remove("hf/tokenizer.json")
    tensors = load_file("hf/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, "hf/model.safetensors")
    with pytest.raises(InputError) as told:
        adapted()
    assert told.value.problems == (
        "--init-from hf: adaptation.init_from: hf: model.norm.weight: is missing, expected [16]",
        "--init-from hf: adaptation.init_from: hf/tokenizer.json: is missing (the tokenizer in the format of "
        "`tokenizers`); AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it",
    )
    Path("hf/config.json").write_text('{"model_type": "bert"}')
    Path("hf/model.safetensors").write_bytes(b"")
    with pytest.raises(InputError) as told:
        adapted()
    assert [problem.split(": ")[2] for problem in told.value.problems] == [
        "hf/config.json", "hf/model.safetensors", "hf/tokenizer.json",
    ]  # fmt: skip
    os.remove("hf/config.json")
    with pytest.raises(
        InputError, match="hf/config.json: is missing; expected the config.json of a Hugging Face folder"
    ):
        adapted()
    os.remove("hf/model.safetensors")
    with pytest.raises(
        InputError, match="'hf' is neither a run nor a checkpoint of one; expected .* or a Hugging Face folder"
    ):
        adapted()


def test_fewer_rows_than_the_tokenizer_has_ids(folder):
    shutil.rmtree("few", ignore_errors=True)
    write_model(Path("few"), ModelConfig(**vars(CONFIG) | {"vocab_size": NUM_TOKENS - 1}))
    shutil.copy("hf/tokenizer.json", "few"), shutil.copy("hf/tokenizer_config.json", "few")
    with pytest.raises(InputError, match="few/config.json: vocab_size: got 269, but its tokenizer.json has 270 ids"):
        adapted(init_from="few")


def test_the_shape_alone(folder):
    """`model.from` is replaced when the config is read; its vocabulary is the tokenizer's, and fields go on top."""
    config = load_config("run.yaml", ["model={from: hf, n_head: 4, d_model: 32, rope_scaling: null}"])
    assert (config.model.n_head, config.model.n_kv_head, config.model.d_model) == (4, 1, 32)
    assert config.model.qkv_bias and config.model.rope_scaling is None and config.model.from_ is None
    assert config.model.vocab_size is None is config.model.num_ids
    assert load_config("run.yaml", ["model={from: hf}"]).model.rope_scaling == RopeScaling("llama3", 2.0, 32)
    assert json.loads(json.dumps(config.to_json()))["model"]["from"] is None
    assert config_from_json(config.to_json()) == config == changed_config(config)
    write_model(Path("gpt2"), ModelConfig(**vars(CONFIG) | {
        "pos_encoding": "learned", "mlp_type": "gelu", "norm_type": "layernorm", "bias": True, "qkv_bias": False,
        "rope_scaling": None, "n_kv_head": 2}))  # fmt: skip
    assert load_config("run.yaml", ["model={from: gpt2, n_head: 4}"]).model.n_kv_head == 4
    for model, words in (
        ("{from: hf, preset: tiny}", "model.from: got 'hf' beside the preset 'tiny'; expected one of the two"),
        ("{from: nowhere}", "model.from: nowhere/config.json: is missing"),
        ("{from: 3}", "model.from: got 3, expected text"),
        ("{fro: hf}", "model.fro: no such key; did you mean 'from'?"),
    ):
        with pytest.raises(InputError) as told:
            load_config("run.yaml", [f"model={model}"])
        assert any(words in problem for problem in told.value.problems), told.value.problems


def test_the_shape_and_the_tokenizer_of_a_folder_that_is_gone_on_resume(folder):
    sections = ["model={from: hf, vocab_size: 272, num_ids: 272}", "tokenizer={kind: hf, path: hf}"]
    train(load_config("run.yaml", [*sections, "model.dropout=0.1", "train.steps=1"]), "run", store_dir="store")
    shutil.rmtree("hf")
    with pytest.raises(InputError, match="model.from: hf/config.json: is missing"):
        load_config("run.yaml", sections)
    config = load_config("run.yaml", sections, continues="run")
    assert config.model.dropout is None  # as if the folder were there
    assert train(config, "run", resume="latest", store_dir="store")["step"] == 2
    with pytest.raises(InputError, match="n_layer"):
        changed = load_config("run.yaml", ["model={from: hf, n_layer: 3}", sections[1]], continues="run")
        train(changed, "run", resume="latest", store_dir="store")
    byte_tokenizer().save("other")
    with pytest.raises(InputError, match="tokenizer.path: 'elsewhere' does not exist"):
        load_config("run.yaml", [sections[0], "tokenizer={kind: hf, path: elsewhere}"], continues="run")


def test_the_shape_of_a_folder_that_is_damaged_on_resume(folder):
    sections = ["model={from: hf, d_ff: 40}", "tokenizer={kind: hf, path: hf}"]
    train(load_config("run.yaml", [*sections, "train.steps=1"]), "run", store_dir="store")
    Path("hf/config.json").write_text("{}")
    with pytest.raises(InputError) as told:
        load_config("run.yaml", sections)
    assert told.value.problems and "move hf away" not in str(told.value)
    with pytest.raises(InputError) as told:
        load_config("run.yaml", sections, continues="run")
    (problem,) = [p for p in told.value.problems if "model.from: hf/config.json: " in p]
    assert problem.endswith("; or move hf away: the run then goes on with the model that it has")
    Path("hf").rename("away")
    assert load_config("run.yaml", sections, continues="run").model.d_ff == 40


def test_a_run_comes_before_a_folder_of_weights(folder):
    train(build_config(adapted("train.steps=1").to_json()), "run", store_dir="store")
    Path("run/config.json").write_text("{}")
    assert find_base("run").step == 1 and find_base("hf").model == CONFIG


def test_an_export_knows_the_run_that_it_was_made_of(folder):
    talks = [
        {"messages": [{"role": "user", "content": f"part {i}?"}, {"role": "assistant", "content": f"the {i}th"}]}
        for i in range(60)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    for name, about in (("other", "a fox"), ("third", "an owl")):
        Path(f"{name}.txt").write_text(f"once upon a time {about} went to the river and slept\n" * 60)
    third = "evalsets.sets.third={path: third.txt}"
    overrides = [
        "sources.talks={path: talks.jsonl, format: messages}",
        "phases.a.mixture={law: 0.5, talks: 0.5}",
        third,
    ]
    template = {"system": "<s>{content}", "user": "<u>{content}", "assistant": "<a>{content}</a>"}
    first = adapted(
        "name=first", "evalsets.every=1", *overrides, *(f"chat.{role}={text!r}" for role, text in template.items())
    )
    train(first, "first", store_dir="store")
    export("first", "exported", format="hf", step=1)

    other = ["sources.law.path=other.txt", "evalsets.primary={path: law.txt}", third]
    config = adapted(*other, init_from="exported")
    assert config.chat == first.chat  # as from the run itself
    train(config, "second", store_dir="store")
    [told] = [warning for warning in load_run("second").start["warnings"] if "trained on" in warning]
    assert told.startswith(
        "1 of 1 documents of eval set val are in source law, which first, where the model of exported comes from, was"
    )
    lineage = load_run("second").start["lineage"]
    assert (lineage["kind"], lineage["init_from"], lineage["mixture"]) == ("hf", "exported", {"law": 0.5, "talks": 0.5})
    run = lineage["lineage"]
    assert (run["init_from"], run["run"], run["step"], run["lineage"]["init_from"]) == ("first", "first", 1, "hf")
    assert run["started_at"] == read_ledger(Path("first/checkpoints/1"))["history"]["started_at"]
    assert lineage_lines(inspect_run(load_run("second"))["lineage"]) == [
        "parameters from exported", "parameters from first, step 1", "parameters from hf",
    ]  # fmt: skip
    compared = compare(["first", "second"])
    assert [dict(pair) for pair in compared.begun] == [{"run": "second", "base": "first", "step": 1}]
    assert compared.runs[0]["step"] == 1  # what was exported, though the run went on

    tensors = load_file("exported/model.safetensors")  # another program writes them anew
    of_run = find_base("exported").exported_from
    bad = [{**of_run, key: value} for key, value in (("step", "4"), ("step", -1), ("started_at", 3), ("init_from", "a\n"),
           ("chat", 3), ("chat", {"x": 1}), ("mixture", [1]), ("mixture", {"law": "x"}), ("lineage", {}), ("run", None))]  # fmt: skip
    for noted in (None, "", "{", "3", "[]", "{}", "[" * 100_000, *map(json.dumps, bad)):
        save_file(tensors, "exported/model.safetensors", {"format": "pt"} | ({} if noted is None else {LINEAGE: noted}))
        assert find_base("exported").exported_from is None, noted
    save_file(tensors, "exported/model.safetensors", {LINEAGE: json.dumps(of_run)})
    assert find_base("exported").exported_from == of_run
