"""Check that resident memory stays flat while a run trains, and bounded while a large source is prepared.

    python tools/check_resident_memory.py train --steps 10000
    python tools/check_resident_memory.py prepare --gigabytes 2 --directory /a/disk/with/6/GB

`train`: a run of a tiny model in a process of its own, with evals, checkpoints and TensorBoard. Its resident memory is
sampled ten times a second, and a line is fitted over the last 80 % of the steps and over the last half. Both slopes
must stay below 1 MB per 1,000 steps. `prepare`: `curriculum prepare` of generated JSONL text. Its peak must stay
below 1 GB. Both print their figures and exit with 1 if the limit is passed. Linux only: they read /proc.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from curriculum.record.events import last_row

SAMPLE_SECONDS = 0.1
LIMIT_MB, LIMIT_GB = 1.0, 1.0  # most that 1,000 steps may add, and that may be resident while a source is prepared
FROM = (0.2, 0.5)  # shares of the steps to fit from; two, as memory that is freed once could hide growth in one fit


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="a long run of a tiny model", allow_abbrev=False)
    train.add_argument("--steps", type=int, default=10_000)
    train.add_argument("--saves", type=int, default=20, help="checkpoints saved during the run")
    prepare = commands.add_parser("prepare", help="one large source", allow_abbrev=False)
    prepare.add_argument("--gigabytes", type=float, default=2.0, help="size of the generated text")
    for command in (train, prepare):
        command.add_argument("--directory", type=Path, help="folder to work in; what is made there is removed")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="resident_memory_") as folder:
        check = check_train if options.command == "train" else check_prepare
        sys.exit(0 if check(Path(folder), options) else 1)


def check_train(folder: Path, options: argparse.Namespace) -> bool:
    """Whether a run's memory is flat after its warm-up. Prints the figures."""
    write_text(folder / "web.jsonl", 2e6, seed=0)
    write_text(folder / "law.jsonl", 1e6, seed=1)
    every = max(1, options.steps // 20)
    config = {
        "name": "memory",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 64},
        "sources": {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "1%"} for name in ("web", "law")},
        "phases": [
            {"name": "foundation", "until": "50%", "mixture": {"web": 0.9, "law": 0.1}},
            {"name": "domain", "until": "end", "mixture": {"web": 0.2, "law": 0.8}, "ramp_steps": every},
        ],
        "evalsets": {
            "every": every,
            "primary": {"held_out_of": "web"},
            "sets": {"law": {"held_out_of": "law", "max_sequences": 50}},
        },
        "train": {"steps": options.steps, "batch_size": 4, "seq_len": 64},
        "optim": {"lr": 1e-3, "warmup_steps": 10, "decay_steps": every},
        "checkpoint": {"every": max(1, options.steps // options.saves)},
    }
    run = folder / "run"
    started = time.monotonic()
    process = start("train", folder, config, "--run-dir", str(run))
    samples = []  # step, resident MB, of it anonymous
    while process.poll() is None:
        memory, row = resident_mb(process.pid), last_row(run)
        if memory is not None and row is not None:
            samples.append((row["step"], *memory))
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}")
    steps_N, resident_N, anonymous_N = np.array(samples, float).T
    for share in np.linspace(0.05, 1, 20):
        i = min(int(np.searchsorted(steps_N, share * options.steps)), len(steps_N) - 1)
        print(f"step {steps_N[i]:>7,.0f}: {resident_N[i]:.1f} MB resident, {anonymous_N[i]:.1f} anonymous")
    print(f"{options.steps:,} steps in {time.monotonic() - started:.0f} s; limit {LIMIT_MB:g} MB per 1,000 steps")
    growths = []
    for share in FROM:
        late_N = steps_N >= share * options.steps
        growth, anonymous = (
            np.polyfit(steps_N[late_N] / 1000, of_N[late_N], 1)[0] for of_N in (resident_N, anonymous_N)
        )
        growths.append(growth)
        print(f"from {share:.0%} on: {growth:+.3f} MB per 1,000 steps resident ({anonymous:+.3f} anonymous)")
    return max(growths) < LIMIT_MB


def check_prepare(folder: Path, options: argparse.Namespace) -> bool:
    """Whether preparing stays below the limit at its peak. Prints the figures."""
    text_bytes = options.gigabytes * 1e9
    if (free := shutil.disk_usage(folder).free) < 3 * text_bytes:
        sys.exit(f"{folder}: {free / 1e9:.1f} GB free, expected {3 * text_bytes / 1e9:.1f}; give another --directory")
    write_text(folder / "web.jsonl", text_bytes, seed=0)
    config = {
        "name": "memory",
        "tokenizer": {"kind": "bpe", "vocab_size": 4096},
        "model": {"preset": "tiny"},
        "sources": {"web": {"path": str(folder / "web.jsonl"), "held_out": "1%"}},
        "phases": [{"name": "all", "until": "end", "mixture": {"web": 1.0}}],
        "evalsets": {"primary": {"held_out_of": "web", "max_sequences": 1000}},
        "train": {"steps": 100, "batch_size": 8, "seq_len": 256},
        "optim": {"lr": 1e-3, "warmup_steps": 10, "decay_steps": 10},
    }
    started = time.monotonic()
    process = start("prepare", folder, config)
    peak = peak_anonymous = 0.0
    while process.poll() is None:
        memory = resident_mb(process.pid, "VmHWM")  # the kernel's own peak: nothing is missed between samples
        if memory is not None:
            peak, peak_anonymous = max(peak, memory[0]), max(peak_anonymous, memory[1])
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"prepare ended with exit code {process.returncode}")
    source_gb = (folder / "web.jsonl").stat().st_size / 1e9
    print(
        f"prepare of {source_gb:.2f} GB: {peak:,.0f} MB resident at the peak "
        f"({peak_anonymous:,.0f} anonymous), {time.monotonic() - started:.0f} s; limit {LIMIT_GB * 1000:,.0f}"
    )
    return peak < LIMIT_GB * 1000


def start(command: str, folder: Path, config: dict, *options: str) -> subprocess.Popen:
    """Start a `curriculum` command on a config, with the token stores in the same folder."""
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    arguments = [command, str(folder / "config.yaml"), "--store-dir", str(folder / "store"), *options]
    return subprocess.Popen([sys.executable, "-m", "curriculum", *arguments], stdout=subprocess.DEVNULL)


def write_text(path: Path, num_bytes: float, seed: int) -> None:
    """Write JSONL documents of 5 to 500 made-up words.

    A few words are common, most are rare, and one in forty occurs only once, so a tokenizer always finds new ones.
    """
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 11))) for _ in range(30_000)])
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            lengths = rng.integers(5, 501, 2000)
            ranks = (len(words) ** rng.random(lengths.sum())).astype(int) - 1
            drawn = words[ranks]
            once = np.flatnonzero(rng.random(len(drawn)) < 1 / 40)
            drawn[once] = [f"{number:x}" for number in rng.integers(1 << 36, 1 << 40, len(once))]
            for document in np.split(drawn, np.cumsum(lengths)[:-1]):
                line = f'{{"text": "{" ".join(document.tolist())}"}}\n'
                file.write(line)
                written += len(line)
                if written >= num_bytes:
                    return


def resident_mb(process_id: int, field: str = "VmRSS") -> tuple[float, float] | None:
    """(resident memory by `field`, anonymous memory right now) of a process in MB; None while it is ending."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if field not in fields:
        return None
    return tuple(int(fields[name].split()[0]) * 1024 / 1e6 for name in (field, "RssAnon"))


if __name__ == "__main__":
    main()
