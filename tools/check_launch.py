"""Train a small run as several processes of a launcher, and hold it against one process; kill one of them, stop them.

    python tools/check_launch.py mpirun -np 2
    python tools/check_launch.py --folder /shared/check srun -N 2 --ntasks-per-node 1

What follows the options is the launcher; `curriculum train` and its options are put behind it. The folder has to be one
that all machines see. On CPUs, give each process a core.

1. A run of 120 steps as one process, and as the launcher's: phases and data have to be equal, and losses up to the
   order of float32 sums.
2. A long run, of which a process of this machine is killed: the launch has to end by itself.
3. The same, continued by the launcher. A process of this machine gets SIGTERM: all have to stop after one step, saved.
4. The same, continued by one process alone.

Prints a line a check, and exits with 1 at the first that fails.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kill_and_resume import LOG_EVERY, PHASE_ENDS, STEPS, read_lines, write_corpus

LONG_STEPS = 1_000_000
# Of losses, relative, up to the end of the first phase. Then text comes that the model never saw, and training makes
# the rounding of sums a thousand times larger in four updates; so it does if one process takes other micro-steps.
TOLERANCE = 1e-4
LOSSES = ("val_loss", "eval_code", "eval_law", "eval_manual")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, help="a new folder to work in, kept also if all holds")
    parser.add_argument("--seconds", type=float, default=300, help="how long to wait for each thing that has to happen")
    parser.add_argument("launcher", nargs=argparse.REMAINDER, help="the command that starts the processes")
    options = parser.parse_args(argv)
    if not options.launcher:
        parser.error("the command that starts the processes is missing, such as: mpirun -np 2")
    if options.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="check_launch_", dir=".")).absolute()
    elif options.folder.exists():
        parser.error(f"--folder {options.folder}: exists already")
    else:
        folder = options.folder.absolute()
        folder.mkdir(parents=True)
    try:
        check(folder, options.launcher, options.seconds)
    except Failed as failed:
        sys.exit(f"FAILED: {failed}")
    if options.folder is None:  # else, as after a failure, it is there to look at
        shutil.rmtree(folder)


class Failed(Exception):
    """What had to hold does not."""


def check(folder: Path, launcher: Sequence[str], seconds: float) -> None:
    """Do what the module says, in a folder."""
    config = write_corpus(folder)
    alone, launched, long = (folder / name for name in ("alone", "launched", "long"))
    finish(start([], config, alone), seconds, alone)
    process = start(launcher, config, launched)
    finish(process, seconds, launched)
    compare(read_lines(alone / "events.jsonl"), read_lines(launched / "events.jsonl"))
    devices = devices_told(launched.with_suffix(".log").read_text(errors="replace"))
    print(f"equal: {launched.name} on {devices}, {alone.name} on one process", flush=True)

    endless = ["--set", f"train.steps={LONG_STEPS}"]
    process = start(launcher, config, long, endless)
    until(lambda: saved(long) > 0, seconds, process, long)
    killed = one_here(long)
    if killed is None:
        process.terminate()
        process.wait()
        print("no process of it runs on this machine: none was killed, none stopped")
        return
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    if not (code := ended(process, seconds, long)):
        raise Failed(f"a process was killed, and the launch ended with exit code 0; see {long.with_suffix('.log')}")
    seconds_later = time.monotonic() - began
    print(f"killed: a process of this machine; the launch ended {seconds_later:.1f} s later by {code}", flush=True)
    before = saved(long)

    process = start(launcher, config, long, endless)
    until(lambda: saved(long) > before, seconds, process, long)
    if (stopped := one_here(long)) is None:
        process.terminate()
        raise Failed(f"no process of {long.name} runs on this machine any more, to be stopped")
    os.kill(stopped, signal.SIGTERM)
    ended(process, seconds, long)
    before, rows = saved(long), read_lines(long / "metrics.jsonl")
    if f"stopped by SIGTERM at step {before}, which was saved" not in long.with_suffix(".log").read_text():
        raise Failed(f"no process says that it stopped at step {before}; see {long.with_suffix('.log')}")
    print(f"stopped: all after step {before}, which is saved", flush=True)

    end = max(before + LOG_EVERY, STEPS)
    finish(start([], config, long, ["--set", f"train.steps={end}"]), seconds, long)
    steps = [row["step"] for row in read_lines(long / "metrics.jsonl")]
    if steps != sorted(set(steps)) or steps[-1] != end or len(steps) <= len(rows):
        raise Failed(f"the rows of {long} are of steps {steps}, expected each up to {end} once")
    print(f"continued: by one process, to step {end}", flush=True)


def start(launcher: Sequence[str], config: Path, run: Path, more: Sequence[str] = ()) -> subprocess.Popen:
    """`curriculum train --resume latest`, by a launcher or as one process; what it prints is added to RUN.log."""
    given = ["--run-dir", str(run), "--store-dir", str(run.parent / "store"), "--resume", "latest", *more]
    if not launcher:
        given += ["--num-processes", "1"]
    command = [*launcher, sys.executable, "-m", "curriculum", "train", str(config), *given]
    with open(run.with_suffix(".log"), "ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, seconds: float, run: Path) -> None:
    if code := ended(process, seconds, run):
        raise Failed(f"{run.name} ended with exit code {code}; see {run.with_suffix('.log')}")


def ended(process: subprocess.Popen, seconds: float, run: Path) -> int:
    """The exit code of a launch that has to end by itself."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise Failed(f"{run.name} has not ended within {seconds:g} s; see {run.with_suffix('.log')}") from None


def until(holds: Callable[[], bool], seconds: float, process: subprocess.Popen, run: Path) -> None:
    """Wait for a run to come so far."""
    began = time.monotonic()
    while not holds():
        if process.poll() is not None or time.monotonic() - began > seconds:
            process.terminate()
            raise Failed(f"{run.name} saved nothing within {seconds:g} s; see {run.with_suffix('.log')}")
        time.sleep(0.1)


def saved(run: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in run.glob("checkpoints/*") if path.name.isdecimal()), default=0)


def devices_told(log: str) -> str:
    """What a run of several processes says of its devices. Launchers may put their own words before each line."""
    line = next((line for line in log.splitlines() if "  devices  " in line), "")
    told = line.rpartition("  devices  ")[2].strip()
    if told in ("", "the CPU") or told.startswith("1 x "):
        raise Failed(f"the launcher's processes are not one run: it is told to be on {told or 'nothing'}")
    return told


def one_here(run: Path) -> int | None:
    """The process with the highest number on this machine that trains the run; not the launcher, which names it too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if command[0] == sys.executable and str(run) in command:
            found.append(int(path.parent.name))
    return max(found, default=None)


def compare(expected: list[dict], got: list[dict]) -> None:
    """Raise Failed if two records tell of other phases or data, or of other losses.

    Alarms and golds are not compared: they may turn on the last digits of a loss.
    """
    for name in ("phase_switch", "eval"):
        ours, theirs = ([event for event in events if event["event"] == name] for events in (expected, got))
        if [event["step"] for event in ours] != [event["step"] for event in theirs]:
            raise Failed(f"{name} at other steps: {[event['step'] for event in theirs]}")
        for event, other in zip(ours, theirs, strict=True):
            if event.get("consumed") != other.get("consumed"):
                raise Failed(f"step {event['step']}: read {other['consumed']}, expected {event['consumed']}")
            for field in LOSSES if event["step"] <= PHASE_ENDS[0] else ():
                loss, launched = event.get(field), other.get(field)
                if loss != launched and not (loss and launched and abs(launched / loss - 1) <= TOLERANCE):
                    raise Failed(f"step {event['step']}, {field}: {launched}, expected {loss}")


if __name__ == "__main__":
    main()
