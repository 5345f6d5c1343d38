"""What tools/check_launch.py holds a launch against, and which process it ends."""

import copy
import subprocess
import sys

import check_launch
import pytest

EVENTS = [
    {"event": "training_start", "step": 0},
    {"event": "eval", "step": 20, "val_loss": 2.5, "eval_code": 3.0, "eval_law": 4.0},
    {"event": "phase_switch", "step": 40, "consumed": {"web": 256, "code": 64}},
    {"event": "eval", "step": 60, "val_loss": 2.0, "eval_code": 2.5, "eval_law": 3.0},
]


@pytest.mark.parametrize(
    "place, change, told",
    [
        (1, {"eval_code": 3.0 * 1.0002}, "step 20, eval_code: 3.0006"),
        (1, {"eval_code": float("nan")}, "step 20, eval_code: nan, expected 3.0"),
        (1, {"eval_law": None}, "step 20, eval_law: None, expected 4.0"),
        (2, {"consumed": {"web": 255, "code": 65}}, "step 40: read {'web': 255, 'code': 65}, expected"),
        (2, {"step": 41}, r"phase_switch at other steps: \[41\]"),
    ],
)
def test_a_launch_that_trains_otherwise_is_told(place, change, told):
    launched = copy.deepcopy(EVENTS)
    launched[place] |= change
    with pytest.raises(check_launch.Failed, match=told):
        check_launch.compare(EVENTS, launched)


def test_rounding_is_no_difference_and_later_evals_are_not_compared():
    launched = copy.deepcopy(EVENTS)
    launched[1]["val_loss"] *= 1 + 5e-5
    launched[3]["val_loss"] *= 1.1
    check_launch.compare(EVENTS, launched)


def test_of_the_processes_only_one_that_trains_is_found(tmp_path):
    run = tmp_path / "run"
    waits = "import time; time.sleep(60)"
    others = ["/bin/sh", "-c", "sleep 60", str(run)], [sys.executable, "-c", waits, str(tmp_path / "other")]
    assert check_launch.one_here(run) is None
    begun = [subprocess.Popen([sys.executable, "-c", waits, str(run)]), *map(subprocess.Popen, others)]
    try:
        assert check_launch.one_here(run) == begun[0].pid
    finally:
        for process in begun:
            process.kill()
            process.wait()


def test_a_launcher_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        check_launch.main([])
    assert ended.value.code == 2 and "such as: mpirun -np 2" in capsys.readouterr().err


def test_processes_that_are_not_one_run_are_told():
    log = "[1,0]<stdout>:  devices    2 on the CPUs of 2 processes\nstep 0/120"
    assert check_launch.devices_told(log) == "2 on the CPUs of 2 processes"
    assert check_launch.devices_told("  devices    2 x NVIDIA H100, 60.0 GB\n").startswith("2 x ")
    for alone in ("  devices    the CPU\n", "  devices    1 x NVIDIA H100\n", "step 0/120\n"):
        with pytest.raises(check_launch.Failed, match="are not one run"):
            check_launch.devices_told(alone)


def test_a_folder_that_is_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        check_launch.main(["--folder", str(tmp_path), "env"])
    assert ended.value.code == 2 and "exists already" in capsys.readouterr().err
