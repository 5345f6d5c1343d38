"""The command as a person meets it: exit codes, messages, no traceback, nothing left behind."""

import errno
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from command_line import run

from curriculum.cli.importing import importing

CURRICULUM = str(Path(sys.executable).parent / "curriculum")


@pytest.fixture
def folder(tmp_path):
    text = "one two three four five six seven eight nine ten "
    for name in ("web", "law"):
        rows = [json.dumps({"text": f"{name} {i} {text * 3}"}) for i in range(120)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "a.txt").write_text("words of another kind " * 50)
    data = {
        "name": "small",
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 32},
        "sources": {"web": {"path": "web.jsonl", "held_out": "10%"}, "law": {"path": "law.jsonl"}},
        "phases": [
            {"name": "a", "until": "50%", "mixture": {"web": 1.0}},
            {"name": "b", "until": "end", "mixture": {"law": 1.0}},
        ],
        "evalsets": {"primary": {"held_out_of": "web"}, "every": 4},
        "train": {"steps": 8, "batch_size": 4, "seq_len": 32},
        "optim": {"schedule": "constant"},
        "checkpoint": {"every": 4},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def started(folder, *arguments):
    """As a process of its own."""
    done = subprocess.run([CURRICULUM, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_run_from_start_to_end_and_again(folder):
    done = started(folder, "train", "c.yaml", "--eval-dataset-dir", "extra")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("step 8/8 (100.0%) | ") and line.endswith("| 1.0k tokens") for line in lines)
    assert any(line.startswith("  val ") and "| phase: b | extra " in line for line in lines)
    assert any("a → b" in line for line in lines)
    assert any("train c.yaml --run-dir runs/small --resume latest" in line for line in lines)
    assert any(line.startswith("  deploy ") for line in lines) and any("--host 127.0.0.1" in line for line in lines)
    run_dir = folder / "runs/small"
    for name in ("config.yaml", "config.resolved.json", "model.json", "training_state.json", "tokenizer/tokenizer.json",
                 "events.jsonl", "metrics.jsonl", "evals/8.npz", "checkpoints/8", "tensorboard", "train.log"):  # fmt: skip
        assert (run_dir / name).exists(), name
    resolved = json.loads((run_dir / "config.resolved.json").read_text())
    assert resolved["evalsets"]["sets"]["extra"]["path"] == "extra"
    assert [p["end"] for p in resolved["derived"]["phases"]] == [4, 8]
    (span,) = resolved["derived"]["learning_rate"]
    assert (span["start"], span["end"], span["scale"]) == (0, 8, 1.0) and span["piece"]["last"] == 6e-4
    assert json.loads((run_dir / "training_state.json").read_text())["step"] == 8
    again = started(folder, "train", "c.yaml")
    assert again.returncode == 2 and "already holds a run" in again.stderr and "--resume latest" in again.stderr
    # What the command line added stays, without being given again.
    finished = run(folder, "train", "c.yaml", "--resume", "latest")
    assert finished.returncode == 0 and "runs/small is finished: 8 of 8 steps" in finished.stdout
    longer = run(
        folder, "train", "c.yaml", "--resume", "latest", "--set", "train.steps=12", "--set", "phases[0].until=4"
    )
    assert longer.returncode == 0, longer.stderr
    assert "| extra " in longer.stdout and "step 12/12" in longer.stdout


def test_from_another_folder_a_run_says_where_it_was_started(folder):
    """It is told where the text is looked for in vain, and only there."""
    assert run(folder, "train", "c.yaml", "--resume", "latest").returncode == 0
    (folder / "other").mkdir()
    run_dir, where = str(folder / "runs/small"), f"  the run {folder}/runs/small was started in {folder}: start this"
    branched = ("branch", run_dir, "--at", "4", "--run-dir", "new")
    going_on = (str(folder / "c.yaml"), "--run-dir", run_dir, "--resume", "latest")
    for arguments in (("eval", run_dir), branched, ("plan", *going_on), ("train", *going_on)):
        done = run(folder / "other", *arguments)
        assert done.returncode == 2 and "(paths are relative to the working folder)" in done.stderr
        assert done.stderr.splitlines()[-1] == f"{where} command there, if what is missing is there", arguments
    assert run(folder / "other", "inspect", run_dir).returncode == 0 and not any((folder / "other").iterdir())
    refused = run(folder / "other", "eval", run_dir, "--step", "3")
    assert refused.returncode == 2 and "was started in" not in refused.stderr
    (folder / "web.jsonl").unlink()
    for arguments in (("eval", run_dir), ("plan", *going_on)):
        assert "was started in" not in run(folder, *arguments).stderr


def test_a_resume_tells_of_a_run_that_begins_and_of_an_edit_that_a_remembered_option_outranks(folder):
    path = folder / "c.yaml"
    first = run(folder, "train", "c.yaml", "--resume", "latest", "--set", "train.steps=4", "--set", "checkpoint.keep=2")
    assert first.returncode == 0, first.stderr
    said = "runs/small: holds no run: nothing to resume; the run starts at step 0"
    assert first.stderr.splitlines()[0] == said
    path.write_text(path.read_text().replace("steps: 8", "steps: 12"))
    again = run(folder, "train", "c.yaml", "--resume", "latest")
    assert again.returncode == 0 and "is finished: 4 of 4 steps" in again.stdout
    line = next(i for i, words in enumerate(path.read_text().splitlines(), 1) if words == "  steps: 12")
    assert again.stderr == (
        f"c.yaml:{line}:3: train.steps: the file says 12, but --set train.steps=4 is used, which the run remembers; "
        "to use the file's value, give --set train.steps=12\n"
    )


def test_a_config_of_another_name_is_told(folder):
    assert run(folder, "train", "c.yaml", "--run-dir", "r").returncode == 0
    text = (folder / "c.yaml").read_text().replace("name: small", "name: large")
    (folder / "d.yaml").write_text(text)
    assert run(folder, "train", "d.yaml", "--run-dir", "r", "--resume", "4").stderr.splitlines()[0] == (
        "r: is the run small; d.yaml names it large"
    )
    again = run(folder, "train", "c.yaml", "--run-dir", "r", "--resume", "4", "--set", "name=other")
    assert again.stderr.splitlines()[0] == "r: is the run large; --set name=other names it other"
    (folder / "d.yaml").write_text(text.replace("name: a\n", "name: x\n").replace("name: b\n", "name: y\n"))
    refused = run(folder, "train", "d.yaml", "--run-dir", "r", "--resume", "4")
    assert refused.returncode == 2 and "+- name: x" in refused.stderr and "-- name: a" in refused.stderr


def test_a_source_that_only_the_command_line_defined_is_there_on_resume(folder):
    text = (folder / "c.yaml").read_text().replace("law: 1.0", "late: 1.0")
    (folder / "c.yaml").write_text(text)
    first = run(folder, "train", "c.yaml", "--dataset-dir", "late=law.jsonl", "--run-dir", "r")
    assert first.returncode == 0, first.stderr
    again = run(folder, "train", "c.yaml", "--run-dir", "r", "--resume", "latest")
    assert again.returncode == 0 and "r is finished" in again.stdout, again.stderr


def test_a_run_that_goes_on_has_its_own_options_whatever_gave_its_name(folder):
    """Not those of the run whose name the file gives without the option."""
    text = (folder / "c.yaml").read_text().replace("name: small", "name: ${variables.tag}\nvariables: {tag: base}")
    (folder / "c.yaml").write_text(text.replace("steps: 8", "steps: 4"))
    first = run(folder, "train", "c.yaml", "--set", "variables.tag=exp", "--set", "optim.weight_decay=0.5")
    resolved = json.loads((folder / "runs/exp/config.resolved.json").read_text())
    (folder / "runs/base").mkdir()
    (folder / "runs/base/config.resolved.json").write_text(
        json.dumps(resolved | {"command_line": ["--set optim.lr=2e-3"]})
    )
    longer = ["--set", "train.steps=6", "--set", "phases[0].until=2"]
    again = run(folder, "train", "c.yaml", "--set", "variables.tag=exp", "--resume", "latest", *longer)
    assert first.returncode == again.returncode == 0 and "step 6/6" in again.stdout, first.stderr + again.stderr
    resolved = json.loads((folder / "runs/exp/config.resolved.json").read_text())
    options = ("optim.weight_decay=0.5", "variables.tag=exp", "train.steps=6", "phases.a.until=2")
    assert resolved["command_line"] == [f"--set {option}" for option in options]
    assert (resolved["optim"]["lr"], resolved["optim"]["weight_decay"]) == (6e-4, 0.5)


def test_a_run_that_goes_on_stays_in_the_folder_that_was_found(folder):
    """Though the options that it remembers give it another name."""
    first = run(folder, "train", "c.yaml", "--set", "name=other", "--run-dir", "runs/small")
    again = run(folder, "train", "c.yaml", "--resume", "latest")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "runs/small is finished" in again.stdout and not (folder / "runs/other").exists()


def test_interrupt_before_training_exits_with_130(folder):
    import signal
    import time

    process = subprocess.Popen([CURRICULUM, "train", "c.yaml"], cwd=folder, stderr=subprocess.PIPE, text=True)
    while not (folder / ".curriculum").exists():  # preparing has begun
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in errors, errors


@pytest.mark.parametrize(("imports", "told"), [("", "shut down\n"), ("import jax", "")])
def test_an_interrupted_command_leaves_before_the_interpreter_takes_down_what_xla_computes(imports, told):
    """A shutdown amid a computation ends in a segmentation fault, now and then."""
    script = (
        f"import atexit; import curriculum.cli.main as main; {imports}\n"
        "def interrupted():\n"
        "    try: raise KeyboardInterrupt\n"
        "    except KeyboardInterrupt: raise SystemExit(130)\n"
        "atexit.register(print, 'shut down'); main.run_command = interrupted; main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, told, "")


def test_a_file_that_ends_early_is_not_told_as_an_interruption(tmp_path):
    """As Python's own bytecode where a full disk cut it short."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    command = [sys.executable, "-m", "curriculum", "inspect", str(tmp_path / "nowhere")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (written,) = tmp_path.rglob("curriculum/views/inspection.*.pyc")
    written.write_bytes(written.read_bytes()[:1024])
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "EOFError: marshal data too short" in done.stderr
    assert "interrupted" not in done.stderr and "Abort" not in done.stderr


def test_a_dry_run_of_answers_that_no_row_holds(folder):
    """A prompt longer than all the text of a batch: its first update has nothing to learn from."""
    rows = [{"prompt": f"{i} " + "why " * 2000, "completion": "so"} for i in range(30)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["sources.web={path: talks.jsonl, format: completion}", "evalsets.primary={path: extra}"]
    done = run(folder, "train", "c.yaml", "--dry-run", *(f"--set={option}" for option in given))
    assert done.returncode == 0, done.stderr
    assert "no target scored | first eval" in done.stdout


def test_dry_run_leaves_no_run_behind(folder):
    done = run(folder, "train", "c.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"first step .* \| first eval [\d.]+ s, val [\d.]+", done.stdout)
    assert "no run was written" in done.stdout
    assert re.search(
        r"\n  updates of 1 x \d+ rows of \d+ tokens compiled in \d+\.\d\d s; the compiler counts \d+\.\d kB of a ",
        done.stdout,
    )
    assert not (folder / "runs").exists()
    done = run(folder, "train", "c.yaml", "--dry-run", "--set", "optim.schedule=wsd", "--set", "optim.decay_steps=0")
    assert "  warning    schedule wsd with decay_steps 0 never decays" in done.stdout


def test_prepare_then_plan_knows_the_epochs(folder):
    assert "?" in run(folder, "plan", "c.yaml").stdout
    done = run(folder, "prepare", "c.yaml")
    assert done.returncode == 0 and "source web: 107 documents" in done.stdout and "eval set val: 13" in done.stdout
    assert "?" not in run(folder, "plan", "c.yaml").stdout


def test_prepare_prints_json(folder):
    copies = "evalsets.sets.copies={path: copies.jsonl}"
    (folder / "copies.jsonl").write_text('{"text": "one and the same"}\n' * 3)
    done = run(folder, "prepare", "c.yaml", "--set", copies, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and list(told) == ["tokenizer", "sources", "evalsets", "warnings"]
    assert told["tokenizer"]["kind"] == "byte" and told["tokenizer"]["vocab_size"] == 257
    assert told["sources"]["web"]["documents"] == 107 and told["evalsets"]["primary"]["documents"] == 13
    assert told["evalsets"]["copies"]["bytes"] == 48 and len(told["evalsets"]["copies"]["content_hash"]) == 32
    in_words = run(folder, "prepare", "c.yaml", "--set", copies).stdout.splitlines()
    assert [f"warning: {line}" for line in told["warnings"]] == in_words[-2:]
    done = run(folder, "prepare", "--text", "copies.jsonl", "--tokenizer", "byte", "--output", "tokens", "--json")
    sizes = {"documents": 3, "tokens": 51, "empty_documents": 0}
    assert json.loads(done.stdout) == {"output": "tokens", "dtype": "u16", **sizes, "warnings": []}


def test_a_source_that_is_mostly_held_out_is_told(folder):
    half, most = ("--set=sources.web.held_out=" + share for share in ("45%", "0.9"))
    for command in ("prepare", "plan"):
        assert "kept out of training" not in run(folder, command, "c.yaml", half).stdout
    done = run(folder, "prepare", "c.yaml", most)
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    counts = re.search(r"source web: .*?([\d,]+) tokens, ([\d,]+) tokens kept out", done.stdout).groups()
    read, kept_out = (int(count.replace(",", "")) for count in counts)
    assert warning == (
        f"warning: web: {kept_out:,} of its {read + kept_out:,} tokens ({kept_out / (read + kept_out):.0%}) are kept "
        "out of training, as held_out asks for 0.9 of it; if training is to read most of it, lower held_out"
    )
    assert warning in run(folder, "plan", "c.yaml", most).stdout.splitlines()


def test_prepare_tells_the_share_of_scored_tokens(folder):
    # As bytes "U", "A" + an answer of 2, ";", end-of-text: 4 of 6 are scored.
    rows = [
        {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": f"{i:02}"}]} for i in range(60)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = "chat={user: '{content}', assistant: 'A{content};'}"
    talks = "sources.talks={path: talks.jsonl, format: messages, held_out: 10%}"
    done = run(folder, "prepare", "c.yaml", "--set", talks, "--set", chat)
    assert done.returncode == 0, done.stderr
    assert "source talks: 54 documents, 324 tokens, 66.67% scored, 36 tokens kept out" in done.stdout
    assert "source web: 107 documents" in done.stdout and done.stdout.count("scored") == 1


def test_prepare_tells_of_an_eval_set_that_tells_too_little(folder):
    (folder / "copies.jsonl").write_text('{"text": "one and the same"}\n' * 3)
    done = run(folder, "prepare", "c.yaml", "--set", "evalsets.sets.copies={path: copies.jsonl}")
    assert "warning: eval set copies has 3 documents, only 1 of them distinct: copies count as one" in done.stdout
    assert "warning: eval set copies is one document of " in done.stdout


def test_prepare_tells_what_was_empty_or_may_be_rows(folder):
    def add_empty(name, count):
        with open(folder / name, "a") as stream:
            stream.write('\n{"text": ""}' * count)

    add_empty("web.jsonl", 13)
    add_empty("law.jsonl", 14)
    (folder / "talk.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["word " * 40, "", "", "a"])
    )
    talk = "evalsets.sets.talk={path: talk.jsonl}"
    done = run(folder, "prepare", "c.yaml", "--set", talk)
    assert done.returncode == 0, done.stderr
    assert re.search(r"source web: 107 documents, \d+,\d+ tokens, 13 empty documents left out, ", done.stdout)
    assert "eval set val: 13 documents" in done.stdout and done.stdout.count("left out") == 2
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    remedy = "is the text in another key or column? name it with text_key"
    # 13 of 133 are fewer than a tenth.
    assert warnings == [
        f"warning: source law: 14 of 134 documents are empty (10%); {remedy}",
        f"warning: eval set talk: 2 of 4 documents are empty (50%); {remedy}",
    ]
    planned = run(folder, "plan", "c.yaml", "--set", talk).stdout.splitlines()
    assert [line for line in planned if "empty" in line] == warnings
    texts = ("--text", "law.jsonl", "--tokenizer", "byte", "--output", "tokens")
    said, warning = run(folder, "prepare", *texts).stdout.splitlines()
    assert said.endswith(" tokens of u16, 14 empty documents left out") and said.startswith("tokens: 120 documents, ")
    assert warning == f"warning: tokens: 14 of 134 documents are empty (10%); {remedy}"
    (folder / "array.json").write_text('[{"text": "a row"}]')
    alone = ("--text", "array.json", "--tokenizer", "byte", "--output", "one")
    assert "one: 1 document, 20 tokens of u16" in run(folder, "prepare", *alone).stdout
    texts = ("--text", "law.jsonl", "--text", "array.json", "--tokenizer", "byte", "--output", "both")
    *_, warning = run(folder, "prepare", *texts).stdout.splitlines()
    assert warning.startswith("warning: array.json: each .json file is read as one document of plain text; if it")
    assert "left out" in run(folder, "prepare", "c.yaml", "--set", talk).stdout  # also where nothing is left to do


def test_prepare_a_folder_and_train_from_it(folder):
    done = run(folder, "prepare", "--text", "web.jsonl", "--tokenizer", "byte", "--output", "tokens")
    assert done.returncode == 0 and "tokens: 120 documents" in done.stdout
    planned = run(
        folder, "train", "c.yaml", "--dataset-dir", "web=tokens", "--set", "sources.web.held_out=10%", "--dry-run"
    )
    assert planned.returncode == 0, planned.stderr


def test_prepare_a_folder_of_conversations(folder):
    rows = [
        {"turns": [{"role": "user", "content": "U"}, {"role": "assistant", "content": f"{i:02}"}]} for i in range(9)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (
        "prepare",
        "--text",
        "talks.jsonl",
        "--tokenizer",
        "byte",
        "--output",
        "tokens",
        "--format",
        "messages",
    )
    done = run(folder, *arguments)
    assert done.returncode == 2 and "did you mean" not in done.stderr and "text_key:" in done.stderr
    done = run(folder, *arguments, "--text-key", "turns")
    # ChatML as bytes: 17 + 1 + 11 for the user, 22 before the answer; of it 2 + 11 and end-of-text are scored.
    assert done.returncode == 0, done.stderr
    assert f"tokens: 9 documents, {9 * 65} tokens of u16, {14 / 65:.2%} scored" in done.stdout
    source = "sources.law={path: tokens, format: messages}"
    assert run(folder, "prepare", "c.yaml", "--set", source).returncode == 0
    other = run(folder, "prepare", "c.yaml", "--set", source, "--set", "chat.user='Q{content}'")
    assert other.returncode == 2 and "chat.user is 'Q{content}'" in other.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train", "c.yaml", "--set", "phases[0].until=90"], "after the run's end at step 8"),
        (["prepare", "c.yaml", "--format", "messages"], "--format and --text-key go with --text"),
        (["prepare", "--text", "web.jsonl", "--set", "a=1"], "go with CONFIG"),
        (["train", "c.yaml", "--set", "sources.law.max_epochs=0.01"], "step 5 (phase b) would read more than 0.01 epochs"),
        (["plan", "c.yaml", "--set", "phases[0].until=90"], "phases[0].until: ends at step 90, after the run's end at step 8"),
    ],
)  # fmt: skip
def test_wrong_input_exits_with_2_and_creates_no_run(folder, arguments, words):
    done = run(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr, done.stderr
    assert not (folder / "runs").exists()
    if "until" in words or "phases[0].until=90" in arguments:
        assert not (folder / ".curriculum").exists(), "the schedule is checked before anything is prepared"


def test_bad_source_text_is_named_and_nothing_half_written_stays(folder):
    (folder / "law.jsonl").write_text('{"text": "fine"}\n{"txet": "not"}\n')
    done = run(folder, "train", "c.yaml")
    assert done.returncode == 2 and "law.jsonl:2" in done.stderr and "did you mean text_key: txet?" in done.stderr
    assert not (folder / "runs").exists()
    assert not [p for p in (folder / ".curriculum").rglob("*") if "law" in p.name and p.is_dir()]


@pytest.mark.skipif(not Path("/proc/self/task").exists() or os.cpu_count() < 2, reason="needs /proc and two cores")
@pytest.mark.parametrize("given, threads", [({}, 1), ({"OPENBLAS_NUM_THREADS": "2"}, 2)])
def test_a_command_has_no_threads_for_products_unless_they_are_asked_for(given, threads):
    """OpenBLAS starts one per core as numpy is imported, and each spins for a while."""
    script = (
        "import os, sys; import curriculum.cli.main as main; sys.argv = ['curriculum', '--version']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "assert 'numpy' not in sys.modules\n"
        "import numpy; print(len(os.listdir('/proc/self/task')))\n"
    )
    set_by_tests = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in set_by_tests}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment | given)
    assert done.returncode == 0 and done.stdout.split()[-1] == str(threads), done.stderr


def test_help_tells_the_commands():
    done = subprocess.run([CURRICULUM, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(name in done.stdout for name in ("train", "plan", "prepare", "export"))
    done = subprocess.run([CURRICULUM, "train", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--resume latest|gold|STEP" in done.stdout


def test_an_interrupt_that_cannot_be_raised_is_not_lost():
    """Python drops what is raised in a callback of the garbage collector, of which jax has one."""
    code = """
import errno
import gc
from curriculum.cli import main
def collected(phase, about):
    raise KeyboardInterrupt
def cli(standalone_mode):
    gc.callbacks.append(collected)
    gc.collect()
    print("went on")
main.cli = cli
main.main()
"""
    for command, told in (("train", "; continue a run that had begun with --resume latest"), ("eval", "")):
        done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", f"interrupted{told}\n")


def test_an_interrupted_import_ends_the_process_whatever_catches_what_it_raises():
    code = """
import os, signal
from curriculum.cli.importing import importing
before = signal.getsignal(signal.SIGINT)
with importing():
    pass
assert signal.getsignal(signal.SIGINT) is before
try:
    with importing():
        os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_what_is_imported_is_not_looked_through_for_garbage():
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("Unable to allocate 1.82 TiB for an array"), "Unable to allocate 1.82 TiB"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9"), "to allocate 9"),
        (jax.errors.JaxRuntimeError("INTERNAL: Error dispatching: Out of memory allocating 60 bytes."), "60 bytes"),
    ],
)
def test_a_model_beyond_the_memory_is_told_without_a_traceback(folder, monkeypatch, error, told):
    def too_much(*_, **__):
        raise error

    monkeypatch.setattr("curriculum.train.dry_run.build", too_much)
    done = run(folder, "train", "c.yaml", "--dry-run")
    assert done.returncode == 2 and done.stderr.startswith("error: out of memory: ") and told in done.stderr
    assert "a higher train.grad_accum, model.remat" in done.stderr


@pytest.mark.parametrize("message", ["INTERNAL: it broke", "RESOURCE_EXHAUSTED: too many files, it broke"])
def test_another_error_of_a_device_is_raised(folder, monkeypatch, message):
    def failed(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr("curriculum.train.dry_run.build", failed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
        run(folder, "train", "c.yaml", "--dry-run")


@pytest.mark.parametrize("streams", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_obstacle(folder, streams):
    """As a daemon may start a program: what is opened must not get a stream's number, or be asked what it is."""
    store = folder / f"store{len(streams)}"
    command = f'"{CURRICULUM}" prepare c.yaml --store-dir "{store}" {streams}'
    done = subprocess.run(["sh", "-c", command], cwd=folder, timeout=600, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert [*store.rglob("*.json")]


def test_an_output_that_the_disk_does_not_take_exits_with_2(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [CURRICULUM, "plan", "c.yaml"], cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True
        )
    told = "cannot write: No space left on device; free disk space, or write to another place"
    assert (done.returncode, done.stderr) == (2, f"error: {told}\n")


def test_a_folder_that_may_not_be_entered_exits_with_2(folder, monkeypatch):
    def locked(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", locked)  # root may enter any
    done = run(folder, "plan", "c.yaml", "--init-from", ".")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.endswith(": Permission denied; grant the permission, or name another path\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["JAX_NUM_CPU_DEVICES", "JAX_ENABLE_X64"])
def test_an_environment_variable_that_jax_cannot_read_exits_with_2(folder, variable):
    command, environment = [CURRICULUM, "train", "c.yaml", "--dry-run"], {**os.environ, variable: "x"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"error: {variable}: jax cannot start: " in done.stderr and "unset this environment variable" in done.stderr
