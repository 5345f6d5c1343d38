"""How processes are told of each other, and the files of docs/launch."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import run

from curriculum.errors import InputError
from curriculum.train.processes.launch import Launch, find_launch

ROOT = Path(__file__).parents[1]

SLURM = {
    "SLURM_JOB_ID": "8200", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[003-004],gpu1",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip
TPU_SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "3"}
OF_JAX = {"JAX_COORDINATOR_ADDRESS": "h:81", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
OF_STEP = Launch("node003", 61448, 3, 2, None, "SLURM's step 8200.0")  # 61440 + 8200 % 4096
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
# Twelve ranks on three machines of SLURM: mpirun, on the first, started its daemons on the others by srun.
OF_A_DAEMON = OPEN_MPI | {
    "OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_RANK": "5", "SLURM_JOB_ID": "8200",
    "SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "PMIX_NAMESPACE": "1531576321",
}  # fmt: skip
OF_MPIRUN = Launch("10.96.0.1", 62624, 12, 5, (1,), "Open MPI's job 1531576321")
ONE_DAEMON = OF_A_DAEMON | {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_NUM_TASKS": "1"}


NOTHING = None, None, None  # is given


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (NOTHING, {}, None),
        (("h:1", 1, 0), {}, None),
        (("h:81", 2, 1), {}, Launch("h", 81, 2, 1)),
        (("[fe80::1]:81", 2, 0), {}, Launch("fe80::1", 81, 2, 0)),
        (NOTHING, OF_JAX, Launch("h", 81, 2, 1)),
        (("x:5", None, 0), OF_JAX, Launch("x", 5, 2, 0)),  # what is given counts first
        ((None, 1, None), OF_JAX | {"JAX_PROCESS_ID": "0"}, None),
        (NOTHING, {**OF_JAX, "JAX_PROCESS_ID": "", "JOB_COMPLETION_INDEX": "1"}, Launch("h", 81, 2, 1)),
        (NOTHING, TPU_SLICE, Launch("t-0.t", 8476, 4, 3)),
        (NOTHING, TPU_SLICE | {"JOB_COMPLETION_INDEX": "3", "JAX_COORDINATOR_PORT": "99"}, Launch("t-0.t", 99, 4, 3)),
        (NOTHING, TPU_SLICE | {"TPU_PROCESS_ADDRESSES": "a:8,b:8", "TPU_WORKER_ID": "0"}, Launch("a", 8476, 2, 0)),
        (NOTHING, TPU_SLICE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (NOTHING, TPU_SLICE | {"MEGASCALE_NUM_SLICES": "2"}, None),
        ((None, 1, None), TPU_SLICE, None),
        (NOTHING, SLURM, OF_STEP),
        (NOTHING, SLURM | {"SLURM_STEP_NODELIST": "a,b"}, replace(OF_STEP, host="a")),
        (NOTHING, SLURM | {"SLURM_JOB_ID": ""}, None),  # as of a variable that a script has emptied
        (NOTHING, SLURM | {"SLURM_STEP_NODELIST": "a-1"}, replace(OF_STEP, host="a-1")),
        # 61440 + (8200 + 4 x 1021) % 4096
        (NOTHING, SLURM | {"SLURM_STEP_ID": "4"}, replace(OF_STEP, port=65532, launched_by="SLURM's step 8200.4")),
        (NOTHING, SLURM | {"JAX_COORDINATOR_PORT": "99"}, replace(OF_STEP, port=99)),
        (("x:5", None, None), SLURM, replace(OF_STEP, host="x", port=5)),
        (NOTHING, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, replace(OF_STEP, local_devices=(0,))),
        (
            NOTHING,
            # Four tasks of two GPUs each: task 2 of the machine sees its own two as 0 and 1.
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "2", "SLURM_GPUS_PER_TASK": "2"}
            | {"CUDA_VISIBLE_DEVICES": "0,1"},
            OF_STEP,
        ),
        (NOTHING, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "JAX_LOCAL_DEVICE_IDS": "4,5"}, OF_STEP),
        # An id of one's own is not that of the launcher, and says nothing of devices, nor of who belongs together.
        (("x:5", 8, 7), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, Launch("x", 5, 8, 7)),
        (NOTHING, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        (NOTHING, {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "8"}, None),
        ((None, 1, None), SLURM, None),
        (("x:5", 1, None), SLURM, None),
        # 1531576320 / 4096 = 373920, which is 1184 more than a multiple of 4096
        (NOTHING, OPEN_MPI, Launch("10.96.0.1", 62624, 4, 3, (1,))),
        (NOTHING, OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "3"}, Launch("10.96.0.1", 62624, 4, 3)),
        (NOTHING, OF_A_DAEMON, OF_MPIRUN),
        (("x:5", None, None), ONE_DAEMON, replace(OF_MPIRUN, host="x", port=5)),
        # What the job gives its tasks is not what mpirun gives the ranks.
        (NOTHING, ONE_DAEMON | {"SLURM_GPUS_PER_TASK": "4"}, OF_MPIRUN),
        # srun in what mpirun has started: its PMIx says whose task this is.
        (NOTHING, OPEN_MPI | SLURM | {"PMIX_NAMESPACE": "slurm.pmix.8200.0"}, OF_STEP),
        (("x:5", 4, None), {"JOB_COMPLETION_INDEX": "2"}, Launch("x", 5, 4, 2)),
        (NOTHING, {"JOB_COMPLETION_INDEX": "2"}, None),
    ],
)
def test_a_launch_is_found(given, environ, expected):
    assert find_launch(*given, environ=environ) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("node3,gpu1", "node3"),
        ("node[3,5-7]", "node3"),
        ("n[01-04]-ib", "n01-ib"),
        ("rack[1-2]-node[03-4,9]", "rack1-node03"),
        ("r[2]n[3-4].a.org,s[1-2]", "r2n3.a.org"),
        ("[007-9],n1", "007"),
    ],
)
def test_the_first_machine_of_a_slurm_list(nodes, first):
    assert find_launch(environ=SLURM | {"SLURM_STEP_NODELIST": nodes}).host == first


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
            NOTHING,
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            ["Open MPI started this process as one of 2, but does not say where they meet; give --coordinator"],
        ),
        (
            ("h:1", None, None),
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            ["--coordinator h:1: SLURM started this process alone; if it is one of several, also"],
        ),
        (
            ("h:1", None, 0),
            {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
            ["--coordinator h:1: Open MPI started this process alone; if it is one of several, also"],
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
    found = find_launch(environ=environ | {"JOB_COMPLETION_INDEX": "3"})
    assert (found.num_processes, found.process_id) == (job["parallelism"], 3)
