"""How far a job is, on the console."""

import io

import pytest

from curriculum.data.progress import WINDOWS, ConsoleProgress, progress_text
from curriculum.disk.append import tell


class Terminal(io.StringIO):
    def isatty(self):
        return True


def play(stream, calls, passing=False):
    clock = [100.0]
    progress = ConsoleProgress("web", stream, lambda: clock[0], passing=passing)
    for at_seconds, done_bytes, total_bytes in calls:
        clock[0] = 100.0 + at_seconds
        progress(done_bytes, total_bytes)
    if passing:
        progress.clear()
    return stream.getvalue()


def test_progress_on_the_console(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    calls = [(1, 10e6, 100e6), (2.5, 25e6, 100e6), (2.6, 26e6, 100e6), (5, 50e6, 100e6), (10, 100e6, 100e6)]
    assert play(io.StringIO(), calls) == (
        "web: 25.0 of 100.0 MB (25%), 10.0 MB/s, ETA 8s\nweb: 100.0 of 100.0 MB (100%), 10.0 MB/s, 10s\n"
    )
    renewed = play(Terminal(), calls)
    assert renewed.count("\r\x1b[K") == 3 and renewed.count("\n") == 1 and renewed.endswith("10s\n")
    assert play(Terminal(), [(0.1, 1e6, 2e6), (1.5, 2e6, 2e6)]) == ""


def test_a_job_of_many_is_told_late_and_leaves_no_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    calls = [(5, 10e6, 100e6), (12, 48e6, 100e6), (14, 56e6, 100e6), (25, 100e6, 100e6)]
    first = "web: 48.0 of 100.0 MB (48%), 4.0 MB/s, ETA 13s"
    assert play(io.StringIO(), calls, passing=True) == f"{first}\n"
    shown = play(Terminal(), calls, passing=True).split("\r\x1b[K")
    assert shown == ["", first, "web: 56.0 of 100.0 MB (56%), 4.0 MB/s, ETA 11s", ""]
    assert play(Terminal(), [(5, 10e6, 100e6), (9, 100e6, 100e6)], passing=True) == ""


def test_progress_is_cut_to_the_terminal_so_that_it_can_be_overwritten(monkeypatch):
    calls = [(2.5, 25e6, 100e6), (5, 50e6, 100e6), (10, 100e6, 100e6)]
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    *under_way, last = play(Terminal(), calls).split("\r\x1b[K")
    assert under_way == ["", "web: 25.0 of 100.0 ", "web: 50.0 of 100.0 "]
    assert last == "web: 100.0 of 100.0 MB (100%), 10.0 MB/s, 10s\n"  # it stays
    monkeypatch.setenv("TERM", "dumb")
    assert play(Terminal(), calls) == play(io.StringIO(), calls) != ""


def test_progress_leaves_stdout_to_what_a_command_prints(capsys):
    now = iter((0.0, 2.0))
    ConsoleProgress("web", clock=lambda: next(now))(5_000_000, None)
    assert capsys.readouterr() == ("", "web: 5.0 MB, 2.5 MB/s\n")


def test_what_is_under_way_goes_on_where_progress_cannot_be_shown():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    assert play(Closed(), [(2.5, 25e6, 100e6), (10, 100e6, 100e6)]) == ""


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_under_way_goes_on_without_a_stderr(monkeypatch, closed):
    """A daemon has none; a program may close its own."""
    stream = io.StringIO() if closed else None
    monkeypatch.setattr("sys.stderr", stream)
    if closed:
        stream.close()
    clock = iter([0.0, 3.0])
    ConsoleProgress("encoding", clock=lambda: next(clock))(1, 2)
    tell("not to be seen")


def test_progress_text():
    assert progress_text(5_000_000, None, 2.0) == "5.0 MB, 2.5 MB/s"
    assert progress_text(2_000_000, 1_000_000, 2.0) == "2.0 of 1.0 MB (200%), 1.0 MB/s, 2s"
    assert progress_text(1_000_000, 7_201_000_000, 1.0) == "1.0 of 7,201.0 MB (0%), 1.0 MB/s, ETA 2h00m"
    assert progress_text(0, 10, 1.0) == "0.0 of 0.0 MB (0%), 0.0 MB/s"
    assert progress_text(0, 0, 0.0) == "0.0 of 0.0 MB (0%), 0.0 MB/s, 0s"
    assert progress_text(1500, 6000, 100.0, WINDOWS) == "1,500 of 6,000 windows (25%), 15.0 windows/s, ETA 5m00s"
