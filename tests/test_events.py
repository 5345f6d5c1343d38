"""The record: what a line says, and that cutting it back loses nothing whenever the process dies."""

import json
import math
import re
import subprocess
import sys
import time
import tracemalloc
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from curriculum.errors import InputError
from curriculum.record.events import (
    EVENTS,
    METRICS,
    STAMPS,
    Record,
    check_offsets,
    check_views,
    cut_record,
    eval_sets,
    last_row,
    number,
    read_events,
    read_metrics,
)
from evalsets.summary import Recorded

FROM_THE_START = {EVENTS: 0, METRICS: 0}


class Seen:
    """A view that keeps what it is handed."""

    def __init__(self):
        self.events, self.rows, self.closed = [], [], False

    def event(self, event):
        self.events.append(event)

    def row(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


def tokens_at(step):
    return 100 * step


def test_a_view_may_have_its_methods_in_any_way():
    check_views([Seen(), Mock()])
    with pytest.raises(InputError, match="expected a list of objects with the methods event, row and close"):
        check_views([Seen(), Mock(spec=["event", "close"])])


def strict(line):
    """JSON without the literals NaN and Infinity, which Python's reader would take."""

    def refuse(literal):
        raise AssertionError(f"literal {literal} in {line}")

    return json.loads(line, parse_constant=refuse)


def test_event_line_holds_its_stamp_and_its_fields(tmp_path):
    before, started = datetime.now().astimezone().replace(microsecond=0), time.monotonic()
    record = Record(tmp_path, tokens_at)
    returned = record.event("eval", 7, val_loss=4.123456789, phase="foundation", lr=1.2345678901e-05)
    line = (tmp_path / "events.jsonl").read_text()  # before close: every line is flushed as it is written
    event = strict(line)
    assert line.endswith("\n") and event == returned
    timestamp, elapsed_s = event.pop("timestamp"), event.pop("elapsed_s")
    assert event == {
        "event": "eval",
        "step": 7,
        "tokens_processed": 700,
        "val_loss": 4.123457,
        "phase": "foundation",
        "lr": 1.2345678901e-05,
    }
    assert before <= datetime.fromisoformat(timestamp) <= datetime.now().astimezone()
    assert len(timestamp) == len("2026-01-01T00:00:00+00:00")
    assert 0 <= elapsed_s <= time.monotonic() - started + 0.001 and elapsed_s == round(elapsed_s, 3)
    record.close()


def test_row_is_written_plainly_rounded_and_without_literals_that_json_lacks(tmp_path):
    with np.errstate(over="ignore"):
        overflow = np.float32(1e30) * np.float32(1e30)
    record = Record(tmp_path, tokens_at)
    row = record.row(
        {
            "step": np.int64(10),
            "loss": np.float32(1.25),
            "loss_web": 2.00000049,
            "loss_law": None,
            "loss_code": math.nan,
            "grad_norm": 1.23456789e-7,
            "lr": 3.00000001e-7,
            "losses": [overflow, -math.inf, 0.123456789],
            "mixture": {"web": 1 / 3, "law": np.float32(0.5), "code": math.nan},
            "num_B": np.array([1, 2]),
            "packing_mode": "stream",
        }
    )
    record.close()
    expected = {
        "step": 10,
        "loss": 1.25,
        "loss_web": 2.0,
        "loss_law": None,
        "loss_code": "NaN",
        "grad_norm": 1.23456789e-7,
        "lr": 3.00000001e-7,
        "losses": ["Infinity", "-Infinity", 0.123456789],
        "mixture": {"web": 1 / 3, "law": 0.5, "code": "NaN"},
        "num_B": [1, 2],
        "packing_mode": "stream",
    }
    assert row == expected
    assert strict((tmp_path / "metrics.jsonl").read_text()) == expected
    assert read_metrics(tmp_path) == [expected]


def test_number_reads_back_what_a_line_may_hold():
    assert [number(value) for value in (3, 2.5, "Infinity", "-Infinity")] == [3.0, 2.5, math.inf, -math.inf]
    assert math.isnan(number("NaN"))
    assert [number(value) for value in (None, True, "stream", {"web": 1.0}, [1.0])] == [None] * 5


def test_eval_sets_are_those_with_both_measures():
    event = {
        "event": "eval",
        "val_loss": 4.0,
        "val_bpb": 1.5,
        "eval_general": 5.0,
        "eval_general_bpb": None,
        "eval_general_sem": 0.1,
        "eval_duration_s": 0.5,
    }
    assert eval_sets(event) == {
        "val": Recorded(loss=4.0, bpb=1.5, sem=None),
        "general": Recorded(loss=5.0, bpb=None, sem=0.1),
    }
    assert eval_sets({"eval_new": 3.0, "eval_new_bpb": 1.0}) == {"new": Recorded(loss=3.0, bpb=1.0, sem=None)}


def test_views_get_the_lines_as_written_and_are_closed(tmp_path):
    first, second = Seen(), Seen()
    record = Record(tmp_path, tokens_at, views=(first, second))
    record.event("training_start", 0, plan={"total_steps": 2})
    record.row({"step": 1, "loss": math.inf})
    record.close()
    for view in (first, second):
        assert view.events == read_events(tmp_path) and [event["step"] for event in view.events] == [0]
        assert view.rows == read_metrics(tmp_path) == [{"step": 1, "loss": "Infinity"}]
        assert view.closed


def test_the_record_of_the_other_processes_returns_what_it_is_given_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Record(None, lambda step: 10 * step)
    event = record.event("eval", 3, val_loss=2.5)
    assert (event["event"], event["tokens_processed"], event["val_loss"]) == ("eval", 30, 2.5)
    assert record.row({"step": 3, "loss": 1.5}) == {"step": 3, "loss": 1.5}
    record.cut_back({"events.jsonl": 10**6, "metrics.jsonl": 10**6})  # of files that process 0 has
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_clock_goes_on_over_a_resume(tmp_path):
    started = time.monotonic()
    record = Record(tmp_path, tokens_at, elapsed_before_s=3600.0)
    time.sleep(0.02)
    told = [record.event("eval", 1)["elapsed_s"], record.elapsed_s]
    assert 3600.02 <= told[0] and 3600.02 <= told[1]
    assert max(told) <= 3600.001 + time.monotonic() - started  # rounded to milliseconds
    record.close()


def written_run(run_dir):
    """Events at steps 0, 5, 9 and rows 1..9; the offsets are those after step 5."""
    record = Record(run_dir, tokens_at)
    record.event("training_start", 0)
    for step in range(1, 6):
        record.row({"step": step, "loss": 1.0})
    record.event("eval", 5)
    offsets = record.offsets()
    for step in range(6, 10):
        record.row({"step": step, "loss": 2.0})
    record.event("eval", 9)
    record.close()
    return offsets


def test_resume_cuts_back_to_the_offsets_and_keeps_what_it_cut(tmp_path):
    offsets = written_run(tmp_path)
    sizes = {name: (tmp_path / name).stat().st_size for name in offsets}
    assert all(0 < offsets[name] < sizes[name] for name in ("events.jsonl", "metrics.jsonl"))
    kept = {name: (tmp_path / name).read_bytes()[:offset] for name, offset in offsets.items()}
    last_eval = read_events(tmp_path)[-1]
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 10, "lo')

    cut_record(tmp_path, offsets)
    record = Record(tmp_path, tokens_at)
    assert {name: (tmp_path / name).read_bytes() for name in offsets} == kept
    assert record.offsets() == offsets
    entries = [strict(line) for line in (tmp_path / "superseded.jsonl").read_text().splitlines()]
    assert entries == [
        {"file": "events.jsonl", "line": last_eval},
        *({"file": "metrics.jsonl", "line": {"step": step, "loss": 2.0}} for step in range(6, 10)),
        {"file": "metrics.jsonl", "line": '{"step": 10, "lo'},
    ]

    record.row({"step": 6, "loss": 2.5})
    record.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    cut_record(tmp_path, offsets)
    again = [strict(line) for line in (tmp_path / "superseded.jsonl").read_text().splitlines()]
    assert again == [*entries, {"file": "metrics.jsonl", "line": {"step": 6, "loss": 2.5}}]


def test_resume_with_nothing_to_cut_writes_nothing(tmp_path):
    written_run(tmp_path)
    offsets = {name: (tmp_path / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl")}
    cut_record(tmp_path, offsets)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]
    assert {name: (tmp_path / name).stat().st_size for name in offsets} == offsets


def test_of_a_long_record_only_what_is_cut_is_read(tmp_path):
    offsets = written_run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    rows = metrics.read_bytes()
    with open(metrics, "wb") as file:
        file.seek(50_000_000)
        file.write(rows)
    tracemalloc.start()
    try:
        offsets["metrics.jsonl"] += 50_000_000
        cut_record(tmp_path, offsets)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert metrics.stat().st_size == offsets["metrics.jsonl"] < 50_000_000 + len(rows)
    assert peak_bytes < 1e6


@pytest.mark.parametrize("wrong", ["beyond", "inside a line"])
def test_offsets_that_do_not_fit_are_refused_and_change_nothing(tmp_path, wrong):
    offsets = written_run(tmp_path)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    offset = size + 1 if wrong == "beyond" else offsets["metrics.jsonl"] - 3
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError) as error:
        cut_record(tmp_path, {**offsets, "metrics.jsonl": offset})
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path / 'metrics.jsonl'}: got {size} bytes, expected a line to end at byte {offset}"
    )
    assert "restore the file" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before and len(before) == 2


@pytest.mark.parametrize("name, line", [(EVENTS, 1), (EVENTS, 2), (METRICS, 4)])
def test_a_broken_line_is_found_only_where_a_checkpoint_keeps_it(tmp_path, capsys, name, line):
    """Overwritten in place: the sizes say nothing of it. An event is refused; of a row training needs nothing."""
    offsets = written_run(tmp_path)
    check_offsets(tmp_path, offsets)
    path = tmp_path / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], b"#" * (len(lines[-1]) - 1) + b"\n"]))
    check_offsets(tmp_path, offsets)
    lines[line - 1] = b"#" * (len(lines[line - 1]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    assert not capsys.readouterr().err
    with pytest.raises(InputError) if name == EVENTS else nullcontext() as refused:
        check_offsets(tmp_path, offsets)
    told = str(refused.value) if refused else capsys.readouterr().err
    assert re.search(f"{name}:{line}: got '###.*expected one JSON object .*restore the file", told)
    check_offsets(tmp_path, FROM_THE_START)
    assert not capsys.readouterr().err


def test_a_record_is_checked_without_a_path_made_for_each_line(tmp_path):
    """They took a quarter of the time of checking tens of thousands of lines."""
    offsets, joined = written_run(tmp_path), []

    class Counted(type(Path())):
        def __truediv__(self, name):
            joined.append(name)
            return Path(self) / name

    check_offsets(Counted(tmp_path), offsets)
    assert sum(len(read(tmp_path)) for read in (read_events, read_metrics)) > 4
    assert sorted(joined) == sorted(2 * [EVENTS, METRICS])  # for its size and for its lines


def test_going_on_from_the_start_sets_the_whole_record_aside(tmp_path):
    cut_record(tmp_path, FROM_THE_START)
    assert not (tmp_path / "superseded.jsonl").exists()
    written_run(tmp_path)
    lines = read_events(tmp_path) + read_metrics(tmp_path)
    cut_record(tmp_path, FROM_THE_START)
    assert read_events(tmp_path) == read_metrics(tmp_path) == []
    entries = [strict(line) for line in (tmp_path / "superseded.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == lines and len(lines) == 12


KILLS = '''
import os, resource, shutil, signal, sys
from pathlib import Path
from curriculum.record import events

template, scratch = Path(sys.argv[1]), Path(sys.argv[2])
offsets = {"events.jsonl": int(sys.argv[3]), "metrics.jsonl": int(sys.argv[4])}
FILE_CHANGES = ("replace", "rename", "unlink", "write_bytes", "write_text")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

def resume():
    events.cut_record(scratch, offsets)

def contents():
    return {path.name: path.read_bytes() for path in scratch.iterdir() if path.suffix != ".tmp"}

def fresh():
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(template, scratch)

def in_child(prepare):
    """Resumes in a child that `prepare` makes die on the way; True where it died."""
    pid = os.fork()
    if pid == 0:
        prepare()
        resume()
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0

def dying_at_line(count):
    """Dies before the count-th line of events.py, of durable.py or of a file change, buffers unwritten, as by kill -9."""
    left = [count]
    def trace(frame, kind, argument):
        code = frame.f_code
        if not code.co_filename.endswith(("events.py", "durable.py")) and code.co_name not in FILE_CHANGES:
            return None
        if kind == "line":
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
        return trace
    return lambda: sys.settrace(trace)

def dying_at_byte(size):
    """Dies inside the write that takes a file beyond this size."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

fresh(); resume()
undisturbed = contents()
assert sorted(undisturbed) == ["events.jsonl", "metrics.jsonl", "superseded.jsonl"]

deaths, mended = 0, set()

def mend(where):
    """Resumes from the state a death left, unless the same state was mended before."""
    state = tuple(sorted((path.name, path.read_bytes()) for path in scratch.iterdir()))
    if state not in mended:
        mended.add(state)
        resume()
        assert contents() == undisturbed, f"killed at {where}"

line = 1
while True:
    fresh()
    if not in_child(dying_at_line(line)):
        break
    deaths += 1
    mend(f"line {line}")
    if line % 4 == 0:
        fresh()
        in_child(dying_at_line(line))
        in_child(dying_at_line(1 + 7 * line % 60))  # and once more on the way to mending it
        mend(f"line {line}, and again")
    line += 1
for size in range(0, 1200, 29):
    fresh()
    deaths += in_child(dying_at_byte(size))
    mend(f"byte {size}")
print(deaths, len(mended))
'''


def test_a_kill_at_any_moment_of_a_resume_loses_nothing_and_doubles_nothing(tmp_path):
    """Children die for good before every line of the code and inside its writes; the next resume mends it."""
    template = tmp_path / "template"
    template.mkdir()
    offsets = written_run(template)
    with open(template / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 10, "lo')
    (template / "superseded.jsonl").write_text('{"file": "metrics.jsonl", "line": "from an earlier cut"}\n')
    arguments = [template, tmp_path / "scratch", offsets["events.jsonl"], offsets["metrics.jsonl"]]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    deaths, states = map(int, done.stdout.split())
    assert deaths > 100 and states > 20, done.stdout


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_cut_that_was_written_down_and_is_damaged_is_told(tmp_path, content):
    (tmp_path / "superseded.pending.json").write_text(content)
    with pytest.raises(
        InputError, match=r"superseded.pending.json: is damaged, .* restore it from a copy, or delete it"
    ):
        cut_record(tmp_path, FROM_THE_START)


def test_readers_leave_out_a_line_that_is_being_written(tmp_path):
    written_run(tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"event": "ev')
    assert [event["step"] for event in read_events(tmp_path)] == [0, 5, 9]


@pytest.mark.parametrize("broken", [b'{"step": 3,', b"[3]", b"\xff\xfe", b"", b'{"loss": 3}'])
def test_readers_name_the_line_that_is_broken(tmp_path, broken):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n')
    with pytest.raises(InputError) as error:
        read_metrics(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'metrics.jsonl'}:2: got ")
    assert "expected one JSON object with step; restore the file" in str(error.value)


@pytest.mark.parametrize("change", [*({key: None} for key in STAMPS), {"step": "3"}, {"step": True}])
def test_an_event_has_its_stamps(tmp_path, change):
    stamps = {"event": "eval", "step": 3, "timestamp": "then", "elapsed_s": 1.0, "tokens_processed": 300}
    (tmp_path / "events.jsonl").write_text(json.dumps(stamps) + "\n")
    assert read_events(tmp_path) == [stamps]
    left_out = {key: value for key, value in stamps.items() if key not in change}
    for line in (stamps | change, left_out):
        (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(
            InputError, match=r"events.jsonl:1: got .*, expected one JSON object with event, step, time"
        ):
            read_events(tmp_path)


def test_lines_share_their_keys_in_memory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mixture": {"web": 1.0}}\n' * 2)
    first, second = read_metrics(tmp_path)
    for ours, theirs in ((first, second), (first["mixture"], second["mixture"])):
        assert len(ours) and all(a is b for a, b in zip(ours, theirs, strict=True))


def test_the_last_row_is_read_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(tmp_path) is None
    path.write_text('{"step": 1')
    assert last_row(tmp_path) is None
    path.write_text('x\n{"step": 1}\n{"step": 2}\n{"st')
    assert last_row(tmp_path) == {"step": 2}
    path.write_text('{"step": 1}\nx\n')
    with pytest.raises(InputError, match="metrics.jsonl: last line: got 'x', expected one JSON object with step"):
        last_row(tmp_path)


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("unfinished", [0, 200_000])
def test_the_last_row_may_be_of_any_length(tmp_path, before, unfinished):
    """With many sources of long names it is above the 64 KiB that are read first."""
    row = {f"loss_{'a_source_with_a_long_name_of_its_own_':0<40}{i:03}": 4.123456 for i in range(1400)}
    lines = [json.dumps({"step": step, **row}) for step in range(before + 1)]
    assert 64 << 10 < len(lines[-1]) < 128 << 10
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + "x" * unfinished)
    assert last_row(tmp_path) == {"step": before, **row}


def test_readers_refuse_a_folder_without_a_record(tmp_path):
    with pytest.raises(InputError, match=r"events\.jsonl: no such file; expected the directory of a run"):
        read_events(tmp_path)
