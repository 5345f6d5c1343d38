"""The walk-through from a pretrained model's folder to an adapted one: every block of its page runs, and it is true."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from curriculum.run import load_run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/adapting_a_pretrained_model.md"
BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.S | re.M)
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def run_block(language: str, text: str, folder: Path) -> str:
    """What a block prints: YAML is written to the file that its first line names, the others are run as they stand."""
    if language == "yaml":
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
        return ""
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
    program = folder / "bin/curriculum"  # of this tree and no other
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m curriculum "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """(folder, what each block printed by its text) once all that needs no transformers has run."""
    folder = tmp_path_factory.mktemp("walk")
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 8
    return folder, {text: run_block(language, text, folder) for language, text in blocks if "transformers" not in text}


@pytest.mark.slow
def test_the_walk_through_keeps_what_was_known_and_learns_the_domain(walked):
    folder, printed = walked
    run = load_run(folder / "runs/adapted")
    assert run.start["lineage"]["init_from"] == "pretrained"
    evals = {name: dict(run.evals(name)) for name in ("general", "domain")}
    before, after = ({name: evals[name][step] for name in evals} for step in (0, 120))
    # The pretrained model is no random one, and what it came with is what is measured at step 0.
    pretrained = load_run(folder / "runs/pretrained")
    assert before["general"] == pytest.approx(pretrained.evals()[-1][1], abs=1e-4) and before["general"] < 2.0
    assert after["domain"] < before["domain"] - 0.5 and after["general"] < before["general"] + 0.2
    # The page's table is of such a run: what so short a one makes of other text varies with the last digits, which
    # follow the number of cores. On one core 3.27 was seen for what is 3.60 on the page.
    said = re.findall(r"^\| (general|domain) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    assert [name for name, *_ in said] == ["general", "domain"]
    for name, *losses in said:
        assert [float(loss) for loss in losses] == pytest.approx([before[name], after[name]], abs=1), name
    inspected = next(text for block, text in printed.items() if "curriculum inspect" in block)
    assert "parameters from pretrained" in inspected and f"{before['domain']:.4f}" in inspected

    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (folder / "adapted" / name).is_file() and (folder / "pretrained" / name).is_file()
    card = (folder / "adapted/README.md").read_text()
    assert "parameters from pretrained" in card and "laws 0.8, stories 0.2" in card
    f32 = (folder / "adapted/model.safetensors").stat().st_size
    assert 0.2 < (folder / "adapted-gguf/model.gguf").stat().st_size / f32 < 0.5


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="torch and transformers are not installed: make parity")
def test_transformers_generates_from_what_the_walk_through_exports(walked):
    folder, _ = walked
    block = next(text for _, text in BLOCK.findall(PAGE.read_text()) if "transformers" in text)
    told = run_block("python", block, folder).strip()
    assert told.startswith("the party shall ")
    # Of the words of laws in the end, or those of the stories in between: that follows the last digits, as above.
    words = re.findall(r"\w+", " ".join(re.findall(r'"(.*?)"\.split', PAGE.read_text())))
    generated = re.findall(r"\w+", told)[:-1]  # the last may be cut off
    assert len(words) > 30 and len(generated) >= 8
    assert sum(word in words for word in generated) > 0.8 * len(generated), told


@pytest.mark.slow
def test_a_block_that_fails_is_found(tmp_path):
    with pytest.raises(AssertionError, match="no-such.yaml"):
        run_block("bash", "curriculum plan no-such.yaml\necho gone on", tmp_path)
    assert shutil.which("bash")
