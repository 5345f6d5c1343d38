"""A run that begins from another: what it takes, what it remembers, what it refuses; and replay."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import run_here as command
from orbax.checkpoint import StandardCheckpointer
from tiny_run import worse_from

from curriculum.branch import branch
from curriculum.cli.plan import table
from curriculum.config import build_config, changed_config, config_from_json, load_config
from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.disk.manifest import update_manifest, write_manifest
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.find_checkpoint import read_ledger
from curriculum.model.presets import ModelConfig, resolve_model
from curriculum.model.transformer import transformer
from curriculum.plan import plan
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.schema.adaptation import differences, find_base, with_replay
from curriculum.train.resuming.resumed import to_resume
from curriculum.train.resuming.start import start_of
from curriculum.train.setup import build
from curriculum.train.trainer import train
from phases.schedule import Phase

CURRICULUM = str(Path(sys.executable).parent / "curriculum")
BASE = {
    "name": "first",
    "tokenizer": {"kind": "bpe", "vocab_size": 270},
    "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24},
    "sources": {"web": {"path": "web.txt", "held_out": "10%"}},
    "phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}],
    "evalsets": {"primary": {"held_out_of": "web"}},
    "train": {"steps": 4, "batch_size": 4, "seq_len": 16},
    "optim": {"lr": 1e-2, "schedule": "constant"},
    "checkpoint": {"every": 2},
    "logging": {"tensorboard": False},
}
ADAPTED = """
name: second
evalsets: {every: 1, primary: {path: web_eval.txt}}
train: {steps: 2, batch_size: 4, seq_len: 16}
optim: {lr: 1e-2, schedule: constant}
checkpoint: {every: 1}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with texts, the run `base` of 4 steps with checkpoints at 2 and 4, and adapted.yaml."""
    folder = tmp_path_factory.mktemp("adaptation")
    for name, text in (
        ("web", "rain falls on quiet hills "),
        ("law", "the party of the first part "),
        ("code", "x = 1;\n"),
    ):
        (folder / f"{name}.txt").write_text(text * 150)
        (folder / f"{name}_eval.txt").write_text(text[::-1] * 6)
    (folder / "adapted.yaml").write_text(ADAPTED)
    before = os.getcwd()
    os.chdir(folder)
    try:
        train(build_config(BASE), "base", store_dir="store")
        shutil.rmtree("base/gold")  # so that the latest is meant; where gold comes first there is a test
        lines = Path("base/events.jsonl").read_text().splitlines(keepends=True)
        Path("base/events.jsonl").write_text("".join(line for line in lines if '"gold_checkpoint"' not in line))
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """The same in a folder that the test may change; the store is shared."""
    for path in trained.iterdir():
        if path.name == "store":
            (tmp_path / "store").symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
        else:
            shutil.copy2(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapted(*overrides, **options):
    options = {"dataset_dirs": ["law=law.txt"], "init_from": "base"} | options
    return load_config("adapted.yaml", overrides, **options)


def saved(folder, item="params"):
    with StandardCheckpointer() as checkpointer:
        return jax.tree.leaves(checkpointer.restore(Path(folder, item).absolute()))


def same(trees, others):
    trees, others = [np.asarray(a) for a in jax.tree.leaves(trees)], [np.asarray(a) for a in jax.tree.leaves(others)]
    assert len(trees) > 3
    return len(trees) == len(others) and all(a.tobytes() == b.tobytes() for a, b in zip(trees, others, strict=True))


def first_state(config):
    setup = build(config, "store", start=start_of(config))
    setup.course.feed.close()
    return setup.states.first()


def test_a_run_begins_with_the_parameters_alone(folder):
    state = first_state(adapted("averages.ema_decay=0.9"))
    params = saved("base/checkpoints/4")
    assert same(state.params, params) and same(state.ema, params)
    assert not same(state.params, saved("base/checkpoints/2"))
    assert int(state.step) == 0 and all(not np.any(array) for array in jax.tree.leaves(state.opt_state))
    assert any(np.any(array) for array in saved("base/checkpoints/4", "train"))


def test_or_with_the_optimizer_too_from_any_checkpoint(folder):
    """Whatever sources there were: the base's window of sums is over one source, this run's over two."""
    config = adapted(init_from="base/checkpoints/2", keep_optimizer=True, dataset_dirs=["law=law.txt", "web=web.txt"])
    assert config.command_line[:2] == ["--init-from base/checkpoints/2", "--keep-optimizer"]
    state = first_state(config)
    assert same(state.params, saved("base/checkpoints/2"))
    moments = [a for a in saved("base/checkpoints/2", "train") if a.ndim > 1 and a.shape[-1] != 2]
    assert len(moments) > 5 and same([a for a in jax.tree.leaves(state.opt_state) if a.ndim > 1], moments)
    assert int(state.step) == 0 and state.window.nats_S2.shape == (2, 2) and not np.any(state.window.nats_S2)
    assert int(state.skipped_updates) == 0


def test_the_command_and_a_resume_without_the_base(folder):
    """No sources, phases, model or tokenizer in the file; afterwards no base, and no options."""
    arguments = ["--init-from", "base", "--dataset-dir", "law=law.txt", "--eval-dataset-dir", "code=code_eval.txt"]
    more = ["--run-dir", "run", "--store-dir", "store"]
    code, _, errors = command("train", "adapted.yaml", *arguments, *more, "--set", "sources.law.held_out=10%",
                              "--set", "evalsets.sets.law.held_out_of=law")  # fmt: skip
    assert code == 0, errors
    began = read_ledger(Path("base/checkpoints/4"))["history"]["started_at"]
    lineage = {
        "init_from": "base", "run": "first", "started_at": began, "step": 4, "mixture": {"web": 1.0},
        "keep_optimizer": False, "lineage": None,
    }  # fmt: skip
    run = load_run("run")
    start, first = run.events[:2]
    assert start["lineage"] == lineage == read_ledger(Path("run/checkpoints/2"))["lineage"]
    assert (first["event"], first["step"]) == ("eval", 0) and {"val_loss", "eval_code", "eval_law"} <= first.keys()
    resolved = json.loads(Path("run/config.resolved.json").read_text())
    assert resolved["derived"]["lineage"] == lineage and resolved["model"] == load_run("base").config.to_json()["model"]
    assert resolved["tokenizer"]["path"] == "base/tokenizer"
    (phase,) = run.config.phases
    assert (phase.name, phase.until, phase.mixture) == ("adaptation", "end", {"law": 1.0})
    fingerprint = load_tokenizer("base/tokenizer").fingerprint
    assert load_tokenizer("run/tokenizer").fingerprint == fingerprint

    shutil.rmtree("base")
    code, _, errors = command("train", "adapted.yaml", *more, "--resume", "latest", "--set", "train.steps=4")
    assert code == 0, errors
    run = load_run("run")
    assert run.complete["step"] == 4 and run.config.to_json()["tokenizer"] == resolved["tokenizer"]
    assert json.loads(Path("run/config.resolved.json").read_text())["derived"]["lineage"] == lineage
    assert read_ledger(Path("run/checkpoints/4"))["lineage"] == lineage
    assert load_tokenizer("run/tokenizer").fingerprint == fingerprint

    code, _, errors = command("train", "adapted.yaml", *more, "--resume", "latest", "--init-from", "run")
    assert code == 2 and 'adaptation.init_from: got "run", but the run was begun with "base"; restore it' in errors
    code, _, errors = command("train", "adapted.yaml", *more, "--resume", "latest", "--keep-optimizer")
    assert code == 2 and "--keep-optimizer: adaptation.keep_optimizer: got true, but the run was begun with" in errors
    code, out, errors = command("train", "adapted.yaml", *more, "--resume", "latest", "--init-from", "./base/")
    assert code == 0 and "is finished" in out, errors

    # A third generation.
    third = adapted(init_from="run/checkpoints/4")
    assert start_of(third).lineage == {
        "init_from": "run/checkpoints/4",
        "run": "second",
        "started_at": read_ledger(Path("run/checkpoints/4"))["history"]["started_at"],
        "step": 4,
        "mixture": {"law": 1.0},
        "keep_optimizer": False,
        "lineage": lineage,
    }
    assert third.tokenizer.path == "run/tokenizer"


def test_a_run_of_its_own_is_not_resumed_from_another(folder):
    config = load_config("adapted.yaml", init_from="base", dataset_dirs=["law=law.txt"])
    with pytest.raises(InputError, match='--init-from base: adaptation.init_from: got "base", but .* begun with null'):
        start_of(config, to_resume(RunDirectory(Path("base")), "latest").ledger)
    assert to_resume(RunDirectory(Path("nothing-yet")), "latest") is None
    assert start_of(config).base.step == 4


@pytest.mark.slow
def test_the_first_eval_on_split_devices_is_that_of_the_base(folder):
    """Parameters go to the devices that hold them; the base was measured on one."""
    write = "train: {steps: 1, batch_size: 4, seq_len: 16}\nsources: {web: {path: web.txt, held_out: 10%}}\n"
    Path("same.yaml").write_text(
        write + "phases: [{name: a, until: end, mixture: {web: 1}}]\nevalsets: {primary: {held_out_of: web}}\n"
        "mesh: {fsdp: 2}\nlogging: {tensorboard: false}\n"
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    arguments = ["train", "same.yaml", "--init-from", "base", "--run-dir", "run", "--store-dir", "store"]
    done = subprocess.run([CURRICULUM, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = load_run("run")
    assert run.events[0]["devices"]["mesh"]["fsdp"] == 2
    assert run.evals()[0] == (0, pytest.approx(load_run("base").evals()[-1][1], rel=1e-6))


def test_the_gold_checkpoint_comes_before_the_latest(folder):
    shutil.copytree("base/checkpoints/2", "base/gold/2")
    shutil.copytree("base/checkpoints/4", "base/kept/3")
    write_manifest(Path("base/kept/3"), 3)
    with open("base/events.jsonl", "a") as file:
        file.write(
            '{"event": "gold_checkpoint", "step": 2, "timestamp": "then", "elapsed_s": 1, "tokens_processed": 256}\n'
        )
    folders = {"base": "base/gold/2", "base/gold": "base/gold/2", "base/gold/2": "base/gold/2",
               "base/checkpoints/4/": "base/checkpoints/4", "base/kept/3": "base/kept/3"}  # fmt: skip
    for given, expected in folders.items():
        base = find_base(given)
        assert str(base.checkpoint) == expected and base.step == int(expected[-1]) and base.init_from == given
        assert find_base(os.path.abspath(given)).checkpoint == Path(expected).absolute()


@pytest.mark.parametrize(
    ("init_from", "words"),
    [
        ("", "got an empty path, expected a run, RUN/checkpoints/STEP, RUN/gold"),
        ("bas", "'bas' does not exist; did you mean 'base'? (paths are relative to the working folder)"),
        ("base/away", "'base/away' does not exist (paths are relative to the working folder)"),
        (
            "far/away",
            "'far/away' does not exist (paths are relative to the working folder); if it is a model of the hub, "
            "download it first: hf download far/away --local-dir DIR",
        ),
        ("base/config.resolved.json/x", "'base/config.resolved.json/x' does not exist (paths"),
        ("store", "'store' is neither a run nor a checkpoint of one; expected a run, RUN/checkpoints/STEP, RUN/gold"),
        ("base/checkpoints", "'base/checkpoints' is neither a run nor a checkpoint"),
        ("base/tokenizer", "'base/tokenizer' is neither a run"),
        ("base/checkpoints/4/params", "is neither a run"),
        (
            "base/checkpoints/2",
            "base/checkpoints/2: is damaged: train/_METADATA is missing: the checksum manifest lists",
        ),
        ("base/checkpoints/3", "'base/checkpoints/3' is not a checkpoint of the run; available: 2, 4"),
        ("base/gold", "base/gold: gold: base has no gold checkpoint; available: 2, 4"),
        ("young", "young: has no checkpoint any more, though its record has some up to"),
    ],
)
def test_what_nothing_can_begin_from_is_told(folder, init_from, words):
    shutil.rmtree("base/checkpoints/2/train")
    Path("base/gold").mkdir()
    shutil.copytree("base", "young", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(InputError) as told:
        adapted(init_from=init_from)
    assert told.value.problems[0].startswith(f"--init-from {init_from}".rstrip() + ": adaptation.init_from: ")
    assert words in told.value.problems[0] and len(told.value.problems) == 1
    with pytest.raises(InputError) as told:  # of fields that the base would complete nothing is missing
        adapted("model.dropout=0.1", init_from=init_from)
    assert words in told.value.problems[0] and len(told.value.problems) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tokenizer={kind: byte}", "tokenizer.kind: got byte, but base has bpe; leave the section out"),
        ("tokenizer={kind: bpe, vocab_size: 300}", "tokenizer.vocab_size: got 300, but base has 270"),
        ("tokenizer={kind: tiktoken, name: gpt2}", "tokenizer.kind: got tiktoken, but base has bpe"),
        ("tokenizer={kind: bpe, path: other}", "tokenizer.path: other holds another tokenizer than base"),
        ("tokenizer={kind: bpe, path: nowhere}", "tokenizer.path: nowhere/tokenizer.json"),
        ("model={preset: tiny, d_ff: 32}", "model: the architecture is not that of base: n_layer 4 (there 1), n_head 4 "
         "(there 2), n_kv_head 2 (there 1), d_model 128 (there 16), d_ff 32 (there 24); leave the section out"),
        ("model.d_ff=32", "model: the architecture is not that of base: d_ff 32 (there 24); leave the section out to use "
         "the same, or give no preset and only what may differ (dropout, compute_dtype, remat, attention, layers, max_seq_len)"),
        ("model.vocab_size=300", "model: the architecture is not that of base: vocab_size 300 (there 270); leave the section out"),
    ],
)  # fmt: skip
def test_a_section_that_is_given_must_agree(folder, override, words):
    from curriculum.data.tokenizers.vocabulary import train_bpe

    train_bpe(["some other text " * 20], 260).save("other")
    with pytest.raises(InputError) as told:
        adapted(override)
    assert any(words in problem for problem in told.value.problems), told.value.problems


def test_sections_that_agree_are_taken(folder):
    shutil.copytree("base/tokenizer", "moved")
    given = adapted("tokenizer={kind: bpe, vocab_size: 270}", f"model={json.dumps(BASE['model'] | {'dropout': 0.1})}")
    assert given.tokenizer == adapted("tokenizer={kind: bpe, path: moved}").tokenizer == adapted().tokenizer
    assert given.model.dropout == 0.1 and adapted().model == load_run("base").config.model
    assert config_from_json(given.to_json()) == given


def test_a_run_that_ended_before_it_had_a_tokenizer_still_takes_that_of_its_base(folder):
    Path("run").mkdir()
    base = json.loads(Path("base/config.resolved.json").read_text())
    Path("run/config.resolved.json").write_text(json.dumps(base | adapted().to_json()))
    assert RunDirectory(Path("run")).has_config and adapted(continues="run") == adapted()


def test_of_a_model_single_fields_are_enough(folder):
    its = load_run("base").config.model
    config = adapted("model.dropout=0.1", "model.compute_dtype=bfloat16")
    assert config.model == replace(its, dropout=0.1, compute_dtype="bfloat16")
    assert config_from_json(config.to_json()) == config
    shutil.copytree("base", "own")
    resolved = Path("own/config.resolved.json")
    resolved.write_text(json.dumps(json.loads(resolved.read_text()) | {"model": None}))
    with pytest.raises(InputError, match="model.n_layer: missing"):  # nothing to change there
        adapted("model.dropout=0.1", init_from="own")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["adaptation={keep_optimizer: true}"], "keep_optimizer: got true without adaptation.init_from"),
        (["adaptation={replay: {wed: 0.1}}"], "adaptation.replay.wed: no such source; did you mean 'web'?"),
        (["adaptation={replay: {web: 0.6, law: 0.4}}"], "adaptation.replay: the shares add up to 1, expected less"),
        (["adaptation={replay: {web: 0}}"], "adaptation.replay.web: got 0, expected more than 0"),
        (["adaptation={replay: {web: 1.0}}"], "adaptation.replay.web: got 1.0, expected less than 1"),
        (["adaptation={replay: {web: 100%}}"], "adaptation.replay.web: got 1.0, expected less than 1"),
        (["adaptation={replay: {web: 5 percent}}"], 'adaptation.replay.web: got "5 percent", expected a number'),
        (["adaptation={replays: {}}"], "adaptation.replays: no such key; did you mean 'replay'?"),
    ],
)
def test_a_section_that_cannot_be_is_told(folder, overrides, words):
    with pytest.raises(InputError) as told:
        load_config("adapted.yaml", overrides, dataset_dirs=["law=law.txt", "web=web.txt"])
    assert any(words in problem for problem in told.value.problems), told.value.problems


def test_a_field_that_is_taken_out_of_the_file_again_is_that_of_the_base(folder):
    """Also if nothing was trained with it."""

    def resumed(resume, *overrides):
        config = adapted("train.steps=6", "checkpoint.every=2", *overrides, continues="run" if resume else None)
        train(config, "run", resume=resume, store_dir="store")
        run = load_run("run")
        changes = [c["path"] for e in run.events if e["event"] == "schedule_edit" for c in e["changes"]]
        return run.config.model.dropout, [path for path in changes if path.startswith("model")]

    base = load_run("base").config.model.dropout
    assert resumed(None) == (base, [])
    assert resumed(4, "model.dropout=0.5") == (0.5, ["model.dropout"])
    assert resumed(2) == (base, [])
    assert resumed(4, "model.dropout=0.5") == (0.5, ["model.dropout"])
    assert resumed(4, "train.steps=8") == (base, [])


def test_a_custom_model_that_began_from_a_run_goes_on(folder):
    def make_model(vocab_size):
        return transformer(resolve_model(load_run("base").config.model, vocab_size))

    train(adapted(), "run", store_dir="store", make_model=make_model)
    longer = adapted("train.steps=3", continues="run")
    complete = train(longer, "run", resume="latest", store_dir="store", make_model=make_model)
    assert complete["total_steps"] == 3 and load_run("run").resolved["model"] is None


def test_phases_are_made_of_dataset_dirs_only(folder):
    with pytest.raises(InputError) as told:
        load_config("adapted.yaml")
    assert {p.partition(": ")[2] for p in told.value.problems} == {
        f"{section}: missing; this section is needed" for section in ("sources", "phases")
    }
    config = load_config("adapted.yaml", dataset_dirs=["law=law.txt", "code=code.txt"])
    assert [phase.mixture for phase in config.phases] == [{"law": 1.0, "code": 1.0}]
    assert not any("add up" in warning for warning in plan(config).warnings)
    with pytest.raises(InputError) as told:
        load_config("adapted.yaml", ["adaptation.replay.law=0.25"], dataset_dirs=["law=law.txt"])
    assert told.value.problems == (
        "--dataset-dir law=law.txt: phases: missing, and everything given with --dataset-dir is replayed "
        "(adaptation.replay), which makes no phase; also give the text to adapt to, or phases",
    )
    config = load_config("adapted.yaml", dataset_dirs=["law=law.txt"])
    assert str(config.error([("phases", "are too late")])) == "--dataset-dir law=law.txt: phases: are too late"
    # What is replayed is not what is adapted to.
    config = load_config("adapted.yaml", ["adaptation.replay.web=0.25"], dataset_dirs=["law=law.txt", "web=web.txt"])
    assert [phase.mixture for phase in config.phases] == [{"law": 1.0}]
    assert [phase["mixture"] for phase in plan(config).phases] == [{"law": 0.75, "web": 0.25}]


def test_replay_by_hand():
    phases = (
        Phase("a", 10, {"law": 3.0, "code": 1.0}),
        Phase("b", "50%", {"law": 1.0, "web": 0.0}),
        Phase("c", "end", {"web": 0.5, "docs": 0.5}),
    )
    mixed = with_replay(phases, {"web": 0.2, "docs": 0.05})
    assert [phase.mixture for phase in mixed] == [
        {"law": pytest.approx(0.5625), "code": pytest.approx(0.1875), "web": 0.2, "docs": 0.05},
        {"law": pytest.approx(0.95), "web": 0.0, "docs": 0.05},
        {"web": 0.5, "docs": 0.5},
    ]
    assert [(p.name, p.until) for p in mixed] == [("a", 10), ("b", "50%"), ("c", "end")]
    assert with_replay(mixed, {"web": 0.2, "docs": 0.05}) == mixed
    assert with_replay(phases, {}) == phases


def test_the_plan_and_the_resolved_config_show_it(folder):
    replay = ["adaptation.replay={web: 0.05}", "train.steps=50", "sources.web.path=web.txt"]
    config = adapted(*replay)
    assert config.phases[0].mixture == {"law": 1.0} and config.adaptation.replay == {"web": 0.05}
    assert adapted("adaptation.replay={web: 5%}", *replay[1:]) == adapted("adaptation.replay.web= 5.0 % ", *replay[1:])
    assert adapted("adaptation.replay={web: 5%}", *replay[1:]) == config
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    shown = plan(config, store_dir="store")
    assert shown.phases[0]["mixture"] == {"law": 0.95, "web": 0.05}
    assert (
        shown.begins_from["run"] == "first"
        and shown.num_parameters == load_run("base").events[0]["model"]["num_parameters"]
    )
    assert {row.source: (row.share_asked, row.share_given) for row in shown.rows} == {
        "law": (0.95, 0.95),
        "web": (0.05, 0.05),
    }
    assert "begins with the parameters of first, step 4 (base)" in table(shown)
    assert plan(build_config(BASE), store_dir="store").begins_from is None
    code, out, errors = command("plan", "adapted.yaml", "--init-from", "base", "--keep-optimizer", "--dataset-dir",
                                "law=law.txt", "--store-dir", "store")  # fmt: skip
    assert code == 0 and "begins with parameters and optimizer state of first, step 4 (base)" in out, errors


def test_a_run_remembers_its_phases_and_its_replay_apart(folder):
    """So that a later change of the replay counts, and is told where it comes too late."""
    sources = ["law=law.txt", "web=web.txt", "code=code.txt"]
    phases = "phases=[{name: a, until: end, mixture: {law: 1}}]"
    given = load_config("adapted.yaml", [phases, "adaptation.replay.web=0.25", "train.steps=4"], dataset_dirs=sources)
    train(given, "run", store_dir="store")
    run = load_run("run")
    assert run.resolved["phases"][0]["mixture"] == {"law": 1.0}
    nothing_of_code = "source code is never read: no phase gives it a share, and no eval set is held out of it"
    nothing_of_code += "; give it one in a phase's mixture, or in all phases with adaptation.replay.code"
    assert run.start["warnings"].count(nothing_of_code) == 1
    assert run.resolved["derived"]["phases"][0]["mixture"] == {"law": 0.75, "web": 0.25}
    assert run.config == given
    more = changed_config(run.config, ["adaptation.replay.web=0.5"])
    assert plan(more, store_dir="store").phases[0]["mixture"] == {"law": 0.5, "web": 0.5}
    unchanged = changed_config(run.config, ["optim.lr=1e-2"])
    assert train(unchanged, "run", resume="2", store_dir="store")["step"] == 4
    late = changed_config(run.config, ["adaptation.replay={web: 0.5}", "train.steps=6"])
    train(late, "run", resume="latest", store_dir="store")  # from step 4 on, in the phase under way
    segments = read_ledger(Path("run/checkpoints/6"))["segments"]
    assert [(s["start"], s["mixture"]) for s in segments] == [
        (0, {"law": 0.75, "web": 0.25}),
        (4, {"law": 0.5, "web": 0.5}),
    ]


def test_arrays_that_do_not_fit_are_named_before_anything_is_made(folder):
    ledger = Path("base/checkpoints/4/ledger/metadata")
    kept = json.loads(ledger.read_text())
    changed = json.loads(ledger.read_text())
    changed["parameters"]["blocks.000.mlp.up.kernel"] = [16, 48]
    ledger.write_text(json.dumps(changed))
    update_manifest(Path("base/checkpoints/4"), ["ledger/metadata"])
    with pytest.raises(InputError) as told:
        train(adapted(), "run", store_dir="store")
    assert str(told.value).startswith("--init-from base: adaptation.init_from: parameter blocks.000.mlp.up.kernel: ")
    assert "base, step 4, has [16, 48], this model [16, 24]; expected the same model" in str(told.value)

    ledger.write_text(json.dumps(kept))
    update_manifest(Path("base/checkpoints/4"), ["ledger/metadata"])
    architecture = json.loads(Path("base/model.json").read_text())

    def other(vocab_size):
        return transformer(ModelConfig.of(architecture | {"rope_theta": 500.0}))

    with pytest.raises(InputError, match=r"not that of base, step 4, but has rope_theta 500.0 \(there 10000.0\)"):
        train(adapted("model=null"), "run", store_dir="store", make_model=other)

    config = adapted("optim={name: lion, lr: 1e-3}", keep_optimizer=True)
    with pytest.raises(InputError) as told:
        train(config, "run", store_dir="store")
    assert "optim.name: got lion, but the optimizer state of base, step 4, belongs to adamw; set" in str(told.value)
    config = adapted("optim={name: muon, lr: 1e-3}", keep_optimizer=True)
    with pytest.raises(InputError) as told:
        train(config, "run", store_dir="store")
    (problem,) = told.value.problems  # of what only muon has nothing is said
    assert "optim.name: got muon, but the optimizer state of base, step 4, belongs to adamw; set" in problem
    assert not Path("run").exists()


def test_prepare_refuses_them_without_a_config(folder):
    code, _, errors = command("prepare", "--text", "law.txt", "--init-from", "base")
    assert code == 2 and "--init-from and --keep-optimizer go with CONFIG, not with --text" in errors


def test_an_alarm_against_what_the_base_knew_names_what_the_base_was_trained_on(folder, monkeypatch):
    worse_from(monkeypatch, 1, factor=math.inf)
    train(
        adapted("adaptation.replay={web: 0.25}", dataset_dirs=["law=law.txt", "web=web.txt"]), "run", store_dir="store"
    )
    (alarm, *_) = [e for e in load_run("run").events if e["event"] == "eval_regression"]
    assert alarm["step"] == 1 and {o["baseline_step"] for o in alarm["offenders"]} == {0}
    assert all(o["mixture_change"] == {"law": [0.0, 0.75], "web": [1.0, 0.25]} for o in alarm["offenders"])
    assert "(since step 0: law 0 → 0.75, web 1 → 0.25)" in Path("run/train.log").read_text()


@pytest.mark.parametrize("go_on", ["branch", "resume"])
def test_another_seed_at_step_0_is_that_of_the_data_too(folder, go_on):
    own = "logging.every=1", "evalsets.every=2"  # the checkpoint of step 1 knows gold/0
    train(adapted(*own), "run", store_dir="store")
    train(adapted(*own, "seed=7"), "begun", store_dir="store")
    if go_on == "branch":
        branch("run", 0, "again", overrides=["seed=7"], store_dir="store")
    else:
        shutil.copytree("run", "again")
        train(adapted(*own, "seed=7"), "again", resume=0, store_dir="store")
    losses, begun, again = ([row["loss"] for row in load_run(name).metrics] for name in ("run", "begun", "again"))
    assert begun == again != losses and len(losses) == 2


def test_of_a_branch_the_seed_may_be_changed_by_a_branch_at_step_0_alone(folder):
    """A resume at 0 repeats what the branch took over; a branch there takes over nothing."""
    own = "logging.every=1", "evalsets.every=4", "train.steps=4", "checkpoint.keep=9"
    train(adapted(*own), "run", store_dir="store")
    train(adapted(*own, "seed=7"), "begun", store_dir="store")
    branch("run", 2, "other", store_dir="store")
    with pytest.raises(InputError, match="seed: got 7, but steps 0 to 2 stand as they were planned with 1337"):
        train(adapted(*own, "seed=7"), "other", resume=0, store_dir="store")
    branch("other", 0, "again", overrides=["seed=7"], store_dir="store")
    losses, begun, again = ([row["loss"] for row in load_run(name).metrics] for name in ("other", "begun", "again"))
    assert begun == again != losses and len(losses) == 4


@pytest.mark.parametrize(("ours", "its", "told"), [("rope", "rope", ""), ("learned", "learned", "max_seq_len 64 (there 32)"),
    ("rope", "learned", 'max_seq_len 64 (there 32), pos_encoding "rope" (there "learned")')])  # fmt: skip
def test_only_with_rope_max_seq_len_may_differ(ours, its, told):
    base = {"max_seq_len": 32, "pos_encoding": its}
    assert differences({"max_seq_len": 64, "pos_encoding": ours}, base) == told


def test_with_rope_a_run_may_be_longer_than_its_base(folder):
    longer = "model.max_seq_len=2048", "train.seq_len=1536", "evalsets.seq_len=64", "train.batch_size=2"
    train(adapted(*longer), "run", store_dir="store")
    run = load_run("run")
    assert (
        run.directory.architecture()["max_seq_len"] == 2048 > load_run("base").directory.architecture()["max_seq_len"]
    )
    train(adapted(*longer, "train.steps=3", continues="run"), "run", resume="latest", store_dir="store")
    assert load_run("run").complete["total_tokens"] == 3 * 2 * 1536
    with pytest.raises(InputError, match="architecture of a run cannot change: max_seq_len 1536 .was 2048."):
        shorter = "model.max_seq_len=1536", *longer[1:], "train.steps=4"
        train(adapted(*shorter, continues="run"), "run", resume="latest", store_dir="store")


def test_documents_of_an_eval_set_that_the_base_was_trained_on_are_told(folder):
    lines = [json.dumps({"text": f"clause {i}: the party of part {i * i} pays {i} times"}) + "\n" for i in range(40)]
    Path("clauses.jsonl").write_text("".join(lines))
    sources = {"clauses": {"path": "clauses.jsonl", "held_out": "10%"}}
    phases = [{"name": "a", "until": "end", "mixture": {"clauses": 1}}]
    base = BASE | {"name": "clauses", "sources": sources, "phases": phases}
    train(build_config(base | {"evalsets": {"primary": {"held_out_of": "clauses"}}}), "clauses", store_dir="store")

    def warned(*overrides, by=plan, **options):
        config = adapted(*overrides, init_from="clauses", **options)
        if by is plan:
            found = plan(config, store_dir="store").warnings
        else:
            setup = build(config, "store", start=start_of(config))
            setup.close()
            found = setup.warnings()
        return [warning for warning in found if "was trained on" in warning]

    law, primary = {"dataset_dirs": ["law=clauses.jsonl"]}, "evalsets.primary={held_out_of: law}"
    assert warned(primary, "sources.law.held_out=10%", by=build, **law) == []  # the same documents are held out
    (more,) = warned(primary, "sources.law.held_out=50%", by=build, **law)
    held, _, num_documents = more.split()[:3]
    by_base = int(num_documents) - int(held)  # what the base held out, of the 40
    assert (
        by_base > 1
        and int(held) > 9
        and more[len(f"{held} of {num_documents} ") :]
        == (
            "documents of eval set val are in source clauses, which clauses was trained on: the set's losses show that too; "
            "hold out what clauses held out (the same path and held_out), or measure other text"
        )
    )
    assert warned(primary, "sources.law.held_out=50%", **law) == [more]
    Path("all.jsonl").write_text("".join(lines))
    (whole,) = warned("evalsets={primary: {path: web_eval.txt}, sets: {all: {path: all.jsonl}}}", by=build)
    assert whole.startswith(f"{40 - by_base} of 40 documents of eval set all are in source clauses")
    unknown = (
        "unknown whether clauses was trained on documents of the eval sets: its text of clauses has changed, or is not "
        "prepared here"
    )
    resolved = json.loads(Path("clauses/config.resolved.json").read_text())
    Path("clauses/config.resolved.json").write_text(json.dumps(resolved | {"train": {"steps": 4, "of_another": 1}}))
    assert warned(primary, "sources.law.held_out=50%", by=build, **law) == [
        "unknown whether clauses was trained on documents of the eval sets: its config or its tokenizer cannot be read"
    ]
    Path("clauses/config.resolved.json").write_text(json.dumps(resolved))
    Path("clauses.jsonl").write_text("".join(lines[:39]))  # now another text
    assert warned(primary, "sources.law.held_out=50%", by=build, **law) == [unknown]


def test_documents_that_a_run_further_back_was_trained_on_are_told(folder):
    lines = [json.dumps({"text": f"clause {i}: the party of part {i * i} pays {i} times"}) + "\n" for i in range(40)]
    Path("clauses.jsonl").write_text("".join(lines))
    Path("seen.jsonl").write_text("".join(lines[:7]))
    phases = [{"name": "a", "until": "end", "mixture": {"clauses": 1}}]
    sets = {"primary": {"path": "web_eval.txt"}}
    base = BASE | {"name": "oldest", "sources": {"clauses": {"path": "clauses.jsonl"}}, "phases": phases}
    train(build_config(base | {"evalsets": sets}), "oldest", store_dir="store")
    web = BASE | {"evalsets": sets, "sources": {"web": {"path": "web.txt"}}}
    train(build_config(web | {"name": "between", "adaptation": {"init_from": "oldest"}}), "between", store_dir="store")
    own = {"primary": {"path": "web_eval.txt"}, "sets": {"seen": {"path": "seen.jsonl"}}}
    last = build_config(web | {"name": "last", "adaptation": {"init_from": "between"}, "evalsets": own})
    train(last, "last", store_dir="store")
    [told] = [warning for warning in plan(last, store_dir="store").warnings if "trained on" in warning]
    assert told.startswith(
        "7 of 7 documents of eval set seen are in source clauses, which oldest, where the model of between comes from, "
        "was trained on: the set's losses show that too; hold out what oldest held out"
    )
    measured = evaluate("between", eval_dataset_dirs=["again=seen.jsonl"], sets=["again"], store_dir="store")
    assert measured.warnings[0] == (
        "7 of 7 documents of again also occur in source clauses, which oldest, where the model comes from, was trained on"
    )
    Path("oldest").rename("moved")
    [gone] = [warning for warning in plan(last, store_dir="store").warnings if "trained on" in warning]
    assert gone == (
        "unknown whether oldest, where the model of between comes from, was trained on documents of the eval sets: that "
        "run is not found where it was, or cannot be read"
    )
    train(build_config(base | {"evalsets": sets}), "oldest", store_dir="store")  # another run in its place
    resolved = Path("oldest/checkpoints/4/ledger/metadata").read_text()
    began = json.loads(resolved)["history"]["started_at"]
    later = resolved.replace(began, "2999-01-01T00:00:00+00:00")  # both may have begun within a second
    Path("oldest/checkpoints/4/ledger/metadata").write_text(later)
    shutil.rmtree("oldest/checkpoints/2")
    assert [w for w in plan(last, store_dir="store").warnings if "trained on" in w] == [gone]
    again = evaluate("between", eval_dataset_dirs=["again=seen.jsonl"], sets=["again"], store_dir="store")
    assert again.warnings[0].startswith("unknown how many documents of again oldest, where the model comes from, was")


def test_a_document_whose_tail_is_measured_is_known_to_a_base_that_read_all_of_it(folder):
    Path("one.txt").write_text("the party of the first part pays the party of the second part " * 80)
    phases = [{"name": "a", "until": "end", "mixture": {"one": 1}}]

    def trained(name, held_out, primary):
        sources = {"one": {"path": "one.txt", "held_out": held_out}}
        data = BASE | {"name": name, "sources": sources, "phases": phases, "evalsets": {"primary": primary}}
        train(build_config(data), name, store_dir="store")

    trained("whole", 0, {"path": "web_eval.txt"})
    trained("divided", "20%", {"held_out_of": "one"})
    options = {"dataset_dirs": ["law=one.txt"]}

    def told(base, held_out):
        overrides = [f"sources.law.held_out={held_out}", "evalsets.primary={held_out_of: law}"]
        planned = plan(adapted(*overrides, init_from=base, **options), store_dir="store")
        return [warning.partition(",")[0] for warning in planned.warnings if "was trained on" in warning]

    known = ["1 of 1 documents of eval set val are in source one"]
    assert told("whole", "20%") == known and told("divided", "20%") == told("divided", "10%") == []
    assert told("divided", "60%") == known  # of which it read two thirds


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.gguf", "llama.cpp, which is not read.*--format hf"),
        ("model.json", "an export with --format safetensors.*--format hf"),
        ("adapter_config.json", "holds adapters alone, which are not read; export the run with --merge"),
    ],
)
def test_an_export_that_cannot_be_read_again_is_told_with_the_format_that_can(folder, name, said):
    Path("exported").mkdir()
    Path("exported", name).write_text("{}")
    with pytest.raises(InputError, match=f"'exported' .*{said}"):
        adapted(init_from="exported")
