"""A run in two real processes over the loopback, and on simulated devices in one, both of which this file is run as too;
and how processes find together."""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import run

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.run import load_run
from curriculum.train.launch import Launch, find_launch
from curriculum.train.peers import Peers, _frame
from curriculum.train.processes import _exit_code, count, first_then_all, from_first, is_first, joined
from curriculum.train.unwritten import Unwritten

ROOT = Path(__file__).parents[1]
STEPS, SHOWN, BUILT = 12, 4, "the run is built"
# Float32 sums in another order, as between meshes of one process (test_mesh.py); twelve updates at a high rate make more
# of them: 7e-6 was seen. Losses are recorded in six decimals.
LOSS_RTOL, NATS_RTOL = 2e-5, 2e-5


def config_data(folder, mesh=(-1, 1, 1), steps=STEPS, **changes):
    """Two phases, the second of which forgets the first; 8 rows an update in two micro-steps. `changes` by section, or
    section__key."""
    data = {
        "name": "processes",
        "model": {
            "preset": "tiny", "vocab_size": 264, "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48,
            "max_seq_len": 32,
        },
        "sources": {name: {"path": f"{folder}/{name}.jsonl", "held_out": "20%"} for name in ("code", "web")},
        "phases": [
            {"name": "first", "until": 8, "mixture": {"web": 0.9, "code": 0.1}},
            {"name": "second", "until": "end", "mixture": {"code": 1.0}, "ramp_steps": 2},
        ],
        "evalsets": {
            "every": 4, "primary": {"held_out_of": "web"}, "sets": {"code": {"held_out_of": "code"}},
            "regression": {"tolerance": 0.0, "confidence": 0.6},
        },
        "train": {"steps": steps, "batch_size": 8, "grad_accum": 2, "seq_len": 32},
        "optim": {"lr": 3e-2, "warmup_steps": 2},
        "averages": {"ema_decay": 0.9, "phase_mean": 2},
        "mesh": dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)),
        "checkpoint": {"every": 4, "keep": 2},
        "logging": {"every": 1},
    }  # fmt: skip
    for name, value in changes.items():
        section, _, key = name.partition("__")
        data[section] = {**data[section], key: value} if key else value
    return data


# Runs in two processes that do not end as planned, by how.
ENDS = {
    # From step 8 on the rate rises to what no parameter survives.
    "diverges": {
        "phases": [
            {"name": "first", "until": 8, "mixture": {"web": 0.9, "code": 0.1}},
            {"name": "second", "until": "end", "mixture": {"code": 1.0}, "lr": {"rewarm_steps": 2, "peak": 1e30}},
        ],
        "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "allow_jump": True},
        "train__rollback": {"after": 1, "skip_steps": 2, "max": 1},
    },
    "stops": {"evalsets__regression": {"tolerance": 0.0, "confidence": 0.6, "action": "stop"}},
    # What the first phase taught is forgotten in the middle of the second.
    "replays": {
        "phases": [
            {"name": "first", "until": 4, "mixture": {"web": 1.0}},
            {"name": "second", "until": "end", "mixture": {"code": 1.0}},
        ],
        "evalsets__regression": {"tolerance": 0.0, "confidence": 0.6, "action": "replay"},
    },
    "mean": {},
    "full": {},
}
# From which update on the disk of process 0 takes no longer files than that, the saves before it being over. What is next
# is to save the mean of the first phase, while the record waits; and the checkpoint of step 12, beside a record of 13 kB.
FULL_AT = {"mean": (7, 600), "full": (8, 20_000)}


def end_as(folder: Path, port: str, num_processes: str, process_id: str, *names: str):
    """Runs of ENDS, of each of which is kept by what it ended."""
    from curriculum.train.checkpoint import Checkpoints
    from curriculum.train.divergence import Diverged
    from curriculum.train.feed import Feed
    from curriculum.train.trainer import train
    from curriculum.train.watch import RegressionStop

    make, init, folders = Feed.__getitem__, Checkpoints.__init__, []

    def noted(self, *arguments, **options):
        folders.append(self)
        init(self, *arguments, **options)

    def fills(self, step):
        full_at, longest = FULL_AT.get(name, (None, None))
        if step == full_at and process_id == "0":
            while not all(saving.settled for saving in folders):
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (longest, resource.RLIM_INFINITY))
        return make(self, step)

    Feed.__getitem__, Checkpoints.__init__ = fills, noted
    with joined(find_launch(f"127.0.0.1:{port}", int(num_processes), int(process_id)), 60):
        for name in names:
            told = "complete"
            try:
                config = build_config(config_data(folder, (1, int(num_processes), 1), **ENDS[name]))
                train(config, folder / f"{name}-{num_processes}", store_dir=folder / "store")
            except (Diverged, RegressionStop) as ended:
                told = f"{type(ended).__name__}: {ended}"
            (folder / f"{name}-{num_processes}-{process_id}.txt").write_text(told)


def write_sources(folder):
    rng = np.random.default_rng(0)
    for name, words in (("web", "rain falls on the quiet green hills"), ("code", "def f ( x ) : return x + 1")):
        documents = [" ".join(rng.choice(words.split(), int(rng.integers(20, 60)))) for _ in range(100)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main(folder: Path, port: str, num_processes: str, process_id: str, *runs: str):
    """Runs, each as its name and its mesh: what this process reads of the first batches, told by the row it is of; and
    then the run."""
    from curriculum.train.setup import build
    from curriculum.train.trainer import train

    with joined(find_launch(f"127.0.0.1:{port}", int(num_processes), int(process_id)), 60):
        for run_name, mesh in (run.split("=") for run in runs):
            config = build_config(config_data(folder, tuple(map(int, mesh.split("x")))))
            setup = build(config, folder / "store")
            if is_first():
                print(BUILT, flush=True)
            rows, made, make = {}, [], setup.course.plan.batch

            def counted(*arguments, make=make, made=made, **options):
                batch = make(*arguments, **options)
                made.append(batch.inputs_ABT.shape[1])
                return batch

            setup.course.plan.batch = counted
            for step in range(SHOWN):
                for shard in setup.course.feed[step].inputs_ABT.addressable_shards:
                    part_ABT = np.asarray(shard.data)
                    for b in range(part_ABT.shape[1]):
                        rows[f"{step}/{(shard.index[1].start or 0) + b}"] = part_ABT[:, b]
            setup.course.feed.close()
            np.savez(folder / f"rows-{run_name}-{process_id}.npz", **rows)
            (folder / f"made-{run_name}-{process_id}.json").write_text(json.dumps(made))
            train(config, folder / run_name, store_dir=folder / "store")


def environment(**more):
    quick = "--xla_backend_optimization_level=0"
    return os.environ | {"XLA_FLAGS": quick, "PYTHONPATH": str(ROOT)} | more


def start(arguments, **more):
    """(process, a list that its lines come to) of a Python program."""
    begun = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = []

    def read():
        for line in iter(begun.stdout.readline, ""):
            lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begun.reader, begun.lines = reader, lines
    return begun


def ended(begun, seconds=300):
    """(exit code, all that was printed) of a process, which does not outlive the test."""
    try:
        code = begun.wait(timeout=seconds)
    finally:
        begun.kill()
    begun.reader.join(10)
    return code, "".join(begun.lines)


def start_train(folder, num_processes, *arguments):
    port = free_port()
    command = ["-m", "curriculum", "train", folder / "long.json", "--run-dir", folder / "long", "--store-dir"]
    command += [folder / "store", "--resume", "latest", *arguments]
    several = [[f"--coordinator=127.0.0.1:{port}", f"--num-processes={num_processes}"]] if num_processes > 1 else [[]]
    return [
        start([*command, *several[0], *([f"--process-id={i}"] if num_processes > 1 else [])])
        for i in range(num_processes)
    ]


def wait_for_rows(folder, num_rows):
    """Until the run has so many metrics rows."""
    path = folder / "long/metrics.jsonl"
    for _ in range(3000):
        if path.exists() and len(path.read_text().splitlines()) >= num_rows:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path}: has no {num_rows} rows after five minutes")


def num_rows(folder):
    return len((folder / "long/metrics.jsonl").read_text().splitlines())


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
    alone = start([__file__, folder, free_port(), 1, 0, "1=1x1x1"])
    assert ended(alone)[0] == 0, ended(alone)[1]
    simulated = start([__file__, folder, free_port(), 1, 0, "2=2x1x1", "4=1x4x1", "8=2x2x2"], JAX_NUM_CPU_DEVICES="8")
    assert ended(simulated)[0] == 0, ended(simulated)[1]
    port = free_port()
    two = [start([__file__, folder, port, 2, i, "two=1x2x2"], JAX_NUM_CPU_DEVICES="2") for i in range(2)]
    said = [ended(process) for process in two]
    assert [code for code, _ in said] == [0, 0], said
    return {name: load_run(folder / name) for name in ("1", "2", "4", "8", "two")} | {
        "said": [text for _, text in said]
    }


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
    for step in (0, 4, 8, 12):
        of_one, of_many = (np.load(run.directory.results(step)) for run in (one, many))
        assert set(of_one.files) == set(of_many.files) and "primary.nats" in of_one.files
        for array in of_one.files:
            if array.endswith("nats"):
                np.testing.assert_allclose(of_many[array], of_one[array], rtol=NATS_RTOL)
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
    assert "complete: 12 steps" in first
    assert [line for line in second.splitlines() if "[Gloo]" not in line] == []
    assert sorted(path.name for path in two.directory.checkpoints.iterdir()) == ["12", "8"]
    assert (two.directory.checkpoints / "12/params/ocdbt.process_1").is_dir()


@pytest.mark.slow
def test_gloo_knows_all_groups_of_devices_before_any_program_needs_them(runs):
    """A process that comes to a group's first exchange 30 s after another one would end both."""
    before, after = runs["said"][0].split(BUILT)
    assert before.count("[Gloo]") >= 3  # over fsdp, over tensor, over both
    assert "[Gloo]" not in after and "complete: 12 steps" in after


@pytest.fixture(scope="module")
def course(folder):
    """A run of two processes the second of which is killed; resumed by one that gets SIGTERM; by two, one of which
    does; and by two the first of which is killed."""
    told = {}
    killed = start_train(folder, 2)
    wait_for_rows(folder, 9)
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
    assert (code, killed) == (1, -signal.SIGKILL) and course["killed_seconds"] < 20
    line = next(line for line in text.splitlines() if line.startswith("process 1 of 2"))
    assert "is gone: it was killed, or its machine cannot be reached. Process 0 ends as well; go on" in line
    assert line.endswith("with --resume latest, with as many processes as there are then")


@pytest.mark.slow
def test_the_end_of_process_0_ends_the_others_with_a_line_that_says_so(course):
    (killed, _), (code, text) = course["headless"]
    assert killed == -signal.SIGKILL and course["headless_seconds"] < 20, text
    if code != -signal.SIGABRT:  # jax's own client may notice first, and aborts the process
        line = next(line for line in text.splitlines() if line.startswith("process 0 of 2"))
        assert "is gone: it was killed, or its machine cannot be reached. Process 1 ends as well; go on" in line
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
def test_a_signal_to_one_process_stops_both_at_one_step(course, folder):
    (first, text), (second, silent) = course["again"]
    assert (first, second) == (143, 143)
    last = course["rows"][2]
    assert f"stopped by SIGTERM at step {last}, which was saved; go on with --resume latest" in text
    assert "stopped" not in silent
    assert (folder / f"long/checkpoints/{last}").is_dir()


@pytest.fixture(scope="module")
def ends(folder):
    """(exit code, all that was printed) of each of two processes, by the last of the runs of ENDS that they trained; one
    of these one process trained as well."""
    alone = start([__file__, folder, free_port(), 1, 0, "replays"])
    assert ended(alone)[0] == 0, ended(alone)[1]
    found = {}
    for names in (["diverges", "stops", "replays", "mean"], ["full"]):
        port = free_port()
        two = [start([__file__, folder, port, 2, i, *names]) for i in range(2)]
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
        ("mean", "averages/first: cannot be written: File too large; mend that, and go on with --resume latest"),
        (
            "full",
            "checkpoints/12: cannot be saved: File too large; mend that, and go on from the checkpoint before with",
        ),
    ],
)
def test_a_full_disk_ends_both_processes_alike_and_both_say_why(ends, folder, name, why):
    (first, text), (second, others) = ends[name]
    assert (first, second) == (2, 2), text + others
    why = f"InputError: {folder}/{name}-2/{why}"
    assert why in text
    line = next(line for line in others.splitlines() if line.startswith("process 0 of 2"))
    assert f" ended: {why}" in line and "Process 1 ends as well" in line
    kept = [path.name for path in (folder / f"{name}-2/checkpoints").iterdir()]
    assert kept and all(step.isdecimal() for step in kept), "what was half saved is gone"


SLURM = {
    "SLURM_JOB_ID": "8200", "SLURM_STEP_NODELIST": "node[003-004],gpu1", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ((None, None, None), {}, None),
        (("h:1", 1, 0), {}, None),
        (("h:81", 2, 1), {}, Launch("h", 81, 2, 1)),
        (("[fe80::1]:81", 2, 0), {}, Launch("fe80::1", 81, 2, 0)),
        # 61440 + 8200 % 4096
        ((None, None, None), SLURM, Launch("node003", 61448, 3, 2)),
        ((None, None, None), SLURM | {"SLURM_STEP_NODELIST": "a,b"}, Launch("a", 61448, 3, 2)),
        ((None, None, None), SLURM | {"SLURM_STEP_NODELIST": "a-1"}, Launch("a-1", 61448, 3, 2)),
        ((None, None, None), SLURM | {"JAX_COORDINATOR_PORT": "99"}, Launch("node003", 99, 3, 2)),
        (("x:5", None, None), SLURM, Launch("x", 5, 3, 2)),
        ((None, None, None), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, Launch("node003", 61448, 3, 2, (0,))),
        (
            (None, None, None),
            # Four tasks of two GPUs each: task 2 of the machine sees its own two as 0 and 1.
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "2", "SLURM_GPUS_PER_TASK": "2"}
            | {"CUDA_VISIBLE_DEVICES": "0,1"},
            Launch("node003", 61448, 3, 2),
        ),
        (
            (None, None, None),
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "JAX_LOCAL_DEVICE_IDS": "4,5"},
            Launch("node003", 61448, 3, 2),
        ),
        # An id of one's own is not that of the launcher, and says nothing of devices.
        (("x:5", 8, 7), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, Launch("x", 5, 8, 7)),
        ((None, None, None), SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ((None, None, None), {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "8"}, None),
        ((None, 1, None), SLURM, None),
        # 1531576320 / 4096 = 373920, which is 1184 more than a multiple of 4096
        ((None, None, None), OPEN_MPI, Launch("10.96.0.1", 62624, 4, 3, (1,))),
        ((None, None, None), OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "3"}, Launch("10.96.0.1", 62624, 4, 3)),
        (("x:5", 4, None), {"JOB_COMPLETION_INDEX": "2"}, Launch("x", 5, 4, 2)),
        ((None, None, None), {"JOB_COMPLETION_INDEX": "2"}, None),
    ],
)
def test_a_launch_is_found(given, environ, expected):
    assert find_launch(*given, environ=environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (
            ("h:1", None, None),
            {},
            ["--coordinator: got no --num-processes and no --process-id; the processes of a run"],
        ),
        ((None, 2, None), {}, ["--num-processes: got no --coordinator and no --process-id; the processes"]),
        ((None, None, 1), {}, ["--process-id: got no --coordinator and no --num-processes; the"]),
        ((None, 2, 1), {}, ["--num-processes and --process-id: got no --coordinator; the processes of a run need all"]),
        (("h", 2, 2), {}, ["--coordinator h: expected HOST:PORT", "--process-id 2: expected 0 to 1, each once"]),
        ((None, 1, 3), {}, ["--num-processes and --process-id: got no --coordinator; the processes of a run need all"]),
        (("h:0", 0, 0), {}, ["--coordinator h:0: expected HOST:PORT", "--num-processes 0: expected 1 or more"]),
        (
            (None, None, None),
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            ["Open MPI started this process as one of 2, but does not say where they meet; give --coordinator"],
        ),
        (
            ("h:1", 2, None),
            {"JOB_COMPLETION_INDEX": "two"},
            ["JOB_COMPLETION_INDEX: got 'two', expected the whole number that a launcher sets; unset it"],
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused(given, environ, expected):
    with pytest.raises(InputError) as error:
        find_launch(*given, environ=environ)
    assert len(error.value.problems) == len(expected)
    for problem, start_of in zip(error.value.problems, expected, strict=True):
        assert problem.startswith(start_of)


def test_options_and_environment_variables_of_the_command(tmp_path, monkeypatch):
    done = run(tmp_path, "train", ROOT / "configs/quickstart.yaml", "--coordinator", "somewhere:12")
    assert done.returncode == 2 and done.stderr.startswith("error: --coordinator: got no --num-processes")
    monkeypatch.setenv("JAX_PROCESS_ID", "5")
    done = run(tmp_path, "train", ROOT / "configs/quickstart.yaml", "--coordinator", "somewhere:12")
    assert done.stderr.startswith("error: --coordinator and --process-id: got no --num-processes; the processes of a")
    assert "JAX_NUM_PROCESSES" in done.stderr


def test_a_single_process_decides_for_itself():
    with joined(None):
        assert count() == 1 and is_first()
        assert from_first(lambda: {1: (2,)}) == {1: (2,)} and first_then_all(lambda: 3) == 3


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


def together(*calls):
    """What each call returns, all of them made at once."""
    found = {}
    threads = [threading.Thread(target=lambda i=i, c=c: found.update({i: c()})) for i, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[i] for i in range(len(calls))]


def test_processes_tell_each_other_what_they_have():
    port = free_port()
    peers = meet(*(Launch("127.0.0.1", port, 3, i) for i in range(3)))
    array = np.arange(6, dtype=np.float64).reshape(2, 3) / 7
    got = together(*(lambda p=p: p.from_first({"a": [array, 0.1, None]} if p.index == 0 else None) for p in peers))
    assert all(found["a"][1:] == [0.1, None] and np.array_equal(found["a"][0], array) for found in got)
    assert together(*(lambda p=p: p.gather(p.index * 10) for p in peers)) == [[0, 10, 20]] * 3
    # Asked to stop after different steps; process 2 got the signal. No one waits until it is known.
    assert [p.agreed_stop(None, step) for p, step in zip(peers, (7, 5, 6), strict=True)] == [None] * 3
    assert peers[2].agreed_stop(signal.SIGTERM, 7) is None

    def stops(p, step):
        while (received := p.agreed_stop(None, step)) is None:
            step += 1
            time.sleep(0.01)
        return received, step

    stopped = together(*(lambda p=p, s=s: stops(p, s) for p, s in zip(peers, (8, 6, 8), strict=True)))
    assert len(set(stopped)) == 1 and stopped[0][0] == signal.SIGTERM and stopped[0][1] >= 8
    together(*(p.close for p in peers))


def test_a_signal_that_all_get_stops_them_at_one_step():
    """As SLURM sends it, each process being at another step; one that has promised a step waits there."""
    port = free_port()
    peers = meet(*(Launch("127.0.0.1", port, 3, i) for i in range(3)))
    assert [p._names for p in peers] == [peers[0]._names] * 3 and len(peers[0]._names) == 3
    assert [p.agreed_stop(None, step) for p, step in zip(peers, (2, 9, 4), strict=True)] == [None] * 3

    def stops(p, step):
        while (received := p.agreed_stop(signal.SIGTERM, step)) is None:
            step += 1
            time.sleep(0.01)
        return received, step

    stopped = together(*(lambda p=p, s=s: stops(p, s) for p, s in zip(peers, (3, 10, 5), strict=True)))
    # The second looks at step 10, and again at 11 where it has passed 10 before it heard of the others.
    assert len(set(stopped)) == 1 and stopped[0][0] == signal.SIGTERM and stopped[0][1] in (10, 11)
    together(*(p.close for p in peers))


def test_a_step_that_was_promised_is_not_passed():
    port = free_port()
    peers = meet(*(Launch("127.0.0.1", port, 2, i) for i in range(2)))
    assert peers[1].agreed_stop(None, 6) is None and peers[1]._promise(signal.SIGTERM) == 7
    found = []
    waits = threading.Thread(target=lambda: found.append(peers[1].agreed_stop(None, 7)))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    peers[1]._stop_after(8)
    waits.join(20)
    assert found == [None] and peers[1].agreed_stop(None, 8) == signal.SIGTERM
    together(*(p.close for p in peers))


DECIDE = """
import errno, json, sys, time
from curriculum.errors import InputError
from curriculum.train import peers, processes
from curriculum.train.launch import Launch

port, index = int(sys.argv[1]), int(sys.argv[2])
peers.GRACE_SECONDS = processes._NEWS_SECONDS = 0.2
processes._peers = peers.Peers(Launch("127.0.0.1", port, 2, index), 30)
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

attempt("value", processes.from_first, lambda: {"of": index})
attempt("wrong", processes.from_first, wrong)
attempt("full", processes.from_first, full)
attempt("made", processes.first_then_all, lambda: made.append(time.time()) or index)
told["when"] = made
attempt("same", processes.check_same, lambda: {"the text": "t"})
attempt("differ", processes.check_same, lambda: {"the config": f"c{index}", "the text": "t"})
print(json.dumps(told), flush=True)
if index == 0:
    time.sleep(60)
processes.leave(RuntimeError("has lost its way\\nand more"))
time.sleep(2)
sys.exit(5)
"""


def test_what_two_processes_decide_together():
    port = free_port()
    two = [start(["-c", DECIDE, port, i]) for i in range(2)]
    code, first = ended(two[0], 60)
    two[1].wait(1)  # process 0 ended after it
    left, second = ended(two[1], 60)
    first, *last_line = first.splitlines()
    first, second = json.loads(first), json.loads(second)
    assert first["value"] == second["value"] == {"of": 0}
    assert first["wrong"] == ["InputError", "a: wrong", True] and second["wrong"] == ["InputError", "", True]
    assert first["full"] == second["full"] == ["OSError", "[Errno 28] No space left on device: 'x/y'", False]
    assert (first["made"], second["made"]) == (0, 1)
    assert (len(first["when"]), len(second["when"])) == (1, 1) and first["when"] < second["when"]
    assert first["same"] is second["same"] is None
    told = "process 1 has c1 as the config, process 0 c0; start all processes with the same command on the same files"
    assert first["differ"] == ["InputError", told, True] and second["differ"] == ["InputError", "", True]
    assert (code, left) == (1, 5) and len(last_line) == 1
    assert last_line[0].startswith("process 1 of 2 (") and (
        "ended: RuntimeError: has lost its way. Process 0 ends as well; go on from the newest checkpoint"
        in last_line[0]
    )


LEAVES = """
import sys, time
from curriculum.cli import main
from curriculum.train import peers, processes
from curriculum.train.launch import Launch
from curriculum.train.programs import Programs, StepShape

port, index = int(sys.argv[1]), int(sys.argv[2])
peers.GRACE_SECONDS, processes._NEWS_SECONDS = 4.0, 0.2
processes._peers = peers.Peers(Launch("127.0.0.1", port, 2, index), 30)
if index:
    time.sleep(60)
programs = Programs(lambda shape: time.sleep(300))
programs.ahead([StepShape(1, 1, 1)])
programs.close()

def command():
    processes.leave(SystemExit(2))
    sys.exit(2)

main._command = command
main.main()
"""


def test_process_0_sees_the_others_off_while_something_is_compiled_too():
    """It leaves without the interpreter's end then, and jax's service would end before the other has said why."""
    port = free_port()
    first, second = (start(["-c", LEAVES, port, i]) for i in range(2))
    try:
        assert first.wait(60) == 2
        second.wait(1)  # process 0 ended after it
    finally:
        first.kill()
        code, said = ended(second)
    assert code == 2 and "process 0 of 2" in said and "Process 1 ends as well" in said


BOTH_LEAVE = """
import atexit, os, sys, time
from curriculum.train import peers, processes
from curriculum.train.launch import Launch

port, index = int(sys.argv[1]), int(sys.argv[2])
peers.GRACE_SECONDS, processes._NEWS_SECONDS = 4.0, 0.2
processes._peers = peers.Peers(Launch("127.0.0.1", port, 2, index), 30)
time.sleep(index)
processes.leave(RuntimeError(f"error {index}"))
if index:
    time.sleep(1.5)
    os._exit(1)
atexit.register(processes._exit_at_once, 2)
"""


def test_process_0_sees_off_one_that_tells_an_error_of_its_own_meanwhile():
    """At the interpreter's end, where Python 3.12 starts no thread."""
    port = free_port()
    first, second = (start(["-c", BOTH_LEAVE, port, i]) for i in range(2))
    try:
        assert ended(first, 60) == (2, "")
        assert second.wait(0.5) == 1  # process 0 ended after it
    finally:
        second.kill()


def test_the_exit_code_of_a_process_that_ends_by_an_error():
    errors = [InputError("x"), KeyboardInterrupt(), SystemExit(143), SystemExit("x"), RuntimeError()]
    assert [_exit_code(error) for error in errors] == [2, 130, 143, 1, 1]


def test_the_record_of_the_others_tells_what_it_is_given_and_writes_nothing(tmp_path):
    record = Unwritten(tmp_path, lambda step: 10 * step)
    event = record.event("eval", 3, val_loss=2.5)
    assert (event["event"], event["tokens_processed"], event["val_loss"]) == ("eval", 30, 2.5)
    assert record.row({"step": 3, "loss": 1.5}) == {"step": 3, "loss": 1.5}
    before = record.offsets()
    record.cut_back({"events.jsonl": 10**6, "metrics.jsonl": 10**6})  # of files that process 0 has
    assert record.offsets() == before == {"events.jsonl": 0, "metrics.jsonl": 0}
    record.close()
    assert list(tmp_path.iterdir()) == []


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


HELLO = {"index": 1, "count": 2, "name": "stranger"}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        _frame({"index": [1]} | {"count": 2, "name": ""}),
        _frame(HELLO | {"index": 7}),
        _frame(HELLO | {"index": -1}),
        _frame(HELLO | {"count": None}),
        _frame({"index": 1}),
        struct.pack("!Q", 2) + b"[]",
        struct.pack("!Q", 2) + b"\xff{",
    ],
)
def test_what_is_no_process_of_a_run_is_passed_over(said):
    port = free_port()
    first = threading.Thread(target=lambda: peers.extend(meet(Launch("127.0.0.1", port, 2, 0))))
    peers = []
    first.start()
    for _ in range(200):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            time.sleep(0.05)
    stranger.sendall(said)
    stranger.close()
    peers += meet(Launch("127.0.0.1", port, 2, 1))
    first.join(20)
    assert sorted(p.index for p in peers) == [0, 1] and all(p._names[1] != "stranger" for p in peers)
    together(*(p.close for p in peers))


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [first] = meet(Launch("127.0.0.1", port, 2, 0))
    assert first.startswith(f"--coordinator 127.0.0.1:{port}: process 0 cannot listen there: Address already in use")


def test_a_process_that_never_comes_is_named():
    port = free_port()
    [first] = meet(Launch("127.0.0.1", port, 2, 0), seconds=0.3)
    assert first.startswith(
        f"--coordinator 127.0.0.1:{port}: waited 0.3 s for 2 processes, of which these did not come: 1"
    )
    [second] = meet(Launch("127.0.0.1", port, 2, 1), seconds=0.3)
    assert second.startswith(
        f"--coordinator 127.0.0.1:{port}: process 1 of 2 could not reach it for 0.3 s: Connection refused"
    )


def test_the_launch_files_are_what_they_seem():
    done = subprocess.run(["bash", "-n", ROOT / "docs/launch/slurm.sbatch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    text = (ROOT / "docs/launch/slurm.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH ") and "srun" in text
    jobset = yaml.safe_load((ROOT / "docs/launch/jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    container = job["template"]["spec"]["containers"][0]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    name, host = jobset["metadata"]["name"], environ["JAX_COORDINATOR_ADDRESS"].partition(":")[0]
    assert host == f"{name}-{replicated['name']}-0-0.{name}"  # what JobSet names the first pod
    found = find_launch(
        environ["JAX_COORDINATOR_ADDRESS"], int(environ["JAX_NUM_PROCESSES"]), environ={"JOB_COMPLETION_INDEX": "3"}
    )
    assert (found.num_processes, found.process_id) == (job["parallelism"], 3)


if __name__ == "__main__":
    run_them = end_as if sys.argv[-1] in ENDS else main
    run_them(Path(sys.argv[1]), *sys.argv[2:])
