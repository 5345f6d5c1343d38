"""A signal asks for a stop; the second one ends the process at once."""

import signal
import subprocess
import sys

import pytest

from curriculum.train.signals import Stopped

WAIT = """
import time
from curriculum.train.signals import StopSignals
with StopSignals() as stop:
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


def test_under_nohup_a_terminal_that_is_closed_stops_nothing():
    command = ["sh", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, WAIT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == f"asked {int(signal.SIGTERM)}\n"
    process.kill()
    assert process.communicate(timeout=30)[1].startswith("SIGTERM: ")


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
