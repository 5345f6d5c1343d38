"""How processes find together and what they tell each other; they are threads here."""

import signal
import socket
import struct
import threading
import time
from functools import partial

import numpy as np
import pytest
from started import ended, free_port, start

from curriculum.errors import InputError
from curriculum.train.processes import peers
from curriculum.train.processes.connections import frame, is_loopback
from curriculum.train.processes.launch import Launch
from curriculum.train.processes.peers import Peers


def meet(*launches, seconds=20.0):
    """What each of several processes, which are threads here, has of the others, or by what it ends."""
    met = {}

    def join(number, launch):
        try:
            met[number] = Peers(launch, seconds)
        except InputError as error:
            met[number] = str(error)

    threads = [threading.Thread(target=join, args=numbered) for numbered in enumerate(launches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [met[number] for number in range(len(launches))]


def all_met(num):
    """The processes of a run, which have met."""
    port = free_port()
    return meet(*(Launch("127.0.0.1", port, num, i) for i in range(num)))


def together(*calls):
    """What each call returns, all of them made at once."""
    found = {}
    threads = [threading.Thread(target=lambda i=i, c=c: found.update({i: c()})) for i, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[i] for i in range(len(calls))]


def stops(p, step, received=None):
    """(the signal, the step after which it stops) of a process that goes on from a step."""
    while (stopped_by := p.agreed_stop(received, step)) is None:
        step += 1
        time.sleep(0.01)
    return stopped_by, step


def test_processes_tell_each_other_what_they_have():
    peers = all_met(3)
    array = np.arange(6, dtype=np.float64).reshape(2, 3) / 7
    got = together(*(lambda p=p: p.from_first({"a": [array, 0.1, None]} if p.index == 0 else None) for p in peers))
    assert all(found["a"][1:] == [0.1, None] and np.array_equal(found["a"][0], array) for found in got)
    assert together(*(lambda p=p: p.gather(p.index * 10) for p in peers)) == [[0, 10, 20]] * 3
    # Asked to stop after different steps; process 2 got the signal. No one waits until it is known.
    assert [p.agreed_stop(None, step) for p, step in zip(peers, (7, 5, 6), strict=True)] == [None] * 3
    assert peers[2].agreed_stop(signal.SIGTERM, 7) is None

    stopped = together(*(lambda p=p, s=s: stops(p, s) for p, s in zip(peers, (8, 6, 8), strict=True)))
    assert len(set(stopped)) == 1 and stopped[0][0] == signal.SIGTERM and stopped[0][1] >= 8
    together(*(p.close for p in peers))


def test_a_signal_that_all_get_stops_them_at_one_step():
    """As SLURM sends it, each process being at another step; one that has promised a step waits there."""
    peers = all_met(3)
    assert [p._names for p in peers] == [peers[0]._names] * 3 and len(peers[0]._names) == 3
    assert [p.agreed_stop(None, step) for p, step in zip(peers, (2, 9, 4), strict=True)] == [None] * 3

    stopped = together(*(lambda p=p, s=s: stops(p, s, signal.SIGTERM) for p, s in zip(peers, (3, 10, 5), strict=True)))
    # The second looks at step 10, and at later ones as long as it has not heard of the others.
    assert len(set(stopped)) == 1 and stopped[0][0] == signal.SIGTERM and stopped[0][1] >= 10
    together(*(p.close for p in peers))


def test_a_step_that_was_promised_is_not_passed():
    peers = all_met(2)
    assert peers[1].agreed_stop(None, 6) is None and peers[1]._promise(signal.SIGTERM) == (0, 7)
    found = []
    waits = threading.Thread(target=lambda: found.append(peers[1].agreed_stop(None, 7)))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    peers[1]._stop_after((0, 8))
    waits.join(20)
    assert found == [None] and peers[1].agreed_stop(None, 8) == signal.SIGTERM
    together(*(p.close for p in peers))


def test_a_stop_that_is_asked_for_around_a_rollback_comes_at_the_first_step_after_it():
    """Process 0 has gone back from step 5 to 2; process 1, which has not looked since, promises step 6."""
    peers = all_met(2)
    assert [p.agreed_stop(None, 5) for p in peers] == [None] * 2 and peers[0].agreed_stop(None, 3) is None
    assert peers[0].agreed_stop(signal.SIGTERM, 4) is None  # asks
    stopped = together(lambda: peers[0].agreed_stop(None, 5), lambda: stops(peers[1], 3))
    assert stopped == [signal.SIGTERM, (signal.SIGTERM, 5)]
    assert peers[0]._last_look == (1, 5)
    peers[0].agreed_stop(None, 5)
    assert peers[0]._last_look == (2, 5)  # the step of the last look, reached once more
    # Saving finds that it must go back once more: the next step is after the one that was agreed on.
    assert [p.agreed_stop(None, 3) for p in peers] == [signal.SIGTERM] * 2
    together(*(p.close for p in peers))


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(2, 1)], "was started with --num-processes 2, process 0 with 3; give all the same number"),
        ([(3, 1), (3, 1)], "two processes were started with --process-id 1: "),
    ],
)
def test_processes_that_do_not_fit_are_refused_at_once(others, expected):
    port = free_port()
    began = time.monotonic()
    told = meet(Launch("127.0.0.1", port, 3, 0), *(Launch("127.0.0.1", port, n, i) for n, i in others))
    assert all(expected in message for message in told) and time.monotonic() - began < 10


STEP = """
import sys
from curriculum.errors import InputError
from curriculum.train.processes.launch import find_launch
from curriculum.train.processes.peers import Peers
try:
    peers = Peers(find_launch(), 20)
    print("together", peers.gather(peers.index))
    peers.close()
except InputError as error:
    print(error)
"""


def test_a_process_of_another_launch_is_sent_away_and_the_others_meet():
    """Two steps of a job of SLURM that were given one port: the second's process 1 comes to the first's process 0."""
    port = free_port()

    def task(step, index, of):
        slurm = {"JOB_ID": 8200, "STEP_ID": step, "STEP_NODELIST": "127.0.0.1", "STEP_NUM_TASKS": of, "PROCID": index}
        environ = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        return start(["-c", STEP], JAX_COORDINATOR_PORT=str(port), **environ)

    first, *strangers = task(0, 0, 2), task(1, 1, 2), task(1, 2, 3)
    told = [ended(stranger, 20)[1] for stranger in strangers]  # before all of the first step have come
    two = first, task(0, 1, 2)
    assert [ended(process, 20) for process in two] == [(0, "together [0, 1]\n")] * 2
    for index, said in zip((1, 2), told, strict=True):
        assert said.startswith(f"--coordinator 127.0.0.1:{port}: process 0 of SLURM's step 8200.0 listens there (")
        assert f"), and this is process {index} of SLURM's step 8200.1; give each launch a port of its own" in said


def test_one_that_was_given_its_number_meets_one_that_a_launcher_numbered():
    port = free_port()
    for by_whom in [("", "a step"), ("a step", "")]:
        peers = meet(*(Launch("127.0.0.1", port, 2, i, None, by) for i, by in enumerate(by_whom)))
        assert [p.index for p in peers] == [0, 1]
        together(*(p.close for p in peers))


def connected(port):
    """A connection to process 0, which may listen a little later."""
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


HELLO = {"index": 1, "count": 2, "name": "stranger", "launched_by": ""}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        frame(HELLO | {"index": [1]}),
        frame(HELLO | {"index": 7}),
        frame(HELLO | {"index": -1}),
        frame(HELLO | {"count": None}),
        frame({"index": 1}),
        struct.pack("!Q", 2) + b"[]",
        struct.pack("!Q", 2) + b"\xff{",
        frame({"__array__": 5, "dtype": "f4", "shape": [1]}),
        frame({"__array__": "", "dtype": "of nothing", "shape": [0]}),
    ],
)
def test_what_is_no_process_of_a_run_is_passed_over(said):
    port = free_port()
    first = threading.Thread(target=lambda: peers.extend(meet(Launch("127.0.0.1", port, 2, 0))))
    peers = []
    first.start()
    stranger = connected(port)
    stranger.sendall(said)
    stranger.close()
    peers += meet(Launch("127.0.0.1", port, 2, 1))
    first.join(20)
    assert sorted(p.index for p in peers) == [0, 1] and all(p._names[1] != "stranger" for p in peers)
    together(*(p.close for p in peers))


def test_a_process_that_is_started_again_while_others_are_awaited_takes_its_place():
    port, peers = free_port(), []
    first = threading.Thread(target=lambda: peers.extend(meet(Launch("127.0.0.1", port, 3, 0))))
    first.start()
    killed = connected(port)
    killed.sendall(frame(HELLO | {"count": 3, "name": "killed"}))
    time.sleep(0.5)
    killed.close()
    peers += meet(*(Launch("127.0.0.1", port, 3, i) for i in (1, 2)))
    first.join(20)
    assert sorted(p.index for p in peers) == [0, 1, 2] and all(p._names[1] != "killed" for p in peers)
    together(*(p.close for p in peers))


def test_one_that_waits_with_process_0_for_a_third_says_so(monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 0.1)
    port = free_port()
    first = threading.Thread(target=meet, args=[Launch("127.0.0.1", port, 3, 0)], kwargs={"seconds": 3})
    first.start()
    time.sleep(0.5)
    [told] = meet(Launch("127.0.0.1", port, 3, 1), seconds=1)
    assert ": process 0 is there, but not all 3 processes came within 1 s; start the others too" in told
    first.join()


def test_a_signal_reaches_process_0_while_it_is_waited_for():
    first, second = all_met(2)

    def works():
        until = time.monotonic() + 10
        while first.signal_elsewhere is None and time.monotonic() < until:
            time.sleep(0.05)
        return first.from_first(first.signal_elsewhere)

    waits = partial(second.from_first, received=lambda: signal.SIGTERM)
    assert together(works, waits) == [signal.SIGTERM] * 2
    assert together(partial(first.from_first, 3), waits) == [3, 3]
    together(first.close, second.close)


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [first] = meet(Launch("127.0.0.1", port, 2, 0))
    assert first.startswith(f"--coordinator 127.0.0.1:{port}: process 0 cannot listen there: Address already in use")


def test_a_process_that_never_comes_is_named(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_TELL_AFTER_SECONDS", 0.0)
    port = free_port()
    [first] = meet(Launch("127.0.0.1", port, 2, 0), seconds=0.3)
    assert capsys.readouterr().err == f"waiting at 127.0.0.1:{port} for 1 of 2 processes\n"
    assert first.startswith(
        f"--coordinator 127.0.0.1:{port}: waited 0.3 s for 2 processes, but these did not connect: 1"
    )
    [second] = meet(Launch("127.0.0.1", port, 2, 1), seconds=0.3)
    assert second.startswith(
        f"--coordinator 127.0.0.1:{port}: process 1 of 2 could not reach it for 0.3 s: Connection refused"
    )


def test_a_loopback_address_is_known():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.8.8.8", "::1"]))
    assert not any(map(is_loopback, ["localhost.example", "10.0.0.1", "1127.0.0.1", "::2", "fe80::1"]))
