"""How the processes of a run learn of each other: from options, their environment variables, or a launcher."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from curriculum.errors import InputError

# Several launchers and tools set these; they stand for the options of `curriculum train` that are not given.
VARIABLES = {
    "--coordinator": "JAX_COORDINATOR_ADDRESS",
    "--num-processes": "JAX_NUM_PROCESSES",
    "--process-id": "JAX_PROCESS_ID",
}

JOIN_SECONDS = 300.0  # how long a process waits for the others to start


@dataclass(frozen=True)
class Launch:
    """One process of several. `local_devices`: the devices of its machine that it takes; None for all.

    `launched_by`: the launch that numbered it, such as a step of SLURM; empty if its number was given.
    """

    host: str
    port: int
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None
    launched_by: str = ""


@dataclass(frozen=True)
class _Launcher:
    """What a launcher says without being asked; None for what it does not say."""

    name: str
    num_processes: int | None
    process_id: int
    coordinator: str | None
    local_devices: tuple[int, ...] | None = None
    launch: str = ""


def find_launch(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Launch | None:
    """Which process of a run this one is; None if it is alone.

    What is given counts first, then `VARIABLES`, then what Open MPI, SLURM, a TPU slice or an indexed Job of Kubernetes
    says. `num_processes` 1 keeps the tasks of a launcher apart: each is a run of its own. Raises InputError with
    everything that is missing or does not fit.
    """
    coordinator = coordinator or environ.get(VARIABLES["--coordinator"]) or None
    num_processes = _number(environ, VARIABLES["--num-processes"]) if num_processes is None else num_processes
    process_id = _number(environ, VARIABLES["--process-id"]) if process_id is None else process_id
    if num_processes == 1 and process_id in (None, 0):
        return None
    is_given = (coordinator, num_processes, process_id) != (None, None, None)
    # Open MPI goes first: within SLURM, mpirun starts its daemons by srun, whose tasks are not the ranks.
    launcher = _open_mpi(environ) or _slurm(environ) or _tpu_slice(environ) or _indexed_job(environ)
    if not is_given and (launcher is None or launcher.num_processes in (None, 1)):
        return None
    if launcher is None:
        return _checked_launch(coordinator, num_processes, process_id)
    if not is_given and launcher.coordinator is None:
        raise InputError(
            f"{launcher.name} started this process as one of {launcher.num_processes}, but does not say where they "
            "meet; give --coordinator HOST:PORT, the same to all: the machine of process 0 and a free port of it "
            "(or --num-processes 1, if each is a run of its own)"
        )
    if coordinator is not None and num_processes is None and launcher.num_processes == 1:
        raise InputError(
            f"--coordinator {coordinator}: {launcher.name} started this process alone; if it is one of several, also "
            "give --num-processes and --process-id, else --num-processes 1, or leave "
            f"--coordinator ({VARIABLES['--coordinator']} in the environment) out"
        )
    return _checked_launch(
        launcher.coordinator if coordinator is None else coordinator,
        launcher.num_processes if num_processes is None else num_processes,
        launcher.process_id if process_id is None else process_id,
        launcher.local_devices if process_id in (None, launcher.process_id) else None,
        launcher.launch if process_id is None else "",
    )


def _checked_launch(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_devices: tuple[int, ...] | None = None,
    launched_by: str = "",
) -> Launch | None:
    """The launch of these numbers; None if this process is alone. Raises InputError if one is missing or wrong."""
    found = dict(zip(VARIABLES, (coordinator, num_processes, process_id), strict=True))
    if missing := [option for option, value in found.items() if value is None]:
        there = [option for option in found if option not in missing]
        raise InputError(
            f"{' and '.join(there)}: got no {' and no '.join(missing)}; the processes of a run need all three (or, in "
            f"the environment, {', '.join(VARIABLES[option] for option in missing)}), unless SLURM, Open MPI or a TPU "
            "slice starts them"
        )
    problems = []
    host, port = _address(coordinator)
    if port is None:
        problems.append(
            f"--coordinator {coordinator}: expected HOST:PORT, the machine of process 0 and a free port of it (1 to "
            "65535), the same for all processes"
        )
    if num_processes < 1:
        problems.append(f"--num-processes {num_processes}: expected 1 or more")
    elif not 0 <= process_id < num_processes:
        problems.append(
            f"--process-id {process_id}: expected 0 to {num_processes - 1}, each once, as there are --num-processes "
            f"{num_processes}"
        )
    if problems:
        raise InputError(*problems)
    return None if num_processes == 1 else Launch(host, port, num_processes, process_id, local_devices, launched_by)


def _address(text: str) -> tuple[str, int | None]:
    """(host, port) of HOST:PORT or [IPV6]:PORT; the port is None if it is neither."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        return "", None
    return match[1] or match[2], int(match[3])


def _slurm(environ: Mapping[str, str]) -> _Launcher | None:
    """A task of `srun`. The batch script itself and a step of one task are alone, even in an allocation of many.

    The coordinator is the first machine of the step, with a port derived from the numbers of job and step; for a job's
    step 0 it is the port that jax uses.
    """
    if not all(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")):
        return None
    num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", 1)
    # Such as node3,gpu1 or rack[1-2]-node[003-007,9]-ib,gpu1: up to the first comma outside of brackets.
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", environ["SLURM_STEP_NODELIST"])
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", 0)
    # Each step of a job has its own port; so have the next jobs, which may share the machine.
    port = environ.get("JAX_COORDINATOR_PORT") or 61440 + (job + 1021 * step) % 4096
    devices = None
    # With --gpus-per-task SLURM shows a task its own GPUs alone, however many, and numbers them from 0.
    tasks_per_node = re.sub(r"\(x[0-9]+\)", "", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if tasks_per_node != "1" and "SLURM_GPUS_PER_TASK" not in environ:
        devices = _one_device(environ, "SLURM_LOCALID")
    coordinator = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) + f":{port}" if first else None
    process_id = _number(environ, "SLURM_PROCID")
    return _Launcher("SLURM", num_tasks, process_id, coordinator, devices, f"SLURM's step {job}.{step}")


def _open_mpi(environ: Mapping[str, str]) -> _Launcher | None:
    """A process of `mpirun`. Only up to version 4 does it say where mpirun, and so process 0, was started."""
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environ.keys():
        return None
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):  # a task of `srun --mpi=pmix` inside of an mpirun
        return None
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    found = re.search(r"^([0-9]+)\..*?(?:tcp://([^,:]+)|tcp6://(\[[^,\]]+))", uri)
    coordinator = None
    if found:
        host = found[2] or f"{found[3]}]"
        port = environ.get("JAX_COORDINATOR_PORT") or 61440 + int(found[1]) // 4096 % 4096
        coordinator = f"{host}:{port}"
    size, rank = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    devices = None
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        devices = _one_device(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    job = environ.get("PMIX_NAMESPACE")
    return _Launcher("Open MPI", size, rank, coordinator, devices, f"Open MPI's job {job}" if job else "")


def _tpu_slice(environ: Mapping[str, str]) -> _Launcher | None:
    """A machine of a slice of TPUs, as Kubernetes on Google's cloud numbers them. Several slices are not told apart."""
    hosts = (environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or "").split(",")
    number = _number(environ, "TPU_WORKER_ID")
    if len(hosts) == 1 or number is None or "MEGASCALE_NUM_SLICES" in environ:
        return None
    host, port = hosts[0].strip().partition(":")[0], environ.get("JAX_COORDINATOR_PORT") or 8476  # that of jax
    return _Launcher("a TPU slice", len(hosts), number, f"{host}:{port}")


def _indexed_job(environ: Mapping[str, str]) -> _Launcher | None:
    """A pod of an indexed Job, or of a JobSet of one: it only knows its own number. Several Jobs are not one run."""
    index = _number(environ, "JOB_COMPLETION_INDEX")
    return None if index is None else _Launcher("Kubernetes", None, index, None)


def _one_device(environ: Mapping[str, str], local_id: str) -> tuple[int, ...] | None:
    """The one device for each of several tasks on a machine; None if the launcher or the user assigns them."""
    shared_out = "JAX_LOCAL_DEVICE_IDS" in environ or len(environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1
    number = _number(environ, local_id)
    return None if shared_out or number is None else (number,)


def _number(environ: Mapping[str, str], variable: str, default: int | None = None) -> int | None:
    """The number in a launcher's environment variable, `default` if it is unset or empty. Raises InputError."""
    value = environ.get(variable) or default
    try:
        return None if value is None else int(value)
    except ValueError:
        raise InputError(
            f"{variable}: got {value!r}, expected the whole number that a launcher sets; unset it"
        ) from None
