"""The program that test_processes.py starts: runs on simulated devices in one process, or as one of several."""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

from curriculum.config import build_config
from curriculum.train.processes.launch import find_launch
from curriculum.train.processes.together import is_first, joined

STEPS, SHOWN, BUILT = 12, 4, "the run is built"


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
    "record": {},
    "other": {},
}
# From which update on the disk of a process takes no longer files than that, the saves before it being over. What is next
# is to save the mean of the first phase, while the record waits; the checkpoint of step 12, beside a record of 13 kB; the
# record before it; and process 1's part of it.
FULL_AT = {"mean": (0, 7, 600), "full": (0, 8, 20_000), "record": (0, 8, 1), "other": (1, 8, 1)}


def end_as(folder: Path, port: str, num_processes: str, process_id: str, *names: str):
    """Runs of ENDS, of each of which is kept by what it ended."""
    from curriculum.train.checkpoints.folder import Checkpoints
    from curriculum.train.divergence import Diverged
    from curriculum.train.feed import Feed
    from curriculum.train.trainer import train
    from curriculum.train.watch import RegressionStop

    make, init, folders = Feed.__getitem__, Checkpoints.__init__, []

    def noted(self, *arguments, **options):
        folders.append(self)
        init(self, *arguments, **options)

    def fills(self, step):
        full_in, full_at, longest = FULL_AT.get(name, (None, None, None))
        if (full_in, full_at) == (int(process_id), step):
            while not all(saving.settled for saving in folders):
                time.sleep(0.01)
            sys.dont_write_bytecode = True  # a file cut short would stay
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


if __name__ == "__main__":
    run_them = end_as if sys.argv[-1] in ENDS else main
    run_them(Path(sys.argv[1]), *sys.argv[2:])
