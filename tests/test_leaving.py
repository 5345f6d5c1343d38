"""What two processes decide together, and how both end where one of them does."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import jaxlib
from started import ROOT, ended, free_port, start

from curriculum.errors import InputError
from curriculum.train.processes.together import (
    _exit_code,
    _in_a_line,
    count,
    first_then_all,
    from_first,
    is_first,
    joined,
)
from curriculum.train.setup import _agreed, _program


def test_a_single_process_decides_for_itself():
    with joined(None):
        assert count() == 1 and is_first()
        assert from_first(lambda: {1: (2,)}) == {1: (2,)} and first_then_all(lambda: 3) == 3


# At the head of a program that is one of two processes.
JOINED = """
import atexit, errno, json, os, sys, time
from pathlib import Path
from curriculum.errors import InputError
from curriculum.train.processes import peers, together
from curriculum.train.processes.launch import Launch

port, index = int(sys.argv[1]), int(sys.argv[2])
peers.GRACE_SECONDS, together._NEWS_SECONDS = 4.0, 0.2
together._peers = peers.Peers(Launch("127.0.0.1", port, 2, index), 30)
"""


def two(program, *arguments):
    """Both processes of a program that goes on from JOINED."""
    port = free_port()
    return [start(["-c", JOINED + program, port, i, *arguments]) for i in range(2)]


DECIDE = """
from curriculum.disk.lock import RunLock
from curriculum.train import taking_up

folder = Path(sys.argv[3])
taking_up._SEEN_SECONDS = 0.2
peers.GRACE_SECONDS, peers._OFF_SECONDS = 0.2, 60
told, made = {}, []

def attempt(name, function, *arguments):
    try:
        told[name] = function(*arguments)
    except (InputError, OSError) as error:
        told[name] = [type(error).__name__, str(error), getattr(error, "in_every_process", False)]

def wrong():
    raise InputError("a: wrong")

def full():
    raise OSError(errno.ENOSPC, "No space left on device", "x/y")

attempt("value", together.from_first, lambda: {"of": index})
attempt("wrong", together.from_first, wrong)
attempt("full", together.from_first, full)
attempt("made", together.first_then_all, lambda: made.append(time.time()) or index)
told["when"] = made
attempt("same", together.check_same, lambda: {"the text": "t"})
for name, place in ("shared", folder / "run"), ("apart", folder / str(index) / "run"):
    lock = RunLock(place)
    if index == 0:
        lock.take()
    attempt(name, taking_up.check_shared, lock)
attempt("differ", together.check_same, lambda: {"the config": f"c{index}", "the text": "t", **({} if index else {"the code": "x"})})
print(json.dumps(told), flush=True)
if index == 0:
    time.sleep(60)
together.leave(RuntimeError("has lost its way\\nand more"))
time.sleep(2)
(folder / "late").touch()
sys.exit(5)
"""


def test_what_two_processes_decide_together(tmp_path):
    first, second = two(DECIDE, tmp_path)
    code, first = ended(first, 60)
    assert (tmp_path / "late").exists()  # process 0 ended after it
    left, second = ended(second, 60)
    first, *last_line = first.splitlines()
    first, second = json.loads(first), json.loads(second)
    assert first["value"] == second["value"] == {"of": 0}
    assert first["wrong"] == ["InputError", "a: wrong", True] and second["wrong"] == ["InputError", "", True]
    assert first["full"] == second["full"] == ["OSError", "[Errno 28] No space left on device: 'x/y'", False]
    assert (first["made"], second["made"]) == (0, 1)
    assert (len(first["when"]), len(second["when"])) == (1, 1) and first["when"] < second["when"]
    assert first["same"] is second["same"] is None
    assert first["shared"] is second["shared"] is None
    kind, apart, in_every_process = first["apart"]
    assert (kind, in_every_process) == ("InputError", True) and second["apart"] == ["InputError", "", True]
    assert apart.startswith(f"{tmp_path}/1/run: on ") and "is not the folder that process 0 has the run in" in apart
    fix = "start all processes with the same command and the same installation, on the same files"
    told = f"process 1 has c1 as the config, process 0 c0; {fix}\nprocess 1 has nothing as the code, process 0 x; {fix}"
    assert first["differ"] == ["InputError", told, True] and second["differ"] == ["InputError", "", True]
    assert (code, left) == (1, 5) and len(last_line) == 1
    assert last_line[0].startswith("process 1 of 2 (") and (
        "ended: RuntimeError: has lost its way. Process 0 ends as well; continue from the newest checkpoint"
        in last_line[0]
    )


def test_another_installation_is_told(tmp_path, monkeypatch):
    """As with a venv on each machine: another jax in one of them, or other code."""
    here = _program(ROOT)
    with jax.enable_x64(True):
        assert {name for name, value in _program(ROOT).items() if value != here[name]} == {
            "jax's setting jax_enable_x64"
        }
    assert here["the version of jax"] == jax.__version__ and here["the version of jaxlib"] == jaxlib.__version__
    assert here["the version of Python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    corpus = SimpleNamespace(tokenizer=SimpleNamespace(fingerprint="t"), details={}, evalsets={})
    agreed = _agreed(corpus, SimpleNamespace(segments=[]), None)
    assert agreed.items() > here.items()

    for room in ("curriculum", "evalsets", "phases"):
        shutil.copytree(ROOT / room, tmp_path / room)
    assert _program(tmp_path) == here
    with open(tmp_path / "phases/schedule.py", "a") as code:
        code.write("# another\n")
    (tmp_path / "jax-0.4.1.dist-info").mkdir()
    (tmp_path / "jax-0.4.1.dist-info/METADATA").write_text("Name: jax\nVersion: 0.4.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    there = _program(tmp_path)
    assert [name for name in here if there.pop(name) != here[name]] == ["the version of jax", "the code of curriculum"]
    assert not there


LEAVES = """
from curriculum.cli import main
from curriculum.train.programs import Programs, StepShape

time.sleep(60 * index)
programs = Programs(lambda shape: time.sleep(300))
programs.ahead([StepShape(1, 1, 1)])
programs.close()

def command():
    together.leave(SystemExit(2))
    sys.exit(2)

main.run_command = command
main.main()
"""


def test_process_0_sees_the_others_off_while_something_is_compiled_too():
    """It leaves without the interpreter's end then, and jax's service would end before the other has said why."""
    first, second = two(LEAVES)
    try:
        assert first.wait(60) == 2
        second.wait(3)  # process 0 ended after it, which by itself gives the other one 4 seconds
    finally:
        first.kill()
        code, said = ended(second)
    assert code == 2 and "process 0 of 2" in said and "Process 1 ends as well" in said


HANGS = """
together._LEAVE_SECONDS = 0.5
time.sleep(60 * index)
together.leave(InputError("runs/a: No space left on device"))
time.sleep(60)
"""


def test_an_error_of_the_users_is_no_traceback_where_the_clean_up_hangs():
    first, second = two(HANGS)
    try:
        assert ended(first, 60) == (2, "error: runs/a: No space left on device\n")
    finally:
        second.kill()


BOTH_LEAVE = """
time.sleep(index)
together.leave(InputError(f"error {index}"))
if index:
    time.sleep(1.5)
    open(sys.argv[3], "x").close()
    os._exit(1)
atexit.register(together._exit_at_once, 2)
"""


def test_process_0_sees_off_one_that_tells_an_error_of_its_own_meanwhile(tmp_path):
    """At the interpreter's end, where Python 3.12 starts no thread."""
    first, second = two(BOTH_LEAVE, tmp_path / "late")
    try:
        assert ended(first, 60) == (2, "")
        assert (tmp_path / "late").exists()  # process 0 ended after it
        assert second.wait(60) == 1
    finally:
        second.kill()


def test_the_exit_code_of_a_process_that_ends_by_an_error():
    errors = [InputError("x"), KeyboardInterrupt(), SystemExit(143), SystemExit("x"), RuntimeError(), MemoryError()]
    assert [_exit_code(error) for error in errors] == [2, 130, 143, 1, 1, 2]


def test_the_others_are_told_an_error_in_a_line():
    assert _in_a_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert _in_a_line(ValueError("one\ntwo")) == "ValueError: one"
    assert len(_in_a_line(ValueError(999 * "x"))) == 300
