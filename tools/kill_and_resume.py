"""Kill training with kill -9 again and again, resume it, and compare the end with an undisturbed run, bit for bit.

    python tools/kill_and_resume.py --kills 30
    python tools/kill_and_resume.py --kills 200 --directory kills     # kept, to look at
    python tools/kill_and_resume.py --kills 30 --no-cache             # killed runs compile anew at every start

Makes a small corpus and trains a model of 0.1M parameters over three phases, once undisturbed. Then runs of the same
config are killed: each start waits for a state of the run directory (a save under way, a store half-written, a row
without its eval ...), waits a random moment more, and kills the process. What the kill interrupted is read off the
directory afterwards. A run is resumed until it is done, then compared; new runs are begun until there are enough kills.
The comparison covers all arrays and ledgers of the last checkpoint and the gold, metrics, events, eval results and what
TensorBoard shows; every line cut off the record must be in superseded.jsonl once. Prints what the kills hit. If a run
differs, exits with 1 and prints the first differences.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

CLOCK_FIELDS = {
    "timestamp", "elapsed_s", "eval_duration_s", "tokens_per_sec", "step_time_s", "peak_memory_gb", "started_at",
    "first_step_compile_time_s", "switch_stall_s", "total_elapsed_s", "steps_per_sec",
}  # fmt: skip
OF_THE_CLOCK = {*CLOCK_FIELDS, "offsets"}  # byte offsets vary with the length of clock fields
PHASE_ENDS = (40, 80)
STEPS, EVAL_EVERY, LOG_EVERY, CHECKPOINT_EVERY = 120, 10, 2, 5
POLL_SECONDS = 0.001
PATIENCE_STEPS = 30  # how long to wait for a state that does not come
# What a kill aims at, and the longest delay in seconds once it is seen: about as long as it lasts.
AIMS = {
    "start": 3.0,  # from the start of the process: nothing there yet, imports, restoring, the first step
    "prepare": 0.02,
    "step": 0.6,
    "eval": 0.05,
    "save": 0.1,
    "boundary": 0.03,
    "delete": 0.003,
    "cut": 0.003,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=30, help="minimum number of processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of what to aim at and when")
    parser.add_argument("--directory", type=Path, help="a new folder to work in, which is kept")
    parser.add_argument("--no-cache", action="store_true", help="killed runs go without the persistent compile cache")
    options = parser.parse_args(argv)
    if options.directory is not None:
        options.directory.mkdir(parents=True)
        sys.exit(kill_runs(options.directory.absolute(), options))
    with tempfile.TemporaryDirectory(prefix="kill_and_resume_") as folder:
        sys.exit(kill_runs(Path(folder), options))


def kill_runs(folder: Path, options: argparse.Namespace) -> int:
    """Train undisturbed, then kill and resume until there are enough kills. Returns the exit code."""
    chance = random.Random(options.seed)
    config = write_corpus(folder)
    whole = folder / "whole"
    started = time.monotonic()
    process = start(config, whole, folder / "store_whole", folder / "whole.log", cached=True)
    if process.wait():
        return failed(f"the undisturbed run ended with exit code {process.returncode}", folder / "whole.log")
    print(f"undisturbed: {STEPS} steps in {time.monotonic() - started:.1f} s", flush=True)
    expected = everything(whole)

    store, kills, first_steps, hit = folder / "store", 0, [], Counter()
    for number in range(1, 1 + options.kills):
        run, log = folder / f"killed_{number}", folder / f"killed_{number}.log"
        seen: set[str] = set()  # every line that a kill found in the record
        of_run = 0
        while True:
            aim = chance.choice(list(AIMS)) if kills < options.kills else None
            if aim == "prepare":
                unprepare(store)
            watched = Watched(run, store)
            process = start(config, run, store, log, cached=not options.no_cache)
            first_step_s = watch(process, watched, aim, chance)
            if first_step_s is not None:
                first_steps.append(first_step_s)
            if process.returncode == 0:
                break
            if process.returncode != -signal.SIGKILL:
                return failed(f"a resume of {run.name} ended with exit code {process.returncode}", log)
            kills, of_run = kills + 1, of_run + 1
            found = states(watched)
            hit.update(found)
            seen.update(record_lines(run))
            print(f"kill {kills:>3} of {run.name}, aimed at {aim:<8}: {', '.join(found)}", flush=True)
        problems = [*differences(expected, everything(run)), *unsound(run, store, seen)]
        if problems:
            return failed(
                "\n".join([f"{run.name}, killed {of_run} times, differs from the undisturbed run:", *problems])
            )
        print(f"{run.name}: killed {of_run} times, equal to the undisturbed run bit for bit", flush=True)
        if kills >= options.kills:
            break
    cache = "without" if options.no_cache else "with"
    print(f"\n{kills} kills of {number} runs, {cache} the compile cache, seed {options.seed}, "
          f"{time.monotonic() - started:.0f} s; all equal to the undisturbed run\n")  # fmt: skip
    print("| killed while | kills |\n|---|---:|")
    for state, count in hit.most_common():
        print(f"| {state} | {count} |")
    times = f"median {median(first_steps):.2f} s, fastest {min(first_steps):.2f}, slowest {max(first_steps):.2f}"
    print(f"\nfrom the start of a process to its first metrics row: {times} ({len(first_steps)} starts)")
    return 0


def failed(message: str, log: Path | None = None) -> int:
    print(f"FAILED: {message}", file=sys.stderr)
    if log is not None and log.exists():
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
    return 1


# --- the run ------------------------------------------------------------------------------------------------


def write_corpus(folder: Path) -> Path:
    """Write three sources, an eval set with text of its own, and a config that uses them. Returns the config's path."""
    chance = random.Random(0)
    words = {name: ["".join(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(300)]
             for name, letters in (("web", "etaoinshr"), ("code", "(){}=+-def"), ("law", "wpartyhsc"))}  # fmt: skip
    words["manual"] = words["code"] + words["law"]
    for name, vocabulary in words.items():
        documents = 60 if name == "manual" else 1500
        texts = (" ".join(chance.choices(vocabulary, k=chance.randint(15, 90))) for _ in range(documents))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = {
        "name": "kills",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 2, "d_model": 64, "n_head": 4, "n_kv_head": 2, "d_ff": 160,
                  "max_seq_len": 64, "dropout": 0.1},
        "sources": {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "3%"} for name in ("web", "code", "law")},
        "packing": {"mode": "best_fit"},
        "phases": [
            {"name": "foundation", "until": PHASE_ENDS[0], "mixture": {"web": 0.8, "code": 0.2}},
            {"name": "bridge", "until": PHASE_ENDS[1], "mixture": {"web": 0.4, "code": 0.2, "law": 0.4},
             "ramp_steps": 25},
            {"name": "domain", "until": "end", "mixture": {"law": 0.9, "web": 0.1}, "lr": {"decay_steps": 10}},
        ],
        "evalsets": {
            "every": EVAL_EVERY,
            "primary": {"held_out_of": "web", "max_sequences": 60},
            "sets": {"code": {"held_out_of": "code", "every": 2 * EVAL_EVERY, "max_sequences": 60},
                     "law": {"held_out_of": "law", "max_sequences": 60},
                     "manual": {"path": str(folder / "manual.jsonl"), "max_sequences": 60}},
        },
        "train": {"steps": STEPS, "batch_size": 8, "seq_len": 64},
        "optim": {"lr": 3e-3, "warmup_steps": 5, "decay_steps": 10},
        "averages": {"ema_decay": 0.95},
        "checkpoint": {"every": CHECKPOINT_EVERY, "keep": 2},
        "logging": {"every": LOG_EVERY},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config, indent=2))  # JSON is YAML
    return path


def start(config: Path, run: Path, store: Path, log: Path, *, cached: bool) -> subprocess.Popen:
    """`curriculum train --resume latest` in a process group of its own; what it prints is added to `log`."""
    variables = {} if cached else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    places = ["--run-dir", str(run), "--store-dir", str(store)]
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "curriculum", "train", str(config), *places, "--resume", "latest"],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | variables,
        )  # fmt: skip


def unprepare(store: Path) -> None:
    """Delete what is prepared, except compiled programs: the next start writes its token stores again."""
    for folder in store.glob("*"):
        if folder.name not in ("compiled", "locks"):
            shutil.rmtree(folder)  # and what a process killed while preparing left there


# --- the kill -----------------------------------------------------------------------------------------------


class Watched:
    """A run directory and its store: what a process finds there, and what it has changed since.

    Files that an earlier kill left behind say nothing about what this process is doing, so they are ignored.
    """

    def __init__(self, run: Path, store: Path):
        self.run, self.store = run, store
        self._lines: dict[Path, tuple[int, list[dict]]] = {}
        self._left = {self._identity(path) for name in _SIGNS for path in self._signs(name)}
        self._told_before = [*self.lines("events.jsonl")]

    def there(self, name: str) -> bool:
        """Whether this process has made a file or folder that is a sign of `name`."""
        return any(self._identity(path) not in self._left for path in self._signs(name))

    def told(self) -> bool:
        """Whether this process has recorded an event. One that it only cut the record back to was there before."""
        events = self.lines("events.jsonl")
        return bool(events) and events[-1] not in self._told_before

    def at_boundary(self) -> bool:
        """Whether the run is between the eval that closes a phase and the next row."""
        events = self.lines("events.jsonl")
        return bool(events) and events[-1]["step"] in PHASE_ENDS and self.step() == events[-1]["step"]

    def in_eval(self) -> bool:
        """Whether the record has the row of a step with an eval, but not the eval."""
        step, events = self.step(), self.lines("events.jsonl")
        evaluated = any(event["event"] == "eval" and event["step"] >= step for event in events)
        return bool(events) and step % EVAL_EVERY == 0 and not evaluated

    def step(self) -> int:
        """The step of the newest metrics row."""
        rows = self.lines("metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def lines(self, name: str) -> list[dict]:
        """The complete lines of a file of the record; parsed again only if its size has changed."""
        path = self.run / name
        size = path.stat().st_size if path.exists() else 0
        if path not in self._lines or self._lines[path][0] != size:
            self._lines[path] = (size, read_lines(path))
        return self._lines[path][1]

    def _signs(self, name: str) -> Iterator[Path]:
        return _glob(self.store if name == "preparing" else self.run, _SIGNS[name])

    @staticmethod
    def _identity(path: Path) -> tuple[Path, int]:
        """(path, ctime). Names are reused, but a folder made anew has another ctime."""
        try:
            return path, path.stat().st_ctime_ns
        except FileNotFoundError:  # deleted a moment ago
            return path, 0


_SIGNS = {
    "preparing": ["*/*.partial"],
    "cutting the record": ["superseded.pending.json*"],
    "deleting a checkpoint": ["checkpoints/.*.deleting", "gold/.*.deleting"],
    "saving": [f"{folder}/{name}" for folder in ("checkpoints", "gold") for name in (".*.saving*", "*.orbax-*-tmp*")],
}
_OF_AIM = {"prepare": "preparing", "cut": "cutting the record", "delete": "deleting a checkpoint", "save": "saving"}


def watch(process: subprocess.Popen, watched: Watched, aim: str | None, chance: random.Random) -> float | None:
    """Kill the process at a random moment after it reaches the state `aim`; with None, let it end.

    If the state does not come within PATIENCE_STEPS of the first row, kills anyway. Returns, once the process has
    ended, the seconds from its start to the first metrics row that it wrote, None if it wrote none.
    """
    started, metrics = time.monotonic(), watched.run / "metrics.jsonl"
    first_row_s = first_step = None
    reached = started if aim == "start" else None
    delay = 0.0 if aim is None else chance.uniform(0, AIMS[aim])
    let_by = chance.randint(0, 2) if aim in ("save", "eval", "delete") else 0  # do not always take the first occasion
    size, was = None, False
    try:
        while process.poll() is None:
            now, new_size = time.monotonic(), metrics.stat().st_size if metrics.exists() else 0
            if first_row_s is None and size is not None and new_size > size:
                first_row_s, first_step = now - started, watched.step()
            size = new_size
            if aim is not None and reached is None:
                there = aimed_at(aim, watched, first_row_s is not None)
                let_by -= there and not was
                was = there
                late = first_step is not None and watched.step() >= first_step + PATIENCE_STEPS
                if late or (there and let_by < 0) or (there and aim in ("prepare", "cut", "step", "boundary")):
                    reached = now
            if reached is not None and now - reached >= delay:
                break
            time.sleep(POLL_SECONDS)
    finally:  # also if this tool itself is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return first_row_s


def aimed_at(aim: str, watched: Watched, stepped: bool) -> bool:
    match aim:
        case "step":
            return stepped
        case "eval":
            return watched.told() and watched.in_eval()
        case "boundary":
            return watched.told() and watched.at_boundary()
    return watched.there(_OF_AIM[aim])


def states(watched: Watched) -> list[str]:
    """What the killed process was doing, judged by the files that it left."""
    found = [name for name in _SIGNS if watched.there(name)]
    if not watched.told():
        if not watched.run.exists():
            found.append("nothing there yet")
        return found or ["starting, nothing told yet"]
    events = watched.lines("events.jsonl")
    if events[-1]["event"] == "training_complete":
        return [*found, "done, but for its end"]
    if watched.at_boundary():
        found.append("at a phase boundary")
    if watched.in_eval():
        found.append("evaluating")
    return found or ["between updates"]


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a file, parsed."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


# --- what is compared ---------------------------------------------------------------------------------------


def everything(run: Path) -> dict[str, object]:
    """Everything that a finished run holds, by place, except clock fields and `resume` events."""
    from curriculum.find_checkpoint import checkpoint_steps, read_ledger
    from curriculum.run_directory import read_arrays
    from curriculum.train.checkpoints.arrays import load_params

    steps = checkpoint_steps(run / "checkpoints")
    events = [event for event in read_lines(run / "events.jsonl") if event["event"] != "resume"]
    found: dict[str, object] = {"checkpoints": steps}
    for folder in (run / "checkpoints" / str(steps[-1]), *_gold_folder(run, events)):
        for item in sorted(path.parent for path in folder.glob("*/_METADATA")):
            for place, array in _leaves(load_params(item), f"{folder.relative_to(run)}/{item.name}"):
                found[place] = None if array is None else (str(array.dtype), array.shape, array.tobytes())
        for place, value in _leaves(_without_clock(read_ledger(folder)), f"{folder.relative_to(run)}/ledger"):
            found[place] = value
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", read_lines(run / "metrics.jsonl"))):
        for number, line in enumerate(lines):
            where = f"{name}, line {number} ({line.get('event', 'row')} of step {line['step']})"
            found |= dict(_leaves(_without_clock(line), where))
    for path in sorted(run.glob("evals/*")):
        for name, array in read_arrays(path).items():
            found[f"evals/{path.name} {name}"] = (str(array.dtype), array.shape, array.tobytes())
    return found | shown_by_tensorboard(run)


def _gold_folder(run: Path, events: list[dict]) -> list[Path]:
    steps = [event["step"] for event in events if event["event"] == "gold_checkpoint"]
    return [run / "gold" / str(steps[-1])] if steps else []


def shown_by_tensorboard(run: Path) -> dict[str, object]:
    """Every point of every curve and text, from TensorBoard's own reader; values of clock fields are left out."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.util import tensor_util

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every restart
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0, "text": 0, "hparams": 0})
    multiplexer.AddRunsFromDirectory(str(run / "tensorboard"))
    multiplexer.Reload()
    found = {}
    for board, tags in multiplexer.Runs().items():
        for tag in tags["tensors"]:
            if tag.startswith("_hparams_"):  # names the run, and when it ended
                continue
            if tag in ("train/first_step_compile_time_s", "train/switch_stall_s"):  # a resume has one more
                continue
            of_the_clock = tag.rpartition("/")[2] in CLOCK_FIELDS
            found[f"tensorboard {board} {tag}"] = [
                (event.step, 0.0 if of_the_clock else tensor_util.make_ndarray(event.tensor_proto).tolist())
                for event in multiplexer.Tensors(board, tag)
            ]
    return found


def differences(expected: dict[str, object], got: dict[str, object]) -> list[str]:
    """A line for each place that differs, at most twenty."""
    problems = []
    for place in dict.fromkeys([*expected, *got]):
        if place not in got or place not in expected:
            problems.append(f"  {place}: {'missing' if place not in got else 'not in the undisturbed run'}")
        elif expected[place] != got[place]:
            problems.append(f"  {place}: {_short(got[place])}, undisturbed {_short(expected[place])}")
    return problems[:20]


def unsound(run: Path, store: Path, seen: set[str]) -> list[str]:
    """What is wrong with a finished run in itself: lines twice or lost, files left over.

    `seen`: every line that a kill found in the record.
    """
    problems = []
    events, rows = read_lines(run / "events.jsonl"), read_lines(run / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        problems.append("  metrics.jsonl: a step twice, or out of order")
    told = Counter((e["event"], e["step"]) for e in events if e["event"] not in ("resume", "schedule_edit"))
    problems += [f"  events.jsonl: {name} of step {step} {n} times" for (name, step), n in told.items() if n > 1]
    names = [event["event"] for event in events]
    if names[0] != "training_start" or names[-1] != "training_complete":
        problems.append(f"  events.jsonl: begins with {names[0]} and ends with {names[-1]}")
    for tag, points in shown_by_tensorboard(run).items():
        at = [step for step, value in points if isinstance(value, float)]  # texts may share a step
        if at != sorted(set(at)):
            problems.append(f"  {tag}: a step twice, or out of order")

    from curriculum.find_checkpoint import read_ledger

    drawn = {name: of["tokens_drawn"] for name, of in read_ledger(run / f"checkpoints/{STEPS}")["sources"].items()}
    if sum(drawn.values()) != STEPS * 8 * 64:
        problems.append(f"  ledger: {drawn} tokens drawn, expected {STEPS * 8 * 64} in all")

    kept, cut = record_lines(run), list(superseded_lines(run))
    if double := [line for line, n in Counter([*kept, *cut]).items() if n > 1]:
        problems.append(f"  in the record and superseded.jsonl together {len(double)} lines twice: {double[0][:200]}")
    if lost := seen - {*kept, *cut}:
        problems.append(f"  neither in the record nor in superseded.jsonl: {len(lost)} lines: {min(lost)[:200]}")
    signs = (path for name, patterns in _SIGNS.items() if name != "preparing" for path in _glob(run, patterns))
    left = [*signs, *_glob(store, _SIGNS["preparing"]), *run.rglob("*.tmp")]
    return problems + [f"  left over: {path}" for path in left]


def _glob(folder: Path, patterns: list[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from folder.glob(pattern)


def record_lines(run: Path) -> list[str]:
    """The lines of events.jsonl and metrics.jsonl, including a half-written last one."""
    lines = []
    for name in ("events.jsonl", "metrics.jsonl"):
        if (run / name).exists():
            lines += [f"{name} {line}" for line in (run / name).read_text().split("\n") if line]
    return lines


def superseded_lines(run: Path) -> Iterator[str]:
    for entry in read_lines(run / "superseded.jsonl"):
        line = entry["line"]
        yield f"{entry['file']} {line if isinstance(line, str) else json.dumps(line)}"


def _without_clock(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_clock(item) for key, item in value.items() if key not in OF_THE_CLOCK}
    return [_without_clock(item) for item in value] if isinstance(value, list) else value


def _leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from _leaves(item, f"{place}/{key}")
    else:
        yield place, value


def _short(value: object) -> str:
    text = value[2][:8].hex() + "..." if isinstance(value, tuple) else repr(value)
    return text if len(text) < 160 else text[:160] + "..."


if __name__ == "__main__":
    main()
