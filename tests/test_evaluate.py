"""A checkpoint measured later: the numbers of training, new sets, and what cannot be measured."""

import json
import math
import os
import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import run_here

from curriculum.config import build_config
from curriculum.data.corpus import load_corpus
from curriculum.data.prepare import prepare_folder
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import transformer
from curriculum.run import load_run
from curriculum.train.trainer import train
from evalsets.metrics import WindowResults

WORDS = {"web": "rain falls on the quiet green hills", "law": "the party of the first part shall provide"}

CHANGED = "its text or the run's eval sets have changed since, or are not prepared here"

PADDED = {"vocab_size": 264, "num_ids": 264}  # rows beyond the tokenizer's 257 ids, which are predicted all the same


def write_documents(path, words, count, seed):
    rng = np.random.default_rng(seed)
    lines = [json.dumps({"text": " ".join(rng.choice(words.split(), int(rng.integers(9, 40))))}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """4 steps over web, evals at 0, 2 and 4 of the primary set, `web` and `law`, with a moving average and a mean."""
    folder = tmp_path_factory.mktemp("evaluate")
    web = write_documents(folder / "web.jsonl", WORDS["web"], 120, 0)
    write_documents(folder / "law_eval.jsonl", WORDS["law"], 25, 1)
    new = write_documents(folder / "new.jsonl", WORDS["law"], 30, 2)
    (folder / "seen.jsonl").write_text("\n".join([*new[:5], *web[-40:]]) + "\n")
    before = os.getcwd()
    os.chdir(folder)
    config = build_config(
        {
            "name": "small",
            "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24} | PADDED,
            "sources": {"web": {"path": "web.jsonl", "held_out": "20%"}, "idle": {"path": "law_eval.jsonl"}},
            "phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}],
            "evalsets": {
                "every": 2,
                "primary": {"held_out_of": "web"},
                "sets": {"web": {"held_out_of": "web", "max_sequences": 7}, "law": {"path": "law_eval.jsonl"}},
            },
            "train": {"steps": 4, "batch_size": 4, "seq_len": 32},
            "optim": {"lr": 1e-2, "schedule": "constant"},
            "averages": {"ema_decay": 0.5, "phase_mean": 2},
            "checkpoint": {"every": 2},
            "logging": {"tensorboard": False},
        }
    )
    config = build_config(config.to_json() | {"sources": {"web": config.to_json()["sources"]["web"]}})
    try:
        train(config, "run", store_dir="store")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy that the test may change."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def alone(path, run="run", **options):
    """What a set of its own measures, which has the name of its file."""
    name = Path(path).stem
    return evaluate(run, eval_dataset_dirs={name: path}, sets=[name], store_dir="store", **options)


def contents(path):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in Path(path).rglob("*") if p.is_file()}


def windows(results):
    return {name: array.tobytes() for name, array in results._asdict().items()}


def recorded(step, name, average=""):
    with np.load(f"run/evals/{step}.npz") as file:
        found = {field: file[f"{name}.{field.removesuffix('_N')}"] for field in WindowResults._fields}
        if average:
            prefix = f"{name}@{average}."
            found |= {f"{key.removeprefix(prefix)}_N": file[key] for key in file if key.startswith(prefix)}
    assert len(found["nats_N"]) > 5
    return {column: array.tobytes() for column, array in found.items()}


@pytest.mark.parametrize(
    ("step", "weights", "average"),
    [(None, "raw", ""), ("latest", "raw", ""), (2, "raw", ""), ("4", "ema", "ema"), (None, "mean:a", "phase_mean")],
)
def test_every_window_is_that_of_training_bit_for_bit(folder, step, weights, average):
    before, filters = contents("run"), [*warnings.filters]
    measured = evaluate("run", step=step, weights=weights, store_dir="store")
    assert warnings.filters == filters  # they are the caller's
    assert measured.step == (2 if step == 2 else 4) and measured.weights == weights
    (warning,) = measured.warnings
    assert warning.startswith("eval set web is one document of 7 windows: no standard error")
    assert list(measured.results) == list(measured.summaries) == ["val", "web", "law"]
    for name, key in (("val", "primary"), ("web", "web"), ("law", "law")):
        assert windows(measured.results[name]) == recorded(measured.step, key, average)
    assert contents("run") == before and len(before) > 20


def test_rows_that_were_predicted_are_not_taken_for_padding(folder):
    config = load_run("run").config
    longer = replace(config, model=replace(config.model, num_ids=None), train=replace(config.train, steps=6))
    with pytest.raises(InputError, match=r"num_ids 257 \(was None\); with model.num_ids: 264 all rows are predicted"):
        train(longer, "run", resume="latest", store_dir="store")
    data = longer.to_json() | {"adaptation": {"init_from": "run"}}
    adapted = build_config({key: section for key, section in data.items() if key not in ("model", "tokenizer")})
    assert adapted.model.num_ids == adapted.model.vocab_size == 264


def test_the_numbers_are_those_of_the_record(folder):
    measured = evaluate("run", step=2, store_dir="store")
    (event,) = (e for e in load_run("run").events if e["event"] == "eval" and e["step"] == 2)
    assert event["val_loss"] == round(measured.summaries["val"].loss, 6)
    assert event["eval_law_bpb"] == round(measured.summaries["law"].bpb, 6)
    assert event["eval_law_sem"] == round(measured.summaries["law"].sem, 6) > 0


def test_a_new_set_needs_neither_sources_nor_phases(folder):
    """Its numbers are those that training gives it, and those of every other set stay the same."""
    config = load_run("run").config.to_json()
    config["evalsets"]["sets"]["new"] = {"path": "new.jsonl"}
    train(build_config(config), "with-new", store_dir="store")
    with np.load("with-new/evals/4.npz") as file:
        nats = file["new.nats"].tobytes()
    beside_all = evaluate("run", eval_dataset_dirs={"new": "new.jsonl"}, store_dir="store")
    assert list(beside_all.results) == ["val", "web", "law", "new"]
    assert beside_all.results["new"].nats_N.tobytes() == nats
    assert windows(beside_all.results["law"]) == recorded(4, "law")

    beside = evaluate("run", eval_dataset_dirs=["new=new.jsonl"], sets=["law"], store_dir="store")
    assert list(beside.results) == ["law", "new"]  # a new set need not be named again

    Path("web.jsonl").unlink()
    shutil.rmtree("store")
    measured = evaluate("run", eval_dataset_dirs={"new": "new.jsonl"}, sets=["new", "law"], store_dir="store")
    assert list(measured.results) == ["new", "law"] and measured.results["new"].nats_N.tobytes() == nats
    with pytest.raises(InputError) as told:
        evaluate("run", eval_dataset_dirs={"new": "new.jsonl"}, store_dir="store")
    assert told.value.problems == tuple(
        f"run/config.resolved.json: {place}: source web, which it is held out of, 'web.jsonl' is not there (paths are "
        "relative to the working folder); restore it, or measure other sets"
        for place in ("evalsets.primary", "evalsets.sets.web")
    )


def test_documents_that_were_trained_on_are_told(folder):
    """Of 45 documents 40 are of web, some of them held out of training; by hand from their hashes."""
    held_out = evaluate("run", sets=["val"], store_dir="store").evalsets["val"]
    measured = alone("seen.jsonl")
    assert measured.evalsets["seen"].num_documents == 45
    web = [json.loads(line)["text"] for line in Path("web.jsonl").read_text().splitlines()]
    kept = {text for text in web if len(text) and text not in documents_of(held_out)}
    count = sum(text in kept for text in web[-40:])
    assert 20 < count < 40
    (warning,) = measured.warnings
    assert warning == f"{count} of 45 documents of seen also occur in source web, which the run was trained on"
    fewer = ["evalsets.sets.seen.max_sequences=30"]
    measured = alone("seen.jsonl", overrides=fewer)
    num = measured.evalsets["seen"].num_documents
    of_them = sum(text in kept for text in documents_of(measured.evalsets["seen"]))
    assert 0 < of_them < num < 30 and measured.warnings[0] == (
        f"{of_them} of {num} documents of seen also occur in source web, which the run was trained on"
    )
    unknown = f"unknown how many documents of seen also occur in source web, which the run was trained on: {CHANGED}"
    Path("web.jsonl").rename("gone")
    Path("web.jsonl").write_text("".join(Path("gone").read_text().splitlines(keepends=True)[:-40]))
    load_corpus(load_run("run").config, "store")  # what was trained on is what the text was then
    assert alone("seen.jsonl").warnings == (unknown,)
    shutil.rmtree("store/stores")  # nothing is prepared for a warning
    Path("web.jsonl").unlink()
    assert alone("seen.jsonl").warnings == (unknown,)


def test_what_was_dropped_for_a_set_of_the_run_was_not_trained_on(folder):
    """The run's set `law` again, as a new one: one of its documents stands in web too, and was dropped from it."""
    law = Path("law_eval.jsonl").read_text()
    lines = law.splitlines(keepends=True)
    web = Path("web.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line)["text"] for line in web]
    held_out = documents_of(evaluate("run", sets=["val"], store_dir="store").evalsets["val"])
    (seen,) = [line for line, text in zip(web, rows, strict=True) if text not in held_out][:1]
    Path("law_eval.jsonl").write_text("".join([*lines, seen]))
    train(load_run("run").config, "dropped", store_dir="store")
    dropped = "1 document of web dropped from training: eval set law has them too"
    assert dropped in load_run("dropped").start["warnings"]
    new = {"again": "law_eval.jsonl", "seen": "seen.jsonl"}
    measured = evaluate("dropped", eval_dataset_dirs=new, sets=["again", "seen"], store_dir="store")
    (warning,) = measured.warnings
    assert "documents of seen also occur in source web" in warning
    Path("law_eval.jsonl").unlink()  # without it nobody knows what was dropped
    Path("again.jsonl").write_text("".join([*lines, seen]))
    assert alone("again.jsonl", "dropped").warnings == (
        f"unknown how many documents of again also occur in source web, which the run was trained on: {CHANGED}",
    )


def test_a_set_of_copies_is_told(folder):
    Path("copies.jsonl").write_text('{"text": "one and the same, which no source has"}\n' * 4)
    *_, copies, one = alone("copies.jsonl").warnings
    assert copies.startswith("eval set copies has 4 documents, only 1 of them distinct: copies count as one document")
    assert one.startswith("eval set copies is one document of 2 windows: no standard error")


def test_copies_that_a_set_does_not_measure_are_not_counted(folder):
    web = [json.loads(line)["text"] for line in Path("web.jsonl").read_text().splitlines()]
    held_out = documents_of(evaluate("run", sets=["val"], store_dir="store").evalsets["val"])
    text = next(text for text in web if text and text not in held_out)
    Path("copies.jsonl").write_text((json.dumps({"text": text}) + "\n") * 60)
    measured = alone("copies.jsonl", overrides=["evalsets.sets.copies.max_sequences=9"])
    num = measured.evalsets["copies"].num_documents
    assert 1 <= num <= 9
    assert measured.warnings[0].startswith(f"{num} of {num} documents of copies also occur in source web")


def test_a_set_that_may_be_rows_is_told(folder):
    Path("rows.json").write_text(json.dumps([{"text": "a row that no source has " * 4}] * 3))
    *_, rows, one = alone("rows.json").warnings
    assert rows.startswith(
        "eval set rows: each .json file is read as one document of plain text; if it holds rows, convert"
    )
    assert one.startswith("eval set rows is one document of")


def test_a_source_that_the_config_no_longer_has_is_named(folder):
    config = load_run("run").config.to_json()
    config["sources"]["more"] = {"path": "new.jsonl"}
    config["phases"] = [
        {"name": "a", "until": 2, "mixture": {"web": 0.5, "more": 0.5}},
        {"name": "b", "until": "end", "mixture": {"web": 1}},
    ]
    train(build_config(config), "two", store_dir="store")
    del config["sources"]["more"], config["phases"][0]["mixture"]["more"]
    config["train"]["steps"] = 6
    train(build_config(config), "two", resume=4, accept_past=True, store_dir="store")
    measured = alone("seen.jsonl", "two")
    assert list(measured.results) == ["seen"]
    counted, unknown = sorted(measured.warnings)
    assert "of 45 documents of seen also occur in source web" in counted
    assert unknown == (
        "unknown how many documents of seen also occur in source more, which the run was trained on: the config no "
        "longer has it"
    )


def documents_of(evalset):
    """The texts of a set of byte tokens."""
    texts = {}
    for tokens_T1, scored_T, document in zip(
        evalset.tokens_NT1, evalset.scored_NT, evalset.document_N.tolist(), strict=True
    ):
        texts[document] = texts.get(document, b"") + bytes(tokens_T1[1:][scored_T].tolist())
    return {text.decode() for text in texts.values()}


def test_a_name_stays_with_its_content(folder):
    write_documents(Path("law_eval.jsonl"), WORDS["law"], 25, 3)
    with pytest.raises(InputError, match="evalsets.sets.law: is not the set that the run measured under this name"):
        evaluate("run", store_dir="store")
    assert list(evaluate("run", sets=["val", "web"], store_dir="store").results) == ["val", "web"]
    with pytest.raises(InputError, match="--eval-dataset-dir law=new.jsonl: evalsets.sets.law: is not the set"):
        evaluate("run", eval_dataset_dirs={"law": "new.jsonl"}, sets=["law"], store_dir="store")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": 3}, "--step 3: run has no checkpoint of that step; available: 2, 4; in gold/: 2, 4"),
        ({"step": 2, "weights": "mean:a"}, "--step 2: the mean of a phase is of its last checkpoints"),
        ({"weights": "mean:b"}, "no mean of phase 'b'; available: a"),
        ({"weights": "emma"}, "--weights emma: unknown value"),
        ({"sets": ["lav"]}, "--sets lav: no such eval set; did you mean 'law'? (eval sets: law, val, web)"),
        ({"sets": []}, "--sets: got none, expected names of eval sets (val, web, law)"),
        ({"eval_dataset_dirs": {"a b": "new.jsonl"}}, "--eval-dataset-dir a b=new.jsonl: got the name 'a b', expected lett"),
        ({"eval_dataset_dirs": {"a=b": "new.jsonl"}}, "--eval-dataset-dir a=b=new.jsonl: got the name 'a=b', expected let"),
        ({"eval_dataset_dirs": {"new": "nowhere"}}, "--eval-dataset-dir new=nowhere: evalsets.sets.new: does not exist (paths are relative"),
        ({"overrides": ["evalsets.sets.law.max_sequences=3"]}, "--set evalsets.sets.law.max_sequences=3: expected "
         "evalsets.sets.NAME.KEY=VALUE of a new set, which --eval-dataset-dir gives (new sets: none)"),
        ({"overrides": ["evalsets.sets.newer.every=3"], "eval_dataset_dirs": {"new": "new.jsonl", "newest": "new.jsonl"}},
         "--set evalsets.sets.newer.every=3: expected evalsets.sets.NAME.KEY=VALUE of a new set, which "
         "--eval-dataset-dir gives (new sets: new, newest)"),
        ({"overrides": ["evalsets.sets.new.frmat=text"], "eval_dataset_dirs": {"new": "new.jsonl"}},
         "--set evalsets.sets.new.frmat=text: evalsets.sets.new.frmat: no such"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_told(folder, options, words):
    with pytest.raises(InputError) as told:
        evaluate("run", store_dir="store", **options)
    assert words in str(told.value)


def test_a_new_set_may_have_any_field(folder):
    """Three ways to the same conversations: rows, rows under another key, and a prepared folder."""
    asked, answer = "what falls on the hills", "rain falls on the quiet green hills"
    talks = [
        [{"role": "user", "content": f"{asked} {i}"}, {"role": "assistant", "content": answer[i:]}] for i in range(25)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    Path("turns.jsonl").write_text("".join(json.dumps({"turns": talk}) + "\n" for talk in talks))
    prepare_folder(["talks.jsonl"], byte_tokenizer(), "prepared", format="messages")
    new = {"talks": "talks.jsonl", "turns": "turns.jsonl", "prepared": "prepared"}
    formats = [f"evalsets.sets.{name}.format=messages" for name in new]
    measured = evaluate(
        "run",
        eval_dataset_dirs=new,
        overrides=[*formats, "evalsets.sets.turns.text_key=turns", "evalsets.sets.talks.max_sequences=6"],
        sets=list(new),
        store_dir="store",
    )
    assert windows(measured.results["turns"]) == windows(measured.results["prepared"])
    scored = sum(len(answer[i:] + "<|im_end|>\n") for i in range(25))
    assert measured.evalsets["turns"].num_tokens == scored == measured.results["turns"].tokens_N.sum()
    assert 0 < measured.evalsets["talks"].num_windows <= 6 < measured.evalsets["turns"].num_windows
    with pytest.raises(InputError, match="format text, but prepared was prepared from .*; set format: messages"):
        alone("prepared")

    held_out = ["evalsets.sets.again.path=null", "evalsets.sets.again.held_out_of=web"]
    again = evaluate(
        "run", eval_dataset_dirs={"again": "web.jsonl"}, overrides=held_out, sets=["val", "again"], store_dir="store"
    )
    assert windows(again.results["again"]) == windows(again.results["val"]) and again.warnings == ()


def test_where_the_mesh_does_not_fit_every_device_takes_rows(folder):
    resolved = json.loads(Path("run/config.resolved.json").read_text())
    resolved["mesh"]["fsdp"] = 4
    Path("run/config.resolved.json").write_text(json.dumps(resolved))
    measured = evaluate("run", store_dir="store", sets=["law"])
    assert measured.warnings == (
        "the run's mesh (data -1 x fsdp 4 x tensor 1) does not fit the devices here: measured with mesh.data 1; sums "
        "may differ from training's in the last digits",
    )
    assert windows(measured.results["law"]) == recorded(4, "law")  # the test's devices are those of the run


def test_a_model_of_ones_own_is_brought_again(folder):
    resolved = json.loads(Path("run/config.resolved.json").read_text())
    Path("run/config.resolved.json").write_text(json.dumps(resolved | {"model": None}))
    with pytest.raises(InputError, match=r"was trained with a custom model; call evaluate\(make_model=...\)"):
        evaluate("run", store_dir="store")
    architecture = ModelConfig.of(json.loads(Path("run/model.json").read_text()))

    def make_model(vocab_size):
        assert vocab_size == 257
        return transformer(architecture)

    measured = evaluate("run", store_dir="store", make_model=make_model, sets=["law"])
    assert windows(measured.results["law"]) == recorded(4, "law")


def test_the_command(folder, monkeypatch):
    command = partial(run_here, "eval", "run", "--store-dir", "store")
    monkeypatch.setattr("curriculum.data.progress.QUIET_SECONDS", 0.0)
    assert re.match(r"measuring step 4: \d+ of \d+ windows \(\d+%\), ", command()[2])
    monkeypatch.setattr("curriculum.data.progress.QUIET_SECONDS", math.inf)
    assert command("--step", "2", "--sets", "val", "--sets", "law") == command("--step", "2", "--sets", "val, law")
    code, shown, errors = command("--step", "2", "--sets", "val, law")
    assert code == 0 and errors == ""
    title, head, *rows = shown.splitlines()
    assert title == "run: step 2, raw weights"
    kind = "gold" if load_run("run").gold_step == 4 else "latest"
    assert command("--sets", "val")[1].startswith(f"run: step 4 ({kind}), raw weights\n")
    assert command("--sets", "val", "--step", "latest")[1].startswith("run: step 4 (latest), raw weights\n")
    assert head.split() == ["set", "loss", "±", "sem", "bpb", "perplexity", "accuracy", "windows", "documents"]
    summary = evaluate("run", step=2, store_dir="store").summaries["law"]
    assert [row.split()[0] for row in rows] == ["val", "law"]
    _, loss, sem, bpb, perplexity, accuracy, num_windows, documents = rows[1].split()
    assert (loss, sem) == (f"{summary.loss:.4f}", f"{summary.sem:.4f}") and documents == "25" and int(num_windows) > 25
    assert (perplexity, bpb) == (f"{summary.perplexity:.3f}", f"{summary.bpb:.4f}")
    assert accuracy == f"{summary.accuracy:.2%}"

    Path("few.jsonl").write_text("".join(json.dumps({"text": f"clause {i} says so. " * 40}) + "\n" for i in range(5)))
    code, shown, errors = command("--eval-dataset-dir", "few=few.jsonl", "--sets", "few,law")
    assert code == 0 and shown.splitlines()[-1].startswith(
        "few documents in few: fewer than 20 distinct ones each, in 20"
    )

    code, shown, errors = command("--json", "--weights", "ema", "--eval-dataset-dir", "new=seen.jsonl", "--sets", "new")
    found = json.loads(shown)
    assert code == 0 and (found["run"], found["step"], found["weights"]) == ("run", 4, "ema")
    assert "warning: " in errors and errors.splitlines() == [f"warning: {w}" for w in found["warnings"]]
    assert found["sets"].keys() == {"new"}
    assert found["sets"]["new"].keys() >= {"loss", "sem", "perplexity", "bpb", "accuracy", "windows", "documents"}
    assert found["sets"]["new"]["documents"] == 45
    assert command("--sets", "lav")[0] == 2

    arguments = ["--eval-dataset-dir", "new=new.jsonl", "--sets", "new", "--json"]
    code, shown, _ = command(*arguments, "--set", "evalsets.sets.new.max_sequences=9")
    assert code == 0 and 0 < json.loads(shown)["sets"]["new"]["windows"] <= 9
    assert not any("which cuts none" in warning for warning in json.loads(shown)["warnings"])
    code, shown, _ = command(*arguments, "--set", "evalsets.sets.new.max_sequences=1")
    windows = json.loads(shown)["sets"]["new"]["windows"]
    told = f"the first alone has {windows} windows, more than max_sequences of 1, which cuts none"
    assert code == 0 and windows > 1 and any(told in w for w in json.loads(shown)["warnings"])
    code, _, errors = command(*arguments, "--set", "train.steps=9")
    assert code == 2 and "--set train.steps=9: expected evalsets.sets.NAME.KEY=VALUE of a new set" in errors
