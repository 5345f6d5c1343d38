"""A signal asks for a stop; the second one ends the run at once, and of a command the process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import tiny_train, write_corpus

from curriculum.cli.exits import stopped_runs
from curriculum.train.signals import Stopped, StopSignals

WAIT = """
import time
from curriculum.train.signals import StopSignals, ending_the_process
with ending_the_process(), StopSignals() as stop:
    print("ready", flush=True)
    while stop.received is None:
        time.sleep(0.01)
    print("asked", stop.received, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_ends_the_process_at_once(second):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", WAIT], **pipes, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == f"asked {int(signal.SIGTERM)}\n"
    process.send_signal(second)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + second
    assert errors == (
        "SIGTERM: the run stops after this step and saves; a second one ends it at once\n"
        f"{second.name}: ended at once; what is not in a checkpoint is trained again\n"
    )


def test_the_second_signal_leaves_the_process_of_a_library_user(capfd):
    """A notebook's stop button, pressed twice: its kernel lives on, and has its handlers back."""
    heard = []
    before = [signal.signal(signal.SIGTERM, lambda number, _: heard.append(number)), signal.getsignal(signal.SIGINT)]
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM and not heard
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.received == signal.SIGINT
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before[1]
    finally:
        signal.signal(signal.SIGTERM, before[0])
    assert "ended at once" not in capfd.readouterr().err


def test_after_two_presses_of_a_notebooks_stop_button_the_run_goes_on_in_the_same_process(tmp_path, monkeypatch):
    after = StopSignals.after

    def pressed_twice(stop, step):
        for _ in range(2 if step == 5 else 0):
            signal.raise_signal(signal.SIGINT)
        return after(stop, step)

    place, run_dir = write_corpus(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StopSignals, "after", pressed_twice)
        tiny_train(place, run_dir)
    assert max(int(folder.name) for folder in (run_dir / "checkpoints").iterdir()) == 4
    assert tiny_train(place, run_dir, resume="latest")["total_steps"] == 12


def test_a_command_ends_at_a_second_signal(monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, stopped_runs("--resume latest", Path("run")), StopSignals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_under_nohup_a_terminal_that_is_closed_stops_nothing():
    command = ["sh", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, WAIT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == f"asked {int(signal.SIGTERM)}\n"
    process.kill()
    assert process.communicate(timeout=30)[1].startswith("SIGTERM: ")


def test_a_signal_that_a_program_around_python_handles_is_left_to_it(monkeypatch):
    """For such a handler Python tells None, which it does not take back."""
    own, of_python = {signal.SIGTERM}, signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number in own else of_python(number))
    replace, replaced = signal.signal, []

    def install(number, handler):
        replaced.append(number)
        before = replace(number, handler)
        return None if number in own else before

    monkeypatch.setattr(signal, "signal", install)
    with StopSignals():
        pass
    assert set(replaced) == {signal.SIGINT, signal.SIGHUP}


@pytest.mark.parametrize(
    ("not_saved", "words"),
    [
        ((), "stopped by SIGINT at step 9, which was saved"),
        (
            (6, "No space left on device"),
            "stopped by SIGINT at step 9, which could not be saved (No space left on device): the last good checkpoint "
            "is of step 6",
        ),
        ((None, "x"), "stopped by SIGINT at step 9, which could not be saved (x): there is no checkpoint yet"),
    ],
)
def test_a_stop_says_what_is_saved(not_saved, words):
    assert str(Stopped(signal.SIGINT, 9, *not_saved)) == words


AS_PROCESS_1 = """
import os, sys, time
from curriculum.cli import main
os.getpid = lambda: 1
def wait():
    print("ready", flush=True)
    time.sleep(60)
main.run_command = wait
main.main()
"""


@pytest.mark.parametrize(
    ("number", "under_nohup"), [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGHUP, True)]
)
def test_a_signal_ends_process_1_of_a_container_before_the_run_begins(number, under_nohup):
    """For which Linux ignores what would end any other process, so that Kubernetes would wait, and then kill it."""
    ignoring = ["nohup"] if under_nohup else []
    process = subprocess.Popen([*ignoring, sys.executable, "-c", AS_PROCESS_1], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    if under_nohup:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()
    process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if under_nohup else 128 + number)
