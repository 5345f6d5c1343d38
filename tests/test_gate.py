"""The external gate: what it is given, what it may answer, and that everything else is a veto in words."""

import json
import os
import shlex
import sys
import time

import pytest
from tiny_run import assert_same_run, tiny_data, tiny_train, write_corpus

from curriculum.find_checkpoint import checkpoint_steps
from curriculum.run import load_run
from curriculum.train.gate import GateVerdict, run_gate
from curriculum.train.signals import Stopped


def gate(tmp_path, code, timeout_seconds=30.0, arguments=""):
    """The verdict of a gate that is this Python code."""
    (tmp_path / "gate.py").write_text(code)
    command = f"{shlex.quote(sys.executable)} -S {shlex.quote(str(tmp_path / 'gate.py'))} {arguments}"
    return run_gate(command, tmp_path / "gold" / "40", timeout_seconds)


def test_it_gets_the_path_as_its_last_argument_and_no_shell(tmp_path, monkeypatch):
    code = (
        "import json, os, sys\nprint(json.dumps({'accept': False, 'reason': repr((sys.argv[1:], sys.stdin.read()))}))"
    )
    read_end, write_end = os.pipe()
    os.write(write_end, b"what somebody types")
    os.close(write_end)
    stdin = os.dup(0)
    os.dup2(read_end, 0)
    try:
        verdict = gate(tmp_path, code, arguments="--most '1 2' $HOME *")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(read_end)
    path = str(tmp_path / "gold/40")
    assert verdict == GateVerdict(None, repr((["--most", "1 2", "$HOME", "*", path], "")))
    monkeypatch.chdir(tmp_path)
    relative = run_gate(f"{shlex.quote(sys.executable)} gate.py", "gold/40", 30)
    assert relative.reason == repr(([path], ""))  # absolute, and the command ran in the working folder


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"accept": true}', GateVerdict(None, None)),
        ('\n {"accept": true, "score": 2, "more": [1]} \n', GateVerdict(2.0, None)),
        ('{"accept": true, "score": -0.5, "reason": "fine"}', GateVerdict(-0.5, None)),
        ('{"accept": true, "score": null, "reason": null}', GateVerdict(None, None)),
        ('{"accept": false, "reason": "too\\nrude", "score": 0.5}', GateVerdict(0.5, "too rude")),
        ('{"accept": false}', GateVerdict(None, "vetoed without a reason")),
        ("", GateVerdict(None, "expected a JSON object on stdout, got nothing: and this on stderr")),
        ("fine", GateVerdict(None, "expected a JSON object on stdout, got fine: and this on stderr")),
        ('log\n{"accept": true}', GateVerdict(None, 'expected a JSON object on stdout, got log {"accept": true}: and this on stderr')),
        ("[true]", GateVerdict(None, "expected a JSON object on stdout, got [true]")),
        ("{}", GateVerdict(None, 'expected "accept": true or false, got none')),
        ('{"accept": 1}', GateVerdict(None, 'expected "accept": true or false, got 1.0')),
        ('{"accept": true, "reason": 3}', GateVerdict(None, 'expected text as "reason", got 3.0')),
        ('{"accept": true, "score": "3"}', GateVerdict(None, 'expected a finite number as "score", got "3"')),
        ('{"accept": true, "score": true}', GateVerdict(None, 'expected a finite number as "score", got true')),
        ('{"accept": true, "score": NaN}', GateVerdict(None, 'expected a finite number as "score", got NaN')),
        ('{"accept": true, "score": 1' + 5000 * "0" + "}", GateVerdict(None, 'expected a finite number as "score", got Infinity')),
        ("[" * 200000, GateVerdict(None, "expected a JSON object on stdout, got ..." + "[" * 300 + ": and this on stderr")),
    ],
)  # fmt: skip
def test_its_answer(tmp_path, answer, verdict):
    assert gate(tmp_path, f"import sys\nprint({answer!r})\nprint('and this on stderr', file=sys.stderr)") == verdict


def test_a_failure_is_a_veto_with_the_end_of_stderr(tmp_path):
    accept = json.dumps({"accept": True})
    code = f"import sys\nprint({accept!r})\nprint('x' * 2000 + '\\nno\\tdisk', file=sys.stderr)\nsys.exit(3)"
    verdict = gate(tmp_path, code)
    assert verdict.reason.startswith("exit code 3: ...xxx")
    assert verdict.reason.endswith("x no disk") and len(verdict.reason) < 400
    assert gate(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)").reason == "ended by signal 15"
    assert gate(tmp_path, "import sys\nsys.exit(1)").reason == "exit code 1"
    assert gate(tmp_path, "import sys\nsys.stdout.buffer.write(b'\\xff')").reason.startswith("expected a JSON object")


def test_what_cannot_be_run_is_a_veto(tmp_path):
    verdict = run_gate(f"{shlex.quote(str(tmp_path / 'none here'))} x", tmp_path, 30)
    assert verdict.reason.startswith(f"{tmp_path / 'none here'} cannot be run: ")
    assert "No such file" in verdict.reason
    (tmp_path / "text").write_text("not a program")
    assert "Permission denied" in run_gate(str(tmp_path / "text"), tmp_path, 30).reason


def test_one_that_takes_too_long_is_killed_with_all_it_started(tmp_path):
    """Nor does what it started live on."""
    # Of the shell: an interpreter that starts may take longer than that on a busy machine.
    script = f"sleep 600 & echo $! > {shlex.quote(str(tmp_path / 'pid'))}; echo half way >&2; sleep 600"
    verdict = run_gate(f"sh -c {shlex.quote(script)}", tmp_path / "gold" / "40", 1.5)
    assert verdict == GateVerdict(None, "not done after 1.5 s: half way")
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_it_leaves_behind_is_not_waited_for(tmp_path):
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
open({str(tmp_path / "pid")!r}, 'w').write(str(child.pid))
print('{{"accept": true}}')
"""
    assert gate(tmp_path, code).reason is None  # which says, too, that it was not stopped after its 30 seconds
    assert gone(int((tmp_path / "pid").read_text()))


def test_one_that_may_not_be_killed_is_neither_an_error_nor_waited_for(tmp_path, monkeypatch):
    """As one that has become another user; here it ends by itself."""

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refused)
    assert gate(tmp_path, "print('{\"accept\": true}')").reason is None
    begun = time.monotonic()
    assert run_gate("sh -c 'sleep 5'", tmp_path, 0.2).reason.startswith("not done after 0.2 s")
    assert time.monotonic() - begun < 4


def test_a_gate_is_killed_soon_after_the_run_is_to_be_stopped(tmp_path):
    pid, begun = shlex.quote(str(tmp_path / "pid")), tmp_path / "begun"
    script = f"sleep 600 & echo $! > {pid}; touch {shlex.quote(str(begun))}; wait"
    assert run_gate(f"sh -c {shlex.quote(script)}", tmp_path / "gold" / "40", 600, stopped=begun.exists) is None
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a gate that accepts all, which `stop` makes send its run a signal and sleep, and a run that it saw."""
    place = write_corpus(tmp_path_factory.mktemp("gate"))
    (place / "gate").write_text(
        f"#!/bin/sh\ncase $1 in */$(cat {place}/stop)) kill -TERM $PPID; sleep 600;; esac\necho '{{\"accept\": true}}'\n"
    )
    (place / "gate").chmod(0o700)
    (place / "stop").write_text("none")
    tiny_train(place, place / "unbroken", evalsets=gated(place))
    return place


def gated(place):
    return tiny_data(place)["evalsets"] | {"gold": {"gate": str(place / "gate")}}


@pytest.mark.parametrize("step", [6, 9, 12])
def test_a_signal_ends_the_gate_and_the_run_asks_again_when_it_goes_on(place, tmp_path, step):
    """At a phase's end with a checkpoint that is planned, between two of them, and at the end of the run."""
    (place / "stop").write_text(str(step))
    run_dir = tmp_path / "run"
    for resume in (None, "latest"):  # stopped, and stopped again when it asks again
        with pytest.raises(Stopped, match=f"stopped by SIGTERM at step {step}, which was saved"):
            tiny_train(place, run_dir, resume=resume, evalsets=gated(place))
        assert checkpoint_steps(run_dir / "checkpoints")[-1] == step
        assert [e["step"] for e in load_run(run_dir).events if e["event"] == "gold_checkpoint"][-1] < step
    (place / "stop").write_text("none")
    tiny_train(place, run_dir, resume="latest", evalsets=gated(place))
    assert_same_run(run_dir, place / "unbroken")
    golds = [e["step"] for e in load_run(run_dir).events if e["event"] == "gold_checkpoint"]
    assert golds == [3, 6, 9, 12] and checkpoint_steps(run_dir / "gold")[-1] == 12
    gold = f"gold/{step}/ledger/metadata"
    if step == 12:
        histories = [json.loads((run / gold).read_text())["history"] for run in (run_dir, place / "unbroken")]
        assert histories[0] | {"started_at": 0} == histories[1] | {"started_at": 0}


def test_a_signal_that_ends_the_gate_before_the_first_update_leaves_nothing_to_save(place, tmp_path):
    """Of a run that begins from another, whose parameters are a candidate."""
    adapted = {"evalsets": gated(place), "adaptation": {"init_from": str(place / "unbroken")}}
    tiny_train(place, tmp_path / "undisturbed", **adapted)
    (place / "stop").write_text("0")
    with pytest.raises(Stopped, match="stopped by SIGTERM before the first update"):
        tiny_train(place, tmp_path / "run", **adapted)
    (place / "stop").write_text("none")
    tiny_train(place, tmp_path / "run", resume="latest", **adapted)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


def test_the_checkpoint_of_the_last_step_is_told_once_the_gate_has_answered(place, tmp_path):
    """Which no interval asks for: 5 updates, a checkpoint every 2."""
    phases = [{"name": "a", "until": "end", "mixture": {"web": 1.0}}]
    short = {"phases": phases, "train": {"steps": 5, "batch_size": 4, "seq_len": 32}, "evalsets": gated(place)}
    (place / "stop").write_text("5")
    with pytest.raises(Stopped, match="at step 5, which was saved"):
        tiny_train(place, tmp_path / "run", **short)
    (place / "stop").write_text("none")
    tiny_train(place, tmp_path / "run", resume="latest", **short)
    events = load_run(tmp_path / "run").events
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [2, 4, 5]
    assert [e["event"] for e in events[-2:]] == ["checkpoint", "training_complete"]


def gone(pid):
    """Whether a process ends: one that was killed is gone, or waits for whoever inherited it to notice."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
