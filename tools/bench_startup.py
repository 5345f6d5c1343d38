"""Time how long commands take to start, against `python -c pass`, and a second start of training against the first.

    python tools/bench_startup.py [--starts 10] [--layers 4 12] [--trainings 3] [--json FILE]

Commands are whole processes that take turns: minimum and median of the wall time, and the least processor time. The
config is like the quickstart's, and its corpus is prepared. A large one has many sources, none of them prepared, in
each of 60 phases of 1,000 steps, a third of which begin with a ramp. A start of training is timed from the start of the
process to the first row of metrics.jsonl, which is written after the first update; the evals before it are included. A
first start has an empty cache of compiled programs. A second uses that cache as the first left it, in a new run
directory. They take turns; the ratio is of the medians. A sweep trains twice in one process from Python, with another
mixture, rate and seed the second time: from each call to the first row, the ratio of the first call's time to the
second's.

On a shared machine, trust the ratios of processor seconds.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from results import in_turns, json_parser, report

WORDS = "a model reads the text of every source again and again until its loss no longer falls by much".split()
SOURCES = 500  # of the large config
CURRICULUM = [sys.executable, "-m", "curriculum"]


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[4, 12], help="layers of the models whose training is started"
    )
    parser.add_argument("--trainings", type=int, default=3, help="first and second starts of each of them")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder)
        run([*CURRICULUM, "prepare", "c.json"], folder)
        rows = [*commands(folder, args.starts), large_plan(folder, args.starts)]
        for num_layers in args.layers:
            rows += training(folder, num_layers, args.trainings)
    report(rows, args.json, "jax")


def write_config(folder: Path) -> None:
    """A config of three sources and four phases, as in configs/quickstart.yaml, and text for it."""
    names = ("docs", "python", "cpp")
    for source, name in enumerate(names):
        lines = []
        for i in range(300):
            words = [WORDS[(i * k + source) % len(WORDS)] for k in range(1, 120)]
            lines.append(json.dumps({"text": f"{name} {i} " + " ".join(words)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    mixtures = [(0.6, 0.4, 0), (0.4, 0.2, 0.4), (0.01, 0.01, 0.98), (0.5, 0.2, 0.3)]
    phases = [
        {"name": f"phase{i}", "until": until, "mixture": {n: w for n, w in zip(names, mixture, strict=True) if w}}
        for i, (until, mixture) in enumerate(zip(("50%", "60%", "80%", "end"), mixtures, strict=True))
    ]
    held_out = {"held_out_of": "docs", "max_sequences": 32}
    data = {
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "sources": {name: {"path": f"{name}.jsonl", "held_out": "10%"} for name in names},
        "phases": phases,
        "evalsets": {"primary": held_out, "sets": {n: {**held_out, "held_out_of": n} for n in names}},
        "model": {"preset": "tiny"},
        "train": {"steps": 1000, "batch_size": 16, "seq_len": 128},
        "optim": {"lr": 2e-3, "schedule": "wsd", "warmup_steps": "3%", "decay_steps": "20%"},
    }
    (folder / "c.json").write_text(json.dumps(data))
    (folder / "wrong.json").write_text(json.dumps({**data, "train": {**data["train"], "step": 10}}))


def commands(folder: Path, num_starts: int) -> list[dict]:
    """One row per command; ratios are to `python -c pass`."""
    work = {
        "python -c pass": ([sys.executable, "-c", "pass"], 0),
        "--help": ([*CURRICULUM, "--help"], 0),
        "generate --help": ([*CURRICULUM, "generate", "--help"], 0),
        "plan": ([*CURRICULUM, "plan", "c.json"], 0),
        "plan, a wrong config": ([*CURRICULUM, "plan", "wrong.json"], 2),
    }
    # The first round, which is not timed, reads from the disk.
    taken = in_turns({name: partial(run, command, folder, code) for name, (command, code) in work.items()}, num_starts)
    bare = least_cpu(taken["python -c pass"])
    return [
        row_of(name, times, least_cpu(times) / bare, "processor seconds of python -c pass")
        for name, times in taken.items()
    ]


def large_plan(folder: Path, num_starts: int) -> dict:
    """A row for `plan` of a config with many sources and 60 phases, compared with the plan of the small one."""
    names, share = [f"s{i}" for i in range(SOURCES)], random.Random(0).random
    data = json.loads((folder / "c.json").read_text())
    data["sources"] = {"docs": data["sources"]["docs"], **{name: {"path": "docs.jsonl"} for name in names}}
    data["phases"] = [
        {"name": f"phase{i}", "until": 1000 * (i + 1), "mixture": {name: share() for name in names}} for i in range(60)
    ]
    for phase in data["phases"][1::3]:
        phase["ramp_steps"] = 100
    data["evalsets"]["sets"], data["train"]["steps"] = {}, 60_000
    (folder / "large.json").write_text(json.dumps(data))
    plans = {name: partial(run, [*CURRICULUM, "plan", name], folder) for name in ("c.json", "large.json")}
    taken = in_turns(plans, max(1, num_starts // 3))
    ratio = least_cpu(taken["large.json"]) / least_cpu(taken["c.json"])
    return row_of(f"plan, {SOURCES} sources, 60 phases", taken["large.json"], ratio, "processor seconds of plan")


def training(folder: Path, num_layers: int, num_starts: int) -> list[dict]:
    """A row for first starts and one for second ones."""
    taken = {"first": [], "second": []}
    for i in range(num_starts):
        shutil.rmtree(folder / ".curriculum/compiled", ignore_errors=True)
        for start, times in taken.items():
            times.append(first_step(folder, num_layers, folder / f"runs/{num_layers}-{start}-{i}"))
    medians = {start: statistics.median(seconds for seconds, _ in times) for start, times in taken.items()}
    compared_with = "wall seconds of the first start, above 1 where it is faster"
    rows = [
        row_of(f"train, {num_layers} layers, {start} start", times, medians["first"] / medians[start], compared_with)
        for start, times in taken.items()
    ]
    calls = [sweep(folder, num_layers, folder / f"runs/{num_layers}-sweep-{i}") for i in range(num_starts)]
    first, later = zip(*calls, strict=True)
    ratio = statistics.median(wall for wall, _ in first) / statistics.median(wall for wall, _ in later)
    what, compared_with = "later run of a process", "wall seconds of the process's first run, its programs in the cache"
    return [*rows, row_of(f"train, {num_layers} layers, {what}", list(later), ratio, compared_with)]


SWEEP = """
import json, sys, time
from pathlib import Path
from curriculum.config import load_config
from curriculum.train import trainer

layers, directory = sys.argv[1:]
changes = {
    "first": [],
    "later": ["optim.lr=1e-3", "seed=7", "phases.phase0.mixture={docs: 0.2, python: 0.8}"],
}
times = []
for name, changed in changes.items():
    set_all = [f"model.n_layer={layers}", "logging.every=1", "train.steps=40", *changed]
    run_dir, began = Path(directory) / name, (time.perf_counter(), time.process_time())
    update_at = trainer.Setup.update_at

    def timed(setup, step):
        if step == 1:  # the row of the first update is written
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        return update_at(setup, step)

    trainer.Setup.update_at = timed
    trainer.train(load_config("c.json", set_all), run_dir)
    trainer.Setup.update_at = update_at
print(json.dumps(times))
"""


def sweep(folder: Path, num_layers: int, directory: Path) -> list[tuple[float, float]]:
    """(wall, processor) seconds from the call to the first row of metrics, of each of two runs of one process."""
    command = [sys.executable, "-c", SWEEP, str(num_layers), str(directory)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"a sweep ended with {done.returncode}\n{done.stderr}")
    return [(wall, cpu) for wall, cpu in json.loads(done.stdout.splitlines()[-1])]


def row_of(what: str, times: list[tuple[float, float]], ratio: float, compared_with: str) -> dict:
    """A row of the table, from (wall, processor) seconds."""
    seconds = [wall for wall, _ in times]
    return {
        "what": what,
        "ms_min": round(min(seconds) * 1e3),
        "ms_median": round(statistics.median(seconds) * 1e3),
        "cpu_ms_min": round(least_cpu(times) * 1e3),
        "ratio": round(ratio, 2),
        "compared_with": compared_with,
    }


def least_cpu(times: list[tuple[float, float]]) -> float:
    return min(cpu for _, cpu in times)


def first_step(folder: Path, num_layers: int, run_dir: Path) -> tuple[float, float]:
    """(wall, processor) seconds from the start of the process to its first row of metrics; then it is killed."""
    changes = (f"model.n_layer={num_layers}", "logging.every=1", "train.steps=100000")
    command = [*CURRICULUM, "train", "c.json", "--run-dir", str(run_dir)]
    for change in changes:
        command += ["--set", change]
    started = time.perf_counter()
    with open(folder / "train.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)
        rows = run_dir / "metrics.jsonl"
        try:
            while not (rows.exists() and rows.stat().st_size):
                if process.poll() is not None:
                    sys.exit(
                        f"{' '.join(command)}: ended with {process.returncode}\n{(folder / 'train.log').read_text()}"
                    )
                time.sleep(0.005)
            seconds, cpu_seconds = time.perf_counter() - started, processor_seconds(process.pid)
        finally:
            process.kill()
            process.wait()
    return seconds, cpu_seconds


def processor_seconds(pid: int) -> float:
    """Processor seconds of a running process so far; NaN on a system without /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return float("nan")
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run(command: list[str], folder: Path, expected: int = 0) -> None:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode != expected:
        sys.exit(f"{' '.join(command)}: ended with {done.returncode}\n{done.stderr}")


def environment() -> dict[str, str]:
    """The environment, changed so that compiled programs are cached beside the stores, and Python writes bytecode."""
    left_out = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    return {name: setting for name, setting in os.environ.items() if name not in left_out}


if __name__ == "__main__":
    main()
