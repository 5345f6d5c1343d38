"""Measure what a phase switch costs: what is compiled for it, and how long training stalls.

    python tools/bench_switch.py --json bench.json

Two runs of `curriculum.train.trainer.train`, like a user's, except that every step is logged and so timed:

    same shapes    the phases change the mixture only. Compares the steps right after a switch with all steps, and with
                   those after an eval in the middle of a phase, since there is an eval at every switch too
    other shapes   the phases change seq_len, batch_size and rope_theta. Tells when and where each update was compiled;
                   how much longer the first update of a phase took than the others of its shape; and how much of that
                   the host took to start it (`switch_stall_s`). Background compilation is over by the first switch: if
                   need be, the last update before it waits

The model is that of nanoGPT's CPU run, 4 layers of 128, unless --small is given.
"""

import contextlib
import io
import json
import tempfile
import threading
from pathlib import Path

import numpy as np
from results import json_parser, machine, print_figures, print_table, write_json

MODELS = {
    False: {"n_layer": 4, "d_model": 128, "n_head": 4, "n_kv_head": 4, "d_ff": 512},
    True: {"n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 2, "d_ff": 64},
}
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event for each program that the backend compiles
SWITCHES, STEPS = 24, 12  # of the run whose shapes stay the same, and of each of its phases
STEPS_A_SHAPE = 600  # of each phase of the other run
SHAPES = [  # of the second run: (phase, shape)
    ("short", {"seq_len": 16, "batch_size": 48}),
    ("base", {}),
    ("small", {"batch_size": 6}),
    ("long", {"seq_len": 128, "batch_size": 6, "rope_theta": 50_000.0}),
]


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="use a model of one layer")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_sources(folder)
        report = {
            "machine": machine("jax"),
            "same_shapes": same_shapes(folder, MODELS[args.small]),
            "other_shapes": other_shapes(folder, MODELS[args.small]),
        }
    print_tables(report)
    write_json(args.json, report)


def same_shapes(folder: Path, model: dict) -> dict:
    """Measure a run of phases that differ only in their mixtures."""
    phases = [
        {"name": f"p{i}", "until": (i + 1) * STEPS, "mixture": {"web": 1 + i % 2, "law": 2 - i % 2}}
        for i in range(SWITCHES + 1)
    ]
    rows, compiled, _ = run(folder, "same", phases, model, evals_every=STEPS // 2)
    by_step = {row["step"]: row["step_time_s"] for row in rows[1:]}  # the first includes compiling
    after = [by_step[phase["until"] + 1] for phase in phases[:-1]]
    after_eval = [by_step[phase["until"] - STEPS // 2 + 1] for phase in phases]
    first_switch, last_update = phases[0]["until"], phases[-1]["until"] - 1
    return {
        "switches": SWITCHES,
        "compilations_before_the_first_switch": sum(step < first_switch for step, _, _ in compiled),
        # The run's only checkpoint, after the last update, has its copy compiled.
        "compilations_after_it": sum(first_switch <= step < last_update for step, _, _ in compiled),
        "median_step_ms": ms(np.median(list(by_step.values()))),
        "median_step_after_a_switch_ms": ms(np.median(after)),
        "median_step_after_another_eval_ms": ms(np.median(after_eval)),
        "after_a_switch_over_all": round(float(np.median(after) / np.median(list(by_step.values()))), 3),
        "after_a_switch_over_after_another_eval": round(float(np.median(after) / np.median(after_eval)), 3),
        "median_stall_ms": ms(np.median([row["switch_stall_s"] for row in rows if "switch_stall_s" in row])),
    }


def other_shapes(folder: Path, model: dict) -> list[dict]:
    """Measure a run in which every phase has a shape of its own; one row per phase."""
    num_steps = STEPS_A_SHAPE
    phases = [
        {"name": name, "until": (i + 1) * num_steps, "mixture": {"web": 0.5, "law": 0.5}, **shape}
        for i, (name, shape) in enumerate(SHAPES)
    ]
    # The first eval after step 0 saves a gold, which slows the next updates: it must come before any switch.
    rows, compiled, setup = run(folder, "other", phases, model, evals_every=num_steps // 2)
    by_step = {row["step"]: row for row in rows}
    compile_s = setup.compiled.updates.seconds
    updates = dict(zip(compile_s, of_updates(setup, compiled), strict=True))
    found = []
    for i, phase in enumerate(phases):
        first = i * num_steps
        shape = setup.course.shape_at(first)
        steps_s = [by_step[step]["step_time_s"] for step in range(first + 3, first + num_steps + 1)]
        step_s = float(np.median(steps_s))
        stall_s = by_step[first + 1].get("switch_stall_s")
        found.append(
            {
                "phase": phase["name"],
                "shape": str(shape),
                "needed_at_step": first,
                "compiled_during_step": updates[shape][0],
                "in": updates[shape][1],
                "compile_s": round(compile_s[shape], 2),
                "median_step_ms": ms(step_s),
                "p95_step_ms": ms(np.quantile(steps_s, 0.95)),
                "first_step_ms": None if stall_s is None else ms(by_step[first + 1]["step_time_s"]),
                "stall_in_steps": None if stall_s is None else round(by_step[first + 1]["step_time_s"] / step_s - 1, 2),
                "switch_stall_ms": None if stall_s is None else ms(stall_s),
            }
        )
    return found


def of_updates(setup, compiled: list[tuple[int, str, float]]) -> list[tuple[int, str]]:
    """(step under way, where) of the compilation of each update: the first in the foreground, the others in the
    background thread, in order."""
    background = [(step, "background") for step, thread, _ in compiled if thread.startswith("curriculum-compile")]
    return [(0, "foreground"), *background][: len(setup.compiled.updates.seconds)]  # evals are compiled after them


def run(folder: Path, name: str, phases: list[dict], model: dict, evals_every: int):
    """Train a run. Returns (metrics rows, compilations as (step under way, thread, seconds), its setup)."""
    from jax import monitoring

    from curriculum.config import build_config
    from curriculum.run import load_run
    from curriculum.train.setup import Setup
    from curriculum.train.trainer import train

    at, setups, compiled = [0], [], []

    def listen(event: str, seconds: float, **_) -> None:
        if event == COMPILED:
            compiled.append((at[0], threading.current_thread().name, seconds))

    def update_at(setup, step):
        at[0], setups[:] = step, [setup]
        if step == phases[0]["until"] - 1:
            # Whatever is compiled ahead is queued by this step: wait for it.
            setup.compiled.updates._worker.submit(lambda: None).result()
        return unwatched(setup, step)

    config = build_config(
        {
            "name": name,
            "tokenizer": {"kind": "byte"},
            "model": {"preset": "tiny", **model, "max_seq_len": 128},
            "sources": {
                source: {"path": str(folder / f"{source}.jsonl"), "held_out": "5%"} for source in ("web", "law")
            },
            "phases": phases,
            "evalsets": {"every": evals_every, "primary": {"held_out_of": "web", "max_sequences": 4}, "sets": {}},
            "train": {"steps": phases[-1]["until"], "batch_size": 12, "seq_len": 64},
            "optim": {"lr": 1e-30},  # no eval is better than the first, so that no gold is saved at a phase's end
            "checkpoint": {"every": 10**6},
            "logging": {"every": 1, "tensorboard": False},
        }
    )
    unwatched, Setup.update_at = Setup.update_at, update_at
    monitoring.register_event_duration_secs_listener(listen)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, folder / name, store_dir=folder / "store")
    finally:
        Setup.update_at = unwatched
        monitoring.unregister_event_duration_listener(listen)
    return load_run(folder / name).metrics, compiled, setups[0]


def write_sources(folder: Path) -> None:
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(random.choice(letters, int(random.integers(2, 9)))) for _ in range(1000)]
    for name in ("web", "law"):
        texts = [" ".join(random.choice(words, 300)) for _ in range(300)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 3)


def print_tables(report: dict) -> None:
    print_figures(report["machine"])
    print("\nphases of the same shapes")
    for name, value in report["same_shapes"].items():
        print(f"  {name:40} {value:>10}")
    print("\nphases of other shapes")
    print_table(report["other_shapes"])


if __name__ == "__main__":
    main()
