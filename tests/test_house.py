"""The house rules that a machine can check."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from written_run import command

ROOT = Path(__file__).parents[1]
PACKAGES = ("curriculum", "phases", "evalsets")
HEAVY = "jax flax orbax datasets optax tensorboard wandb safetensors.numpy torch transformers".split()


def modules(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, anywhere in it; of `from a import b` both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports(path: Path) -> set[str]:
    """First names of everything a file imports, anywhere in it."""
    return {name.split(".")[0] for name in modules(path)}


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 3
    return found


def test_imports_run_one_way():
    standard = set(sys.stdlib_module_names)
    for path in files("phases"):
        assert imports(path) - standard <= {"numpy", "phases"}, path
    for path in files("evalsets"):
        allowed = {"numpy", "evalsets"} | {"suite.py": {"jax"}, "metrics.py": {"scipy"}}.get(path.name, set())
        assert imports(path) - standard <= allowed, path
    for path in files("curriculum"):
        assert not imports(path) & {"tests", "tools"}, path


# What the modules of a folder do not import, those of folders in it aside: parts know nothing of what is made of them.
NOT_FROM = {
    "disk": ("parsing", "schema", "data", "model", "record", "train", "branching", "views", "cli"),
    "parsing": ("disk", "schema", "data", "model", "record", "train", "branching", "views", "cli"),
    "data": ("train", "record", "views", "cli"),
    "data/tokenizers": ("train", "record", "views", "cli", "model"),
    "model": ("train", "record", "views", "cli"),
    "record": ("train", "data", "model", "views", "cli"),
    "train": ("branching", "views", "cli"),
    "train/resuming": ("branching", "views", "cli"),
    "views": ("train", "branching", "cli"),
}


@pytest.mark.parametrize("folder", NOT_FROM)
def test_parts_know_nothing_of_what_is_made_of_them(folder):
    found = sorted((ROOT / "curriculum" / folder).glob("*.py"))
    assert len(found) > 3
    for path in found:
        of = {name.split(".")[1] for name in modules(path) if name.startswith("curriculum.")}
        assert not of & set(NOT_FROM[folder]), path


def test_package_files_hold_a_docstring_and_nothing_else():
    found = [path for package in PACKAGES for path in files(package) if path.name == "__init__.py"]
    assert len(found) >= 7
    for path in found:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant), path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["export", "--help"],
        ["eval", "--help"],
        ["generate", "--help"],
        ["generate", "nowhere", "--prompt", "x"],
        ["generate", "a-run", "--prompt", "x", "--top-p", "0"],
        ["eval", "nowhere"],
        ["eval", "a-run", "--sets", "x"],
        ["plan", "configs/quickstart.yaml"],
        ["plan", "configs/adaptation.yaml", "--init-from", "nowhere"],
        ["plan", "no-such-file.yaml"],
        ["export", "nowhere", "--format", "safetensors", "-o", "x"],
        ["export", "a-run", "--format", "safetensor", "-o", "x"],
        ["export", "a-run", "--format", "safetensors", "--weights", "emma", "-o", "x"],
        ["export", "a-run", "--format", "safetensors", "-o", "configs"],
        ["export", "a-run", "--format", "hf", "--dtype", "q8_0", "-o", "x"],
    ],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(arguments, quickstart_folders):
    code, _, _, modules = command(*arguments, cwd=quickstart_folders)
    wrong = arguments[0] in ("export", "eval", "generate") and "--help" not in arguments
    wrong |= "no-such-file.yaml" in arguments or "--init-from" in arguments
    assert code == (2 if wrong else 0)
    assert not modules & set(HEAVY)
    if arguments in (["--help"], ["generate", "--help"], ["eval", "--help"]):
        assert not modules & {"numpy", "pydantic", "yaml"}


def test_a_plan_of_what_is_prepared_imports_nothing_heavy(quickstart_folders):
    text = {"path": "data/quickstart/docs"}
    data = {
        "sources": {"docs": text},
        "phases": [{"name": "a", "until": "end", "mixture": {"docs": 1}}],
        "evalsets": {"primary": {"path": "data/quickstart/python"}},
        "train": {"steps": 4, "seq_len": 8},
        "packing": {"mode": "best_fit"},
    }
    (quickstart_folders / "data/quickstart/python/x.txt").write_text("some other words, enough for a window")
    (quickstart_folders / "data/quickstart/docs/x.txt").write_text("a text that is long enough for a few sequences")
    (quickstart_folders / "c.json").write_text(json.dumps(data))
    assert command("prepare", "c.json", cwd=quickstart_folders)[0] == 0
    code, shown, _, modules = command("plan", "c.json", cwd=quickstart_folders)
    assert code == 0 and not modules & set(HEAVY)
    # Nor what costs a plan time and is of no use to it: `np.unique` imports the first, and the JSON schema the second.
    assert "curriculum.plan" in modules
    assert not modules & {"numpy.ma", "pydantic", "evalsets.gold", "curriculum.train.processes.launch"}
    assert "slots that hold text: docs 9" in shown and "not prepared" not in shown


def test_what_a_config_may_change_of_a_run_is_known_without_jax():
    names = [f"curriculum.train.resuming.{p.stem}" for p in (ROOT / "curriculum/train/resuming").glob("[a-z]*.py")]
    assert "curriculum.train.resuming.edits" in names
    script = f"import sys, {', '.join(names)}, curriculum.plan_resumed; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & set(HEAVY)


def test_training_imports_what_saves_need_while_it_runs():
    script = (
        "import sys\n"
        "from curriculum.train.trainer import import_ahead\n"
        "assert 'jax' in sys.modules and 'orbax' not in sys.modules\n"
        "import_ahead().join()\n"
        "assert 'orbax.checkpoint' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_that_begins_from_a_hugging_face_folder_imports_nothing_heavy(quickstart_folders):
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from curriculum.model.formats.hf import hf_layout
    from curriculum.model.formats.hf_config_writer import hf_config_of
    from curriculum.model.presets import ModelConfig

    folder = quickstart_folders / "hf"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    model = ModelConfig(vocab_size=257, n_layer=1, n_head=1, n_kv_head=1, d_model=8, d_ff=8, max_seq_len=256)
    (folder / "config.json").write_text(json.dumps(hf_config_of(model, bos=0, eos=0)))
    arguments = ["plan", "configs/adaptation.yaml", "--init-from", "hf"]
    assert command(*arguments, cwd=quickstart_folders)[0] == 2  # the weights are not there yet
    save_file({t.name: np.zeros(t.shape, np.float32) for t in hf_layout(model)}, folder / "model.safetensors")
    code, shown, _, modules = command(*arguments, cwd=quickstart_folders)
    assert code == 0 and not modules & {*HEAVY, "tokenizers", "ml_dtypes"}
    assert "begins with the parameters of a llama model (hf)" in shown


@pytest.fixture
def quickstart_folders(tmp_path):
    """A working folder with the configs, stand-ins for the quickstart's sources, and what looks like a run."""
    for name in ("docs", "python", "cpp"):
        folder = tmp_path / "data/quickstart" / name
        folder.mkdir(parents=True)
        (folder / "x.txt").write_text("text")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run/config.resolved.json").write_text("{}")
    return tmp_path


def test_pins_are_plain_and_cover_every_dependency():
    pins, parity = pinned("requirements.txt"), pinned("requirements-parity.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert len(project["dependencies"]) > 10
    assert names([*project["dependencies"], *extras["dev"], *extras["wandb"]]) <= pins.keys()
    # What the other two bring on top; where both files name a package, installing the second changes nothing.
    wanted = names([*extras["parity"], *extras["judge"]])
    assert wanted <= {*pins, *parity} and "torch" in wanted and parity["torch"] == {"2.13.0"}
    assert all(versions == pins[name] for name, versions in parity.items() if name in pins)
    assert not [name for name in parity if name.startswith(("nvidia", "cuda")) or name == "triton"]  # of GPUs alone


def test_type_checkers_see_the_annotations_of_an_installed_package():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert built.get("package-data") == {"*": ["py.typed"]}
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_what_make_runs_may_keep_bytecode():
    """Packages are installed without it: a container's usual setting would have each command compile all it imports."""
    rules = "include Makefile\ntold:; @echo [$${PYTHONDONTWRITEBYTECODE-unset}]\n"
    done = subprocess.run(
        ["make", "-s", "-f", "-", "told"],
        input=rules,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[unset]\n"


def pinned(file: str) -> dict[str, set[str]]:
    """The versions of each package in a file of pins, which may differ by platform."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9.]+)( ; .+)?", line)
        assert match, f"{file}: {line!r} is not name==version"
        found.setdefault(match[1].lower().replace("_", "-"), set()).add(match[2])
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() for requirement in requirements}
