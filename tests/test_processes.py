"""A run in two real processes over the loopback, and on simulated devices in one; process_runs.py is what they run."""

import json
import re
import signal
import time

import numpy as np
import process_runs
import pytest
from process_runs import BUILT, FULL_AT, SHOWN, STEPS, config_data, write_sources
from started import ended, free_port, start
from tiny_run import signalled

from curriculum.config import build_config
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.run import load_run
from curriculum.train.signals import Stopped
from curriculum.train.trainer import train

# Float32 sums in another order, as between meshes of one process (test_mesh.py); twelve updates at a high rate make more
# of them: 7e-6 was seen, 4e-5 on a processor with AVX-512. Losses are recorded in six decimals.
LOSS_RTOL, NATS_RTOL = 1e-4, 1e-4
FIRST_RTOL = 1e-5  # before an update has made more of them


def start_train(folder, num_processes, *arguments, name="long"):
    port = free_port()
    command = ["-m", "curriculum", "train", folder / f"{name}.json", "--run-dir", folder / name, "--store-dir"]
    command += [folder / "store", "--resume", "latest", *arguments]
    if num_processes == 1:
        return [start(command)]
    command += [f"--coordinator=127.0.0.1:{port}", f"--num-processes={num_processes}"]
    return [start([*command, f"--process-id={i}"]) for i in range(num_processes)]


def wait_until(happened, what):
    for _ in range(3000):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError(f"five minutes, and not yet: {what}")


def num_rows(folder):
    """How many metrics rows the run has."""
    path = folder / "long/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_rows(folder, number):
    wait_until(lambda: num_rows(folder) >= number, f"{number} metrics rows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_sources(folder)
    (folder / "long.json").write_text(json.dumps(config_data(folder, steps=5000)))
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """The same run on one device, on 2, 4 and 8 of one process, and in two processes of two devices each, which send each
    other all that fsdp sends; by name, with what the two processes said."""
    alone = start([process_runs.__file__, folder, free_port(), 1, 0, "1=1x1x1"])
    assert ended(alone)[0] == 0, ended(alone)[1]
    simulated = start(
        [process_runs.__file__, folder, free_port(), 1, 0, "2=2x1x1", "4=1x4x1", "8=2x2x2"], JAX_NUM_CPU_DEVICES="8"
    )
    assert ended(simulated)[0] == 0, ended(simulated)[1]
    port = free_port()
    two = [start([process_runs.__file__, folder, port, 2, i, "two=1x2x2"], JAX_NUM_CPU_DEVICES="2") for i in range(2)]
    said = [ended(process) for process in two]
    assert [code for code, _ in said] == [0, 0], said
    return {name: load_run(folder / name) for name in ("1", "2", "4", "8", "two")} | {
        "said": [text for _, text in said]
    }


def without_gloo(text):
    """What is left without Gloo's lines: its threads write each in pieces, which may lie within one another's."""
    return re.sub(
        r"\[Gloo\] Rank|is connected to|peer ranks\. Expected number of connected peer ranks is :|[\d\s]", "", text
    )


MANY = [("2", 2, 1), ("4", 4, 1), ("8", 8, 1), ("two", 4, 2)]  # name, devices, processes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2", "4", "8"])
def test_simulated_devices_read_the_rows_of_one(runs, folder, name):
    one, many = (np.load(folder / f"rows-{run}-0.npz") for run in ("1", name))
    assert len(one.files) == SHOWN * 4 and sorted(many.files) == sorted(one.files)
    assert all(np.array_equal(many[row], one[row]) for row in one.files)


@pytest.mark.slow
def test_two_processes_read_the_rows_of_one_and_each_only_its_own(runs, folder):
    one = np.load(folder / "rows-1-0.npz")
    parts = [np.load(folder / f"rows-two-{i}.npz") for i in range(2)]
    assert len(one.files) == SHOWN * 4 and [len(part.files) for part in parts] == [SHOWN * 2] * 2
    assert sorted([*parts[0].files, *parts[1].files]) == sorted(one.files)
    for part in parts:
        assert all(np.array_equal(part[name], one[name]) for name in part.files)
    # Not only what lies on its devices: no process so much as makes the rows of another. Of each micro-step's four.
    for name, num_rows in (("1-0", 4), ("two-0", 2), ("two-1", 2)):
        made = json.loads((folder / f"made-{name}.json").read_text())
        assert len(made) >= SHOWN and set(made) == {num_rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, *_ in MANY])
def test_many_devices_train_and_evaluate_as_one_does(runs, name):
    one, many = runs["1"], runs[name]
    assert [row["step"] for row in many.metrics] == list(range(1, STEPS + 1))  # written once
    for column in ("loss", "loss_web", "loss_code"):
        of_one, of_many = ([row[column] for row in run.metrics] for run in (one, many))
        assert [x is None for x in of_one] == [x is None for x in of_many]
        assert [x for x in of_many if x] == pytest.approx([x for x in of_one if x], rel=LOSS_RTOL)
        assert of_many[0] == pytest.approx(of_one[0], rel=FIRST_RTOL)
    for step in (0, 4, 8, 12):
        of_one, of_many = (np.load(run.directory.results(step)) for run in (one, many))
        assert set(of_one.files) == set(of_many.files) and "primary.nats" in of_one.files
        for array in of_one.files:
            if array.endswith("nats"):
                rtol = NATS_RTOL if step else FIRST_RTOL
                np.testing.assert_allclose(of_many[array], of_one[array], rtol=rtol)
            elif not array.endswith("correct"):
                np.testing.assert_array_equal(of_many[array], of_one[array])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices", "num_processes"), MANY)
def test_many_devices_come_to_the_same_verdicts(runs, name, num_devices, num_processes):
    one, many = runs["1"], runs[name]
    assert [(e["event"], e["step"]) for e in many.events] == [(e["event"], e["step"]) for e in one.events]
    worse = [[e for e in run.events if e["event"] == "eval_regression"] for run in (one, many)]
    assert worse[0] and [[p["set"] for p in e["offenders"]] for e in worse[0]] == [
        [p["set"] for p in e["offenders"]] for e in worse[1]
    ]
    assert many.gold_step == one.gold_step is not None
    devices = {"platform": "cpu", "kind": "cpu", "num": num_devices, "mesh": None}
    assert many.start["devices"] | {"mesh": None} == devices | ({"processes": 2} if num_processes == 2 else {})


@pytest.mark.slow
def test_process_0_alone_speaks_and_both_write_checkpoints(runs, folder):
    two, (first, second) = runs["two"], runs["said"]
    assert "complete: 12 steps" in first and "devices    4 on the CPUs of 2 processes" in first
    assert without_gloo(second) == ""
    assert sorted(path.name for path in two.directory.checkpoints.iterdir()) == ["12", "8"]
    assert (two.directory.checkpoints / "12/params/ocdbt.process_1").is_dir()


@pytest.mark.slow
def test_gloo_knows_all_groups_of_devices_before_any_program_needs_them(runs):
    """A process that comes to a group's first exchange 30 s after another one would end both."""
    before, after = runs["said"][0].split(BUILT)
    assert before.count("[Gloo]") >= 3  # over fsdp, over tensor, over both
    assert "[Gloo]" not in after and "complete: 12 steps" in after


ASKED = """
import sys; from pathlib import Path
from curriculum.train.processes.launch import find_launch
from curriculum.train.processes.together import joined, share_folder
with joined(find_launch(sys.argv[1], 2, int(sys.argv[2])), 60):
    print(*(share_folder(Path(path)) for path in sys.argv[3:]), flush=True)
"""


@pytest.mark.slow
def test_processes_know_whether_they_share_a_folder(tmp_path):
    (tmp_path / "file").touch()  # where none can be made
    at = f"127.0.0.1:{free_port()}"
    two = [start(["-c", ASKED, at, i, tmp_path / "one", tmp_path / f"of {i}", tmp_path / "file"]) for i in range(2)]
    said = [ended(process, 120) for process in two]
    assert all(code == 0 and "True False False" in text for code, text in said), said
    assert not list((tmp_path / "one").iterdir()) and not list((tmp_path / "of 0").iterdir())


ALIKE = """
import sys, time
from curriculum.train.processes.launch import find_launch
from curriculum.train.processes.together import joined, leaving_on_error, wait_for_all
with joined(find_launch(sys.argv[1], 2, int(sys.argv[2])), 60), leaving_on_error():
    wait_for_all()
    time.sleep(0.0 if sys.argv[2] == "1" else 0.5)  # less than a process waits for news of another
    raise ValueError("a mistake in both")
"""


@pytest.mark.slow
def test_an_error_that_all_have_is_told_by_all():
    at = f"127.0.0.1:{free_port()}"
    two = [start(["-c", ALIKE, at, i]) for i in range(2)]
    for code, text in [ended(process, 120) for process in two]:
        assert code == 1 and "Traceback" in text and text.rstrip().endswith("ValueError: a mistake in both")


FOLLOWS = """
import sys, time
from curriculum.errors import InputError
from curriculum.train.processes.launch import find_launch
from curriculum.train.processes.together import joined, leaving_on_error, wait_for_all
with joined(find_launch(sys.argv[1], 2, int(sys.argv[2])), 60), leaving_on_error():
    wait_for_all()
    if sys.argv[2] == "1":
        raise InputError("no room for my part")
    time.sleep(3)
    raise ValueError("Connection closed by peer")
"""


@pytest.mark.slow
def test_an_error_that_follows_from_another_s_is_not_told_instead_of_it():
    at = f"127.0.0.1:{free_port()}"
    two = [start(["-c", FOLLOWS, at, i]) for i in range(2)]
    (code, text), (other, cause) = (ended(process, 120) for process in two)
    assert (code, other) == (2, 2) and "InputError: no room for my part" in cause
    line = next(line for line in text.splitlines() if line.startswith("process 1 of 2"))
    assert " ended: InputError: no room for my part. Process 0 ends as well" in line and "Traceback" not in text


@pytest.mark.slow
def test_a_dry_run_of_one_process_alone_is_refused(folder):
    command = ["-m", "curriculum", "train", folder / "long.json", "--run-dir", folder / "dry"]
    command += ["--store-dir", folder / "store", f"--coordinator=127.0.0.1:{free_port()}", "--num-processes=2"]
    two = [start([*command, "--process-id=0", "--dry-run"]), start([*command, "--process-id=1"])]
    (code, text), (other, silent) = (ended(process, 120) for process in two)
    assert (code, other) == (2, 2) and not (folder / "dry").exists()
    assert "error: process 1 has no as --dry-run, process 0 yes; start all processes with the same command" in text
    assert "error" not in silent
    assert "process 0 says why this run of several processes ends" in silent.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("of", (0, 1))
def test_a_config_of_one_process_alone_is_refused(runs, folder, of, tmp_path):
    """Also one by which the processes would do other things together before they compare anything else."""
    two = []
    at = [f"--coordinator=127.0.0.1:{free_port()}", "--num-processes=2"]
    for i in range(2):
        begins = [f"--init-from={folder / '1'}", "--accept-past", "--resume=latest"] if i == of else []
        command = ["-m", "curriculum", "train", folder / "long.json", "--run-dir", tmp_path / "run", *begins]
        two.append(start([*command, "--store-dir", folder / "store", *at, f"--process-id={i}"]))
    (code, text), (other, silent) = (ended(process, 120) for process in two)
    assert (code, other) == (2, 2) and not (tmp_path / "run").exists()
    begun = [json.dumps(str(folder / "1")), "null"]
    expected = "error: process 1 has {} as the config's adaptation.init_from, process 0 {}; start all processes with"
    assert expected.format(*begun[:: (1 if of else -1)]) in text
    asked = [("null", '"latest"'), ('"latest"', "null")][of]
    assert "error: process 1 has {} as --resume, process 0 {};".format(*asked) in text
    assert "as --accept-past" in text and "error" not in silent and "Traceback" not in text + silent


@pytest.fixture(scope="module")
def course(folder):
    """A run of two processes the second of which is killed; resumed by one that gets SIGTERM; by two, one of which
    does; and by two the first of which is killed."""
    told = {}
    killed = start_train(folder, 2)
    # The updates go on while a checkpoint is written: how many rows there are does not tell that one is whole.
    wait_until(lambda: max(checkpoint_steps(folder / "long/checkpoints"), default=0) >= 8, "the checkpoint of step 8")
    began = time.monotonic()
    killed[1].send_signal(signal.SIGKILL)
    told["killed"] = [ended(process) for process in killed]
    told["killed_seconds"] = time.monotonic() - began
    told["rows"] = [num_rows(folder)]
    alone = start_train(folder, 1)
    wait_for_rows(folder, told["rows"][0] + 8)
    alone[0].send_signal(signal.SIGTERM)
    told["alone"] = [ended(process) for process in alone]
    told["rows"].append(num_rows(folder))
    again = start_train(folder, 2)
    wait_for_rows(folder, told["rows"][1] + 8)
    again[1].send_signal(signal.SIGTERM)
    told["again"] = [ended(process) for process in again]
    told["rows"].append(num_rows(folder))
    headless = start_train(folder, 2)
    wait_for_rows(folder, told["rows"][2] + 2)
    began = time.monotonic()
    headless[0].send_signal(signal.SIGKILL)
    told["headless"] = [ended(process) for process in headless]
    told["headless_seconds"] = time.monotonic() - began
    return told


@pytest.mark.slow
def test_the_end_of_one_process_ends_the_other_with_a_line_that_says_so(course):
    (code, text), (killed, _) = course["killed"]
    assert (code, killed) == (1, -signal.SIGKILL) and course["killed_seconds"] < 60
    line = next(line for line in text.splitlines() if line.startswith("process 1 of 2"))
    assert "is gone: it was killed, or its machine cannot be reached. Process 0 ends as well; continue" in line
    assert line.endswith("with --resume latest, with as many processes as you then have")


@pytest.mark.slow
def test_the_end_of_process_0_ends_the_others_with_a_line_that_says_so(course):
    (killed, _), (code, text) = course["headless"]
    assert killed == -signal.SIGKILL and course["headless_seconds"] < 60, text
    if code != -signal.SIGABRT:  # jax's own client may notice first, and aborts the process
        line = next(line for line in text.splitlines() if line.startswith("process 0 of 2"))
        assert "is gone: it was killed, or its machine cannot be reached. Process 1 ends as well; continue" in line
        assert code == 1


@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_processes(course, folder):
    run = load_run(folder / "long")
    assert [code for code, _ in course["alone"]] == [143]
    resumed = [e for e in run.events if e["event"] == "resume"]
    assert [e["devices"].get("processes", 1) for e in resumed] == [1, 2, 2]
    assert 8 <= resumed[0]["step"] <= course["rows"][0] and resumed[1]["step"] == course["rows"][1]
    steps = [row["step"] for row in run.metrics]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= course["rows"][1] + 8
    losses = [row["loss"] for row in run.metrics]
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_an_eval_that_one_process_left_is_done_by_several(runs, folder, monkeypatch):
    """It is left as the mean of a phase is measured, which is on the disk already; the phase ends with this step."""
    (folder / "left.json").write_text(json.dumps(config_data(folder)))
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="at step 8, which was saved"):
        signalled(patch, 5)
        train(build_config(config_data(folder)), folder / "left", store_dir=folder / "store")
    assert read_ledger(folder / "left/checkpoints/8")["history"]["eval_left"]
    assert [code for code, _ in map(ended, start_train(folder, 2, name="left"))] == [0, 0]
    left, one = load_run(folder / "left"), runs["1"]
    assert [e["devices"]["processes"] for e in left.events if e["event"] == "resume"] == [2]
    events = [(e["event"], e["step"]) for e in left.events if e["event"] != "resume"]
    assert events == [(e["event"], e["step"]) for e in one.events] and ("phase_switch", 8) in events
    assert checkpoint_steps(folder / "left/checkpoints") == [8, 12]
    assert not read_ledger(folder / "left/checkpoints/8")["history"]["eval_left"]
    of_left, of_one = ([e["phase_mean"]["val_loss"] for e in run.events if "phase_mean" in e] for run in (left, one))
    assert of_left == pytest.approx(of_one, rel=LOSS_RTOL) and len(of_one) == 1


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_one_step(course, folder):
    (first, text), (second, silent) = course["again"]
    assert (first, second) == (143, 143)
    last = course["rows"][2]
    assert f"stopped by SIGTERM at step {last}, which was saved; continue with --resume latest" in text
    assert "stopped" not in silent
    assert (folder / f"long/checkpoints/{last}").is_dir()


@pytest.fixture(scope="module")
def ends(folder):
    """(exit code, all that was printed) of each of two processes, by the last of the runs of ENDS that they trained; one
    of these one process trained as well."""
    alone = start([process_runs.__file__, folder, free_port(), 1, 0, "replays"])
    assert ended(alone)[0] == 0, ended(alone)[1]
    found = {}
    for names in (["diverges", "stops", "replays", "mean"], ["full"], ["record"], ["other"]):
        port = free_port()
        two = [start([process_runs.__file__, folder, port, 2, i, *names]) for i in range(2)]
        found[names[-1]] = [ended(process) for process in two]
    return found


def told(folder, name):
    """By what a run of ENDS ended in both processes."""
    first, second = ((folder / f"{name}-2-{i}.txt").read_text() for i in range(2))
    assert first == second
    return first


@pytest.mark.slow
def test_two_processes_go_back_together_and_end_alike_where_that_is_no_way_out(ends, folder):
    summary = told(folder, "diverges")
    assert summary.startswith("Diverged: training diverged at step 10 of 12 (phase second, learning rate 1e+30): ")
    assert "\n  rollbacks    1 of 1: to step 8 (bad from 9)\n  last good    step 8 of " in summary
    run = load_run(folder / "diverges-2")
    (rollback,) = [e for e in run.events if e["event"] == "rollback"]
    assert (rollback["step"], rollback["told_at_step"], rollback["first_bad_step"]) == (8, 10, 9)
    assert run.events[-1]["event"] == "diverged" and [row["step"] for row in run.metrics] == list(range(1, 11))
    lines = [json.loads(line)["line"] for line in (folder / "diverges-2/superseded.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [9, 10]


@pytest.mark.slow
def test_two_processes_stop_alike_after_a_regression(ends, folder):
    assert told(folder, "stops") == "RegressionStop: stopped at step 8, which was saved: code got worse"
    assert (folder / "stops-2/checkpoints/8").is_dir()


@pytest.mark.slow
def test_two_processes_raise_a_share_as_one_does(ends, folder):
    assert told(folder, "replays") == "complete"
    one, two = (load_run(folder / f"replays-{n}") for n in (1, 2))
    edits = [[{k: e[k] for k in ("step", "kind", "mixture_after")} for e in run.events if e["event"] == "schedule_edit"]
             for run in (one, two)]  # fmt: skip
    assert edits[0] == edits[1] and [(e["step"], e["kind"]) for e in edits[0]] == [(8, "replay")]
    for column in ("loss", "loss_web", "loss_code"):
        of_one, of_two = ([row[column] for row in run.metrics] for run in (one, two))
        assert [x is None for x in of_one] == [x is None for x in of_two]
        assert [x for x in of_two if x] == pytest.approx([x for x in of_one if x], rel=LOSS_RTOL)
    assert any(row["loss_web"] for row in two.metrics[8:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mean", "averages/first: cannot be written: File too large; fix that, and continue with --resume latest"),
        (
            "full",
            "checkpoints/12: cannot be saved: File too large; fix that, and continue from the checkpoint before with",
        ),
        (
            "record",
            "checkpoints/12: cannot be saved: File too large; fix that, and continue from the checkpoint before",
        ),
        ("other", "checkpoints/12: cannot be saved: File too large; fix that, and continue from the checkpoint before"),
    ],
)
def test_a_full_disk_ends_both_processes_alike_and_both_say_why(ends, folder, name, why):
    said = ends[name]
    assert [code for code, _ in said] == [2, 2], said
    full_in = FULL_AT[name][0]
    why, text, others = f"InputError: {folder}/{name}-2/{why}", said[full_in][1], said[1 - full_in][1]
    assert why in text
    if name != "record":  # of which both learn alike
        line = next(line for line in others.splitlines() if line.startswith(f"process {full_in} of 2"))
        assert f" ended: {why}" in line and f"Process {1 - full_in} ends as well" in line
        assert "Traceback" not in others
    kept = {path.name for path in (folder / f"{name}-2/checkpoints").iterdir()}
    if full_in == 1:  # process 0 was ended in the middle of its part, which the next start removes
        kept.discard(".12.saving.orbax-checkpoint-tmp")
    assert kept and all(step.isdecimal() for step in kept), "what was half saved is gone"
