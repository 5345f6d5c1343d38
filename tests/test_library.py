"""The Python of the documentation runs, in an empty folder; and what a model of one's own may and may not be."""

import doctest
import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import assert_same_run, tiny_data, write_corpus

from curriculum.branch import branch
from curriculum.cli.plan import table
from curriculum.config import build_config, load_config
from curriculum.data.corpus import load_corpus, load_evalsets
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.export import export, load_exported
from curriculum.generate import generate, load_generator
from curriculum.model.formats.safetensors_writer import write_safetensors
from curriculum.model.model import Model, check_model
from curriculum.plan import plan
from curriculum.plan_resumed import plan_resumed
from curriculum.run import load_run, run_directory
from curriculum.sampling import Sampling
from curriculum.saved_weights import Weights
from curriculum.train import trainer
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.device import cache_compiled
from curriculum.train.divergence import Diverged
from curriculum.train.dry_run import dry_run
from curriculum.train.setup import build
from curriculum.train.signals import Stopped
from curriculum.train.trainer import train
from curriculum.train.watch import RegressionStop
from curriculum.views.compare import compare
from curriculum.views.inspection import inspect_run
from curriculum.views.report import write_report

ROOT = Path(__file__).parents[1]

# Runs the python blocks of a page one after another as one program, each line under its number in the page, and
# writes down what each line prints.
RUN_PAGE = """
import json, re, sys
page = open(sys.argv[1], encoding="utf-8").read()
printed = []
def record(*values):
    printed.append((sys._getframe(1).f_lineno, " ".join(map(str, values))))
names = {"print": record, "__name__": "__main__"}
for block in re.finditer(r"^```python\\n(.*?)^```$", page, re.S | re.M):
    lines_before = page[:block.start(1)].count("\\n")
    exec(compile("\\n" * lines_before + block[1], sys.argv[1], "exec"), names)
open("printed.json", "w").write(json.dumps(printed))
"""


def run_page(page: Path, folder: Path) -> dict[int, list[str]]:
    """What each line of a page printed, by its number; AssertionError with the traceback where a block fails."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE, str(page)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    by_line: dict[int, list[str]] = {}
    for line, text in json.loads((folder / "printed.json").read_text()):
        by_line.setdefault(line, []).append(text)
    return by_line


def said(page: Path) -> dict[int, str]:
    """What a page says that its lines print: the comment at the end of the line, or those right below it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    expected = {}
    for number, line in enumerate(lines, start=1):
        if not line.lstrip().startswith("print("):
            continue
        below = []
        while number + len(below) < len(lines) and (match := re.fullmatch(r"# (.+)", lines[number + len(below)])):
            below.append(match[1])
        beside = re.search(r"\)  # (.+)$", line)
        assert bool(beside) != bool(below), f"{page.name}:{number}: a print without its output"
        expected[number] = beside[1] if beside else "\n".join(below)
    return expected


def check_page(page: Path, folder: Path) -> int:
    """Run a page and compare; the number of lines that print."""
    printed, expected = run_page(page, folder), said(page)
    assert printed.keys() == expected.keys()
    for number, want in expected.items():
        got = "\n".join(printed[number])
        same = doctest.OutputChecker().check_output(want + "\n", got + "\n", doctest.ELLIPSIS)
        assert same, f"{page.name}:{number}: printed {got!r} and says {want!r}"
    return len(expected)


@pytest.mark.slow
def test_every_block_of_the_library_page_runs_and_prints_what_it_says(tmp_path):
    assert check_page(ROOT / "docs/library.md", tmp_path) >= 14


@pytest.mark.slow
def test_the_guides_example_runs(tmp_path, text_folder):
    config = config_data(
        text_folder, evalsets={"every": 20, "primary": OWN, "sets": {"general": OWN}}, checkpoint={"every": 100}
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text(json.dumps(config))
    assert "general: {" in (ROOT / "configs/quickstart.yaml").read_text()
    assert check_page(ROOT / "docs/guide.md", tmp_path) == 1


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("x = 1\nassert x == 2", r'page\.md", line 5, in <module>'),
        ("print(1)\nprint(2)  # 3", "page.md:4: a print without its output"),
        ("print(2)  # 3", "page.md:4: printed '2' and says '3'"),
        ("for i in (1, 2):\n    print(i)\n# 1\n# 3", r"page.md:5: printed '1\\n2' and says '1\\n3'"),
        ("if False:\n    print(1)  # 1", "=="),
    ],
)
def test_a_wrong_page_is_found_with_its_line(tmp_path, block, message):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```python\n{block}\n```\n")
    with pytest.raises(AssertionError, match=message):
        check_page(page, tmp_path)


OWN = {"held_out_of": "web"}


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice("the quick brown fox jumps over a lazy dog".split(), 3000)
    (folder / "web.txt").write_text(" ".join(words))
    return folder


def config_data(text_folder, **sections):
    return {
        "model": {"n_layer": 1, "n_head": 1, "d_model": 8, "d_ff": 8, "max_seq_len": 32},
        "sources": {"web": {"path": str(text_folder / "web.txt"), "held_out": "10%"}},
        "phases": [{"name": "all", "until": "end", "mixture": {"web": 1}}],
        "evalsets": {"primary": OWN, "every": 100},
        "train": {"steps": 4, "batch_size": 4, "seq_len": 16},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
    } | sections


def bigram(params, build=lambda embed, kernel: {"embed": embed, "kernel": kernel}, take=None, **changes):
    """A model of two matrices, its parameters arranged by `build` and found again by `take`."""
    take = take or (lambda p: (p["embed"], p["kernel"]))

    def forward(params, tokens_BT, segment_ids_BT, keys_B):
        embed_VD, kernel_DV = take(params)
        return embed_VD[tokens_BT] @ kernel_DV

    return Model(**{"init": lambda seed: build(*params), "forward": forward} | changes)


@pytest.fixture
def matrices():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((257, 8), (8, 257))]


def trained(text_folder, run_dir, model, **sections):
    """(final loss, flat parameters) of a short run of a model of one's own."""
    config = build_config(config_data(text_folder, **sections))
    complete = train(config, run_dir, store_dir=text_folder / "store", make_model=lambda vocab_size: model)
    assert complete["skipped_updates"] == 0
    return complete["final_val_loss"], jax.tree.leaves(load_params(run_dir / "checkpoints/4/params"))


def test_parameters_may_be_lists_and_arrays_of_a_device(tmp_path, text_folder, matrices):
    loss, arrays = trained(text_folder, tmp_path / "dict", bigram(matrices))

    on_device = [jnp.asarray(array) for array in matrices]
    device_loss, device_arrays = trained(text_folder, tmp_path / "device", bigram(on_device))
    listed = bigram(
        matrices, lambda e, k: {"layers": [e, {"kernel": k}]}, lambda p: (p["layers"][0], p["layers"][1]["kernel"])
    )
    list_loss, list_arrays = trained(text_folder, tmp_path / "list", listed)

    assert loss == device_loss == list_loss
    assert len(arrays) == 2 and not np.array_equal(arrays[0], matrices[0])
    for others in (device_arrays, list_arrays):
        assert all(np.array_equal(a, b) for a, b in zip(arrays, others, strict=True))
    # What the caller keeps is his: the same as before the run, and still there.
    assert all(np.array_equal(a, b) for a, b in zip(on_device, matrices, strict=True))

    export(tmp_path / "list", tmp_path / "exported")
    export(tmp_path / "list", tmp_path / "half", dtype="bf16")
    half = load_exported(tmp_path / "half", listed)["layers"][0]
    assert half.dtype == np.float32 and np.array_equal(half, np.asarray(jnp.asarray(arrays[0]).astype(jnp.bfloat16)))
    loaded = load_exported(tmp_path / "exported", listed)
    assert np.array_equal(loaded["layers"][0], arrays[0]) and np.array_equal(loaded["layers"][1]["kernel"], arrays[1])


def test_exported_shards_are_loaded_and_other_arrays_refused(tmp_path, matrices):
    arrays = {"embed": matrices[0], "kernel": matrices[1]}
    write_safetensors(tmp_path, arrays.items(), {}, shard_bytes=9000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    loaded = load_exported(tmp_path, bigram(matrices))
    assert loaded.keys() == arrays.keys() and all(np.array_equal(loaded[name], arrays[name]) for name in arrays)

    def refused(message, model, folder=tmp_path):
        with pytest.raises(InputError, match=message):
            load_exported(folder, model)

    refused(r"kernel: got \[8, 257\], expected \[8, 300\]", bigram([matrices[0], np.zeros((8, 300), np.float32)]))
    refused(r"bias: got none, expected \[8, 257\]", bigram(matrices, lambda e, k: {"embed": e, "kernel": k, "bias": k}))
    refused("kernel: got .*, expected none", bigram(matrices, lambda e, k: {"embed": e}))
    refused("holds no model.safetensors", bigram(matrices), tmp_path / "nothing")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    refused("cannot be read", bigram(matrices))


def test_a_folder_without_parameters_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no saved arrays; expected the folder RUN/checkpoints/STEP/params"):
        load_params(str(tmp_path))


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def generating(extend, empty_cache=lambda rows, positions: {"kept": jnp.zeros((rows, positions))}):
    """What `Model` has for generation: `extend(logits, cache)` gives what it gives."""
    return {
        "empty_cache": empty_cache,
        "extend": lambda p, cache, t, *_: extend(p["embed"][t] @ p["kernel"], cache),
    }


FIRST_ROWS = {"forward": lambda p, t, s, k: p["embed"][t][:, 1:]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"build": lambda e, k: {"embed": e.astype(jnp.bfloat16), "kernel": k}}, "parameter embed: got bfloat16, expected float32"),
        ({"build": lambda e, k: {"embed": e, "kernel": [k.astype(np.int32)]}}, "parameter kernel.0: got int32, expected float32"),
        ({"build": lambda e, k: {}}, "init gave no parameters"),
        ({"build": lambda e, k: {"embed": e, "kernel": k, "none": k[:0]}}, r"parameter none: got shape \[0, 257\], expected no empty array"),
        ({"build": lambda e, k: e}, "parameter : expected nested lists and dicts with string keys"),
        ({"build": lambda e, k: {0: e, 1: k}}, "parameter 0: expected nested lists and dicts with string keys"),
        ({"build": lambda e, k: {"a.b": e, "a": {"b": k}}}, "parameter a.b: two have this name"),
        ({"forward": lambda p, t, s, k: p["embed"][t][:, 1:]}, r"forward gave float32\[4, 15, 8\] for tokens int32\[4, 16\], expected \[4, 16, D\]"),
        ({"forward": lambda p, t, s, k: p["embed"][t][..., 0]}, r"forward gave float32\[4, 16\] for tokens"),
        ({"forward": lambda p, t, s, k: (p["embed"][t], None)}, "forward gave tuple for tokens"),
        ({"forward": lambda p, t, s, k: p["embed"][t] if k is None else p["embed"][t][:1]}, r"forward gave float32\[1, 16, 8\]"),
        ({"forward": lambda p, t, s, k: p["embed"][t]}, "forward, without a head, gave logits for 8 ids, expected at least the tokenizer's 257"),
        ({"forward": lambda p, t, s, k: p["embed"][t], "head": lambda p: p["embed"][:256]}, "head gave a kernel for 256 ids, expected at least the tokenizer's 257"),
        ({"forward": lambda p, t, s, k: p["embed"][t], "head": lambda p: p["kernel"]}, r"head gave float32\[8, 257\], expected \[V, 8\]"),
        ({"num_ids": 256}, "num_ids: got 256, expected from the tokenizer's 257 to the logits' 257"),
        ({"num_ids": 258}, "num_ids: got 258, expected from the tokenizer's 257 to the logits' 257"),
        (generating(None, lambda rows, positions: jnp.zeros((positions, rows))), r"empty_cache gave float32\[4, 2\] for 2 rows, expected arrays whose first axis"),
        (generating(lambda logits, cache: logits), r"extend gave float32\[2, 4, 257\], expected two: features and the cache"),
        (generating(lambda logits, cache: (logits[:, -1], cache)), r"extend gave float32\[2, 257\] for tokens int32\[2, 4\], expected \[2, 4, 257\], as from forward"),
        (generating(lambda logits, cache: (logits, cache["kept"])), "extend gave a cache like .*, expected one like that of empty_cache"),
        (generating(lambda logits, cache: (logits, {"kept": cache["kept"].astype(jnp.bfloat16)})), r"extend changed float32\[2, 4\] in the cache to bfloat16\[2, 4\], expected the same shape and type"),
    ],
)  # fmt: skip
def test_a_model_that_breaks_its_promises_is_refused(matrices, change, message):
    with pytest.raises(InputError, match=message):
        check_model(bigram(matrices, **change), vocab_size=257, num_rows=4, seq_len=16)


def test_every_wrong_parameter_is_told_at_once(matrices):
    half = bigram(matrices, lambda e, k: {"embed": e.astype(np.float16), "kernel": k.astype(np.float16)})
    with pytest.raises(InputError) as caught:
        check_model(half, vocab_size=257, num_rows=4, seq_len=16)
    assert [problem.split(":")[1] for problem in caught.value.problems] == [" parameter embed", " parameter kernel"]


def test_a_good_model_passes_with_and_without_a_head(matrices):
    check_model(bigram(matrices), vocab_size=257, num_rows=4, seq_len=16)
    headed = {"forward": lambda p, t, s, k: p["embed"][t], "head": lambda p: p["embed"]}
    check_model(bigram(matrices, **headed), vocab_size=100, num_rows=4, seq_len=16)
    going_on = generating(lambda logits, cache: (logits, cache)) | {"max_seq_len": 3}
    check_model(bigram(matrices, **going_on), vocab_size=257, num_rows=4, seq_len=2)


def test_what_make_model_gives_is_checked_before_a_run_is_created(tmp_path, text_folder, matrices):
    config = build_config(config_data(text_folder))
    no_json = "architecture: Object of type .* is not JSON serializable; expected a mapping of plain JSON"
    for gives, message in (
        (bigram(matrices, **FIRST_ROWS), "forward gave"),
        (matrices, "gave list, expected"),
        (bigram(matrices, architecture={"act": jax.nn.gelu}), no_json),
        (bigram(matrices, architecture=[1]), "architecture: .*; expected a mapping of plain JSON"),
        (
            bigram(matrices, architecture={1: 2}),
            "architecture: has keys that are not text; expected a mapping of plain",
        ),
    ):
        with pytest.raises(InputError, match=message):
            train(config, tmp_path / "run", store_dir=text_folder / "store", make_model=lambda vocab_size: gives)  # noqa: B023
    assert not (tmp_path / "run").exists()


def test_an_architecture_may_have_numpy_s_numbers(tmp_path, text_folder, matrices):
    config = build_config(config_data(text_folder))
    of_numpy = {"width": np.int64(8), "sizes": np.arange(3), "more": MappingProxyType({"a": 1})}
    model = bigram(matrices, architecture=of_numpy)
    train(config, tmp_path / "run", store_dir=text_folder / "store", make_model=lambda vocab_size: model)
    kept = json.loads((tmp_path / "run/model.json").read_text())
    assert kept == {"width": 8, "sizes": [0, 1, 2], "more": {"a": 1}}


def test_a_model_of_ones_own_may_have_longer_sequences_than_the_presets(tmp_path, text_folder, matrices):
    long = {"steps": 4, "batch_size": 1, "seq_len": 1200}
    with pytest.raises(InputError, match="expected at most the model's max_seq_len"):
        build_config(config_data(text_folder, train=long))
    config = build_config(config_data(text_folder, train=long, model=None))
    assert plan(config, store_dir=tmp_path).num_parameters is None
    assert "parameters: unknown (model is null)" in table(plan(config))
    told = dry_run(config, store_dir=text_folder / "store", make_model=lambda vocab_size: bigram(matrices))
    assert told["num_parameters"] == 2 * 257 * 8


def test_calls_with_what_is_no_config_are_refused(tmp_path, text_folder):
    resumed = partial(plan_resumed, run_dir=tmp_path / "run")
    for call in (plan, resumed, dry_run, lambda config: train(config, tmp_path / "run")):
        for given, told in (
            ("c.yaml", r"got 'c.yaml', expected a Config, as load_config\('c.yaml'\) gives it"),
            ({"name": "x"}, r"got a dict, expected a Config, as build_config\({...}\) gives it"),
            (None, r"got a NoneType, expected a Config, as load_config\(PATH\) gives it"),
        ):
            with pytest.raises(InputError, match=f"^config: {told}$"):
                call(given)
    with pytest.raises(InputError, match="^load_config: got a dict, expected the path of a file; build_config takes"):
        load_config(config_data(text_folder))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("optim", {"schedule": "linaer"}, 'config: optim.schedule: got "linaer", expected'),
        ("checkpoint", {"keep": 0}, "config: checkpoint.keep: got 0, expected at least 1"),
        ("train", {"batch_size": 8.0}, "config: train.batch_size: got 8.0, expected an integer: write 8"),
        ("evalsets", {"every": 0}, "config: evalsets.every: got 0, expected at least 1"),
        (
            "train",
            {"steps": np.int64(8)},
            "config: Object of type int64 is not JSON serializable: give numbers and text of Python",
        ),
        ("optim", None, "config: optim: got a dict, expected what load_config or build_config makes of it"),
        ("phases", list, "config: phases: got a list, expected what load_config or build_config makes of it"),
    ],
)
def test_a_config_that_was_changed_into_a_wrong_one_is_refused(tmp_path, text_folder, section, changes, told):
    """`replace` checks nothing, and the run could not read its own config back."""
    config = build_config(config_data(text_folder))
    now = getattr(config, section)
    if isinstance(changes, dict):
        wrong = replace(config, **{section: replace(now, **changes)})
    else:
        wrong = replace(config, **{section: config.to_json()[section] if changes is None else changes(now)})
    for call in (plan, dry_run, lambda config: train(config, tmp_path / "run")):
        with pytest.raises(InputError) as error:
            call(wrong)
        assert error.value.problems[0].startswith(told)
    assert not (tmp_path / "run").exists()
    plan(replace(config, train=replace(config.train, steps=11)))  # what is right is taken


def test_a_run_without_a_model_is_refused(tmp_path, text_folder):
    config = build_config(config_data(text_folder, model=None))
    for start in (
        lambda: train(config, tmp_path / "run", store_dir=tmp_path),
        lambda: dry_run(config, store_dir=tmp_path),
    ):
        with pytest.raises(InputError, match=r"model: got null .* call train\(make_model=\.\.\.\)"):
            start()
    assert not any(tmp_path.iterdir())


def test_what_goes_on_with_a_model_of_ones_own_is_a_call(tmp_path, text_folder, matrices):
    (tmp_path / "c.json").write_text(json.dumps(config_data(text_folder)))
    run_dir, stores = tmp_path / "run", text_folder / "store"
    train(load_config(tmp_path / "c.json"), run_dir, store_dir=stores, make_model=lambda _: bigram(matrices))
    rest = f"{str(run_dir)!r}, resume='latest', store_dir={str(stores)!r}, make_model=...) from Python"
    remembered = f"remembered=run_directory('{run_dir}').command_line(), continues='{run_dir}'"
    call = f": train(load_config('{tmp_path}/c.json', {remembered}), {rest}, with a higher train.steps\n"
    assert call in (run_dir / "train.log").read_text()
    commands = inspect_run(load_run(run_dir))["commands"]
    call = f"train(load_config('{run_dir}/config.yaml', {remembered}), {rest}"
    assert commands["train longer"] == f"{call}, with a higher train.steps"
    with open(run_dir / "events.jsonl", "a") as record:
        diverged = {**load_run(run_dir).complete, "event": "diverged", "last_good_step": 8, "reason": "planted"}
        record.write(json.dumps(diverged) + "\n")
    call = f"branch('{run_dir}', 8, 'NEW', overrides=['KEY=VALUE'], store_dir={str(stores)!r}, make_model=...)"
    assert inspect_run(load_run(run_dir))["commands"]["go on"] == f"{call} from Python"
    with pytest.raises(InputError, match=r"continue a branch begun there: train\(load_config\("):
        branch(run_dir, 2, run_dir, make_model=lambda _: bigram(matrices))
    without_it = build_config(config_data(text_folder, model=None), continues=run_dir)
    for start in (
        lambda: train(without_it, run_dir, resume="latest", store_dir=stores),
        lambda: branch(run_dir, 2, tmp_path / "branch", overrides=["model=null"], store_dir=stores),
    ):
        with pytest.raises(InputError, match="model: got null: only a run with a custom model goes on so"):
            start()


def test_the_call_that_goes_on_with_a_model_of_ones_own_changes_nothing(tmp_path, text_folder, matrices):
    (tmp_path / "c.json").write_text(json.dumps(config_data(text_folder, checkpoint={"every": 2})))
    given = {"store_dir": text_folder / "store", "make_model": lambda _: bigram(matrices)}
    train(load_config(tmp_path / "c.json", ["optim.lr=2e-3", "train.batch_size=2"]), tmp_path / "run", **given)
    newest = max((tmp_path / "run/checkpoints").iterdir(), key=lambda folder: int(folder.name))
    shutil.rmtree(newest)
    call = inspect_run(load_run(tmp_path / "run"))["commands"]["train longer"].partition(" from Python")[0]
    names = {"train": train, "load_config": load_config, "run_directory": run_directory}
    eval(call.replace("make_model=...", "make_model=given"), names | {"given": given["make_model"]})
    run = load_run(tmp_path / "run")
    assert run.complete and not [event for event in run.events if event["event"] == "schedule_edit"]
    assert run.config.optim.lr == 2e-3


def test_a_run_keeps_that_its_model_was_not_the_configs(tmp_path, text_folder, matrices):
    trained(text_folder, tmp_path / "run", bigram(matrices, architecture={"kind": "bigram", "width": 8}))
    run = load_run(tmp_path / "run")
    assert run.config.model is None and run.events[0]["config"]["model"] is None
    assert json.loads((tmp_path / "run/model.json").read_text()) == {"kind": "bigram", "width": 8}

    config = build_config(config_data(text_folder))
    other = bigram(matrices, architecture={"kind": "bigram", "depth": 1})
    with pytest.raises(InputError, match=r"cannot change: width None \(was 8\), depth 1 \(was None\)"):
        train(config, tmp_path / "run", resume="latest", store_dir=text_folder / "store", make_model=lambda _: other)
    with pytest.raises(InputError, match=r"cannot change: kind None \(was bigram\)"):
        train(config, tmp_path / "run", resume="latest", store_dir=text_folder / "store")


def test_a_single_text_is_not_taken_letter_by_letter(tmp_path):
    (tmp_path / "run.yaml").write_text("name: x\n")
    for call, what in [
        (lambda: generate("run", "the fox"), "prompts: got 'the fox', expected a list, as in ['the fox']"),
        (lambda: evaluate("run", sets="laws"), "sets: got 'laws'"),
        (lambda: evaluate("run", overrides="a=1"), "overrides: got 'a=1'"),
        (lambda: load_config(tmp_path / "run.yaml", "seed=7"), "overrides: got 'seed=7'"),
        (lambda: load_config(tmp_path / "run.yaml", dataset_dirs=Path("laws")), "--dataset-dir: got 'laws'"),
        (lambda: compare("runs/h"), "run_dirs: got 'runs/h'"),
        (lambda: write_report(Path("runs/h"), tmp_path / "report.html"), "run_dirs: got 'runs/h'"),
    ]:
        with pytest.raises(InputError) as told:
            call()
        assert str(told.value).startswith(what)


def test_an_argument_of_another_type_is_taken_or_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tiny_data(write_corpus(tmp_path))
    data["model"]["preset"] = Enum("Preset", {"TINY": "tiny"}, type=str).TINY
    config = build_config(MappingProxyType(data))
    assert config.model.preset == "tiny" and type(config.model.preset) is str
    assert not Sampling(max_tokens=np.int64(3), temperature=np.float32(1), seed=np.uint8(1)).problems()

    step = "expected 'latest', 'gold' or the step of a checkpoint"
    for call, message in [
        (lambda: train(config, ""), 'run_dir: got "", expected the path of a folder'),
        (lambda: train(config, 3), "run_dir: got 3, expected the path of a folder"),
        (
            lambda: train(config, "~/x"),
            """run_dir: got "~/x", expected the path of a folder; write it out, as os.path.expanduser('~/x') does""",
        ),
        (lambda: branch("run", 2, ""), 'run_dir: got "", expected the path of a folder'),
        (lambda: train(config, "run", store_dir=None), "store_dir: got null, expected the path of a folder"),
        (lambda: plan(config, store_dir=""), 'store_dir: got "", expected the path of a folder'),
        (lambda: load_corpus(config, ""), 'store_dir: got "", expected the path of a folder'),
        (
            lambda: load_evalsets(config, "", byte_tokenizer(), ["primary"]),
            'store_dir: got "", expected the path of a folder',
        ),
        (lambda: cache_compiled(""), 'store_dir: got "", expected the path of a folder'),
        *(
            (call, f"views: got {views!r}, expected a list of objects with the methods event, row and close")
            for views in (Seen(), [Seen], ["wandb"], None)
            for call in (partial(train, config, "run", views=views), partial(branch, "run", 2, "new", views=views))
        ),
        (lambda: train(config, "run", resume=False), f"--resume False: {step}"),
        (lambda: train(config, "run", resume=-1), f"--resume -1: {step}"),
        (lambda: train(config, "run", resume=True), f"--resume True: {step}"),
        (lambda: train(config, "run", resume=2.0), f"--resume 2.0: {step}"),
        (lambda: train(config, "run", resume=Path("run/checkpoints/2")), f"--resume run/checkpoints/2: {step}"),
        (lambda: generate("run", ["a"], max_tokens=3.0), "max_tokens: got 3.0, expected a whole number: 1 to 1000000"),
        (
            lambda: generate("run", ["a"], top_p="1"),
            "top_p: got '1', expected a number: more than 0 and at most 1 (all tokens)",
        ),
    ]:
        with pytest.raises(InputError) as told:
            call()
        assert str(told.value) == message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["law.jsonl", "web.jsonl"]


def test_none_is_neither_a_run_nor_a_choice(tmp_path):
    (tmp_path / "config.resolved.json").write_text("{}")
    no_run = "run: got null, expected the path of a folder"
    for call, message in [
        (lambda: evaluate(None), no_run),
        (lambda: generate(None, ["a"]), no_run),
        (lambda: inspect_run(None), no_run),
        (lambda: compare([tmp_path, None]), no_run),
        (lambda: branch(None, 2, "new"), no_run),
        (lambda: export(None, "out"), no_run),
        (lambda: export(tmp_path, None), "-o: got null, expected the path of a folder"),
        (lambda: export(tmp_path, "out", format=None), "--format None: unknown value; expected one of: safetensors, "),
        (lambda: export(tmp_path, "out", dtype=None), "--dtype None: unknown value; expected one of: "),
        (lambda: Weights.parse(None), "--weights None: unknown value; expected one of: raw, ema, mean:PHASE"),
    ]:
        with pytest.raises(InputError) as told:
            call()
        assert str(told.value).startswith(message)


def test_paths_may_be_given_as_paths(text_folder, tmp_path):
    """And directories by their names, as `evaluate` takes them."""
    (tmp_path / "own.yaml").write_text(
        f"sources: {{web: {{path: {text_folder}}}}}\nphases: [{{name: a, until: end, mixture: {{web: 1}}}}]\n"
    )
    config = load_config(
        tmp_path / "own.yaml",
        ["evalsets.primary={path: x}", "train.steps=3"],
        dataset_dirs=[text_folder],
        eval_dataset_dirs={"own": text_folder},
        check_paths=False,
    )
    assert config.evalsets.sets["own"].path == str(text_folder) and text_folder.name in config.sources
    assert config.command_line[:2] == [
        f"--dataset-dir {text_folder.name}={text_folder}",
        f"--eval-dataset-dir own={text_folder}",
    ]
    with pytest.raises(InputError, match="--init-from .*nowhere: adaptation.init_from: .* does not exist"):
        load_config(tmp_path / "own.yaml", ["evalsets.primary={path: x}", "train.steps=3"], init_from=Path("nowhere"))


def _mesh(kind):
    return jax.make_mesh((1,), ("x",), axis_types=(kind,))


@contextmanager
def _in_all_threads(name, value):
    """As a variable of the environment sets it; jax's own context managers hold in one thread."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    "forbidding",
    [
        lambda: jax.set_mesh(_mesh(jax.sharding.AxisType.Explicit)),
        lambda: jax.set_mesh(_mesh(jax.sharding.AxisType.Auto)),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: _in_all_threads("jax_transfer_guard", "disallow"),
        lambda: _in_all_threads("jax_transfer_guard", "disallow_explicit"),
        lambda: _in_all_threads("jax_numpy_rank_promotion", "raise"),
    ],
    ids=["explicit mesh", "auto mesh", "transfers", "dtypes", "ranks", "everywhere", "explicit ones too", "all ranks"],
)
def test_what_the_caller_asks_of_jax_for_code_of_his_own_reaches_no_run(forbidding, tmp_path):
    store, data = tmp_path / "store", tiny_data(write_corpus(tmp_path))
    longer = [*data["phases"][:1], data["phases"][1] | {"seq_len": 16}]  # compiled ahead
    config = build_config(data | {"phases": longer, "train": data["train"] | {"steps": 8}})
    with forbidding():
        train(config, tmp_path / "run", store_dir=store)
        loss = evaluate(tmp_path / "run", step=8, store_dir=store).summaries["val"].loss
        [text] = generate(tmp_path / "run", ["the fox"], step=8, max_tokens=4, store_dir=store)
        loaded = load_generator(tmp_path / "run", step=8, store_dir=store)
        asked = jax.config.jax_numpy_rank_promotion, jax.sharding.get_mesh()
        pieces = loaded.stream(["the fox"], Sampling(max_tokens=4))
        first = next(pieces)
        assert (jax.config.jax_numpy_rank_promotion, jax.sharding.get_mesh()) == asked
        assert [first, *pieces][-1].whole == text
        assert export(tmp_path / "run", tmp_path / "out", format="safetensors", step=8) == 8
        assert load_exported(tmp_path / "out", loaded.generator.model).keys() == loaded.params.keys()
        assert load_params(tmp_path / "run/checkpoints/8/params").keys() == loaded.params.keys()
    assert round(loss, 6) == load_run(tmp_path / "run").evals()[-1][1]


def test_a_run_that_is_over_holds_no_files_and_no_eval_sets(tmp_path, monkeypatch):
    """Without waiting for a garbage collection: the cards of a notebook's user are full of eval sets else."""
    short = {"train": {"steps": 1, "batch_size": 4, "seq_len": 32}, "optim": {"warmup_steps": 0}}
    one = {"phases": [{"name": "a", "until": "end", "mixture": {"web": 1, "law": 1}}]}
    config, parts = build_config(tiny_data(write_corpus(tmp_path), **short, **one)), []

    def built(*given, **named):
        made = build(*given, **named)
        [[(tokens, _), *_], *_] = made.suite_at(0)._micro_batches.values()
        parts.extend(map(weakref.ref, (tokens, made.corpus, made.compiled, made.course)))
        return made

    monkeypatch.setattr(trainer, "build", built)
    train(config, tmp_path / "before", store_dir=tmp_path / "store")  # imports, and what they open
    gc.collect()
    gc.disable()
    try:
        before, _ = os.listdir("/proc/self/fd"), parts.clear()
        train(config, tmp_path / "run", store_dir=tmp_path / "store")
        assert os.listdir("/proc/self/fd") == before
        assert len(parts) == 4 and not [part() for part in parts if part() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["jax_disable_jit", "jax_debug_infs"])
def test_a_setting_of_jax_under_which_no_run_trains_is_refused(name, tmp_path):
    config = build_config(tiny_data(write_corpus(tmp_path)))
    jax.config.update(name, True)
    try:
        with pytest.raises(InputError, match=f"^{name}: is on, and .*; turn it off for this call"):
            train(config, tmp_path / "run", store_dir=tmp_path / "store")
    finally:
        jax.config.update(name, False)
    assert not (tmp_path / "run").exists() and not (tmp_path / "store").exists()


def test_a_run_trains_while_jax_looks_for_nans(tmp_path):
    config = build_config(tiny_data(write_corpus(tmp_path)))
    with jax.debug_nans(True):
        assert train(config, tmp_path / "run", store_dir=tmp_path / "store")["total_steps"] == config.train.steps


@pytest.mark.parametrize(
    "raised",
    [
        InputError("a: wrong", "b: wrong", details=["as in c"]),
        Stopped(2, 7),
        Stopped(15, 7, 5, "no space left"),
        RegressionStop(7, iter(["primary", "code"])),
        Diverged("of\nseveral lines"),
    ],
)
def test_what_train_raises_reaches_another_process_whole(raised):
    """A pool of processes ends with every trial in it if what one of them raises cannot be read."""
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is type(raised) and str(again) == str(raised) and vars(again) == vars(raised)


class Seen:
    """A view that notes what it is given."""

    def __init__(self):
        self.events, self.rows, self.closed = [], [], 0

    def event(self, event):
        self.events.append(event)

    def row(self, row):
        self.rows.append(row)

    def close(self):
        self.closed += 1


def test_a_view_of_the_callers_gets_the_record_as_it_is_written(tmp_path):
    config, store = build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store"
    seen, again, of_branch = Seen(), Seen(), Seen()
    train(config, tmp_path / "run", store_dir=store, views=[seen])
    run = load_run(tmp_path / "run")
    assert (seen.events, seen.rows, seen.closed) == (run.events, run.metrics, 1)
    train(config, tmp_path / "run", store_dir=store, resume=8, views=[again])
    run = load_run(tmp_path / "run")
    assert again.events == run.events[-len(again.events) :] and again.events[0]["event"] == "resume"
    assert [row["step"] for row in again.rows] == [9, 10, 11, 12] and again.closed == 1
    branch(tmp_path / "run", 10, tmp_path / "branch", store_dir=store, views=[of_branch])
    assert [row["step"] for row in of_branch.rows] == [11, 12] and of_branch.closed == 1


class Taking:
    """A view that takes what it is given apart, as with `tracker.log(row, step=row.pop("step"))`."""

    def event(self, event):
        for value in event.values():
            if isinstance(value, dict | list):
                value.clear()
        event.clear()

    def row(self, row):
        row.clear()

    def close(self):
        pass


def test_what_a_view_does_to_a_line_reaches_neither_the_run_nor_other_views(tmp_path):
    config, store, seen = build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store", Seen()
    complete = train(config, tmp_path / "run", store_dir=store, views=[Taking(), seen])
    run = load_run(tmp_path / "run")
    assert (seen.events, seen.rows, complete) == (run.events, run.metrics, run.complete)
    train(config, tmp_path / "other", store_dir=store)
    assert_same_run(tmp_path / "run", tmp_path / "other")


def test_what_a_view_raises_ends_the_run_which_goes_on_from_its_newest_checkpoint(tmp_path):
    config, store = build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store"
    failing = Seen()
    failing.row = lambda row: {}[row["step"]] if row["step"] == 7 else None
    with pytest.raises(KeyError, match="^7$"):
        train(config, tmp_path / "run", store_dir=store, views=[failing])
    assert failing.closed == 1
    train(config, tmp_path / "run", store_dir=store, resume="latest")
    assert [e["step"] for e in load_run(tmp_path / "run").events if e["event"] == "resume"] == [6]
