"""Time what a save costs training, in the save itself and in the steps after it, against a synchronous save.

    python tools/bench_checkpoint.py [--megabytes 300] [--rounds 5] [--json FILE]

The state is AdamW's over a transformer, with random moments, so that nothing compresses; the loop is the trainer's
update on few tokens. Windows of equally many steps take turns, each round in another order, as a window may find memory
that the one before it gave back:

    no save
    synchronous    a save that is waited for
    background     a save in the background
    blocked        a save in the background that begins to write only when the update after it is over

`waited_ms` is the time until `save` returns, the check for infinities included, plus the time by which the update after
it exceeds the same update of a window without a save, as the state is copied then. In `blocked` this is exactly what
training has to wait for. `lost_ms` is a window's time beyond that of a window without a save. While writing goes on
beside steps, both figures also include what the writer's threads, the checksums and the disk take from the cores, which
two cores cannot hide.
"""

import statistics
import tempfile
import threading
import time
from pathlib import Path
from random import Random

from results import json_parser, report

ROWS, POSITIONS, STEPS = 1, 64, 10  # steps: of a window


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=300, help="minimum size of parameters and moments")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = measure(Path(folder), args.megabytes, args.rounds)
    report(rows, args.json, "jax")


def measure(folder: Path, megabytes: int, num_rounds: int) -> list[dict]:
    from curriculum.train.device import tune_malloc

    tune_malloc()
    import jax
    import numpy as np

    from curriculum.model.presets import ModelConfig
    from curriculum.model.transformer import init_params, transformer
    from curriculum.train.checkpoints.arrays import in_turn
    from curriculum.train.checkpoints.finite import check_finite
    from curriculum.train.checkpoints.folder import Checkpoints
    from curriculum.train.optimizer import OptimConfig, make_optimizer
    from curriculum.train.step import init_state, make_train_step
    from phases.batches import Batch

    width = 512
    num_layers = -(-megabytes * 10**6 // (12 * 12 * width**2))  # 12 bytes a parameter, 12 x width^2 of them a layer
    config = ModelConfig(
        vocab_size=512,
        n_layer=num_layers,
        n_head=8,
        n_kv_head=8,
        d_model=width,
        d_ff=4 * width,
        max_seq_len=POSITIONS,
        mlp_type="gelu",
    )
    random = np.random.default_rng(0)
    optimizer = make_optimizer(OptimConfig())
    state = init_state(jax.tree.map(jax.numpy.asarray, init_params(config, seed=0)), optimizer, num_sources=1)
    noise = jax.tree.map(
        lambda x: x if x.ndim < 2 else np.square(random.standard_normal(x.shape, np.float32)) * 1e-4, state.opt_state
    )
    state = jax.device_put(state._replace(opt_state=noise))
    step = jax.jit(make_train_step(transformer(config), optimizer, 1, grad_clip=1.0), donate_argnums=0)
    tokens = random.integers(0, 512, (1, ROWS, POSITIONS + 1), np.int32)
    mask, zeros_AB = np.ones((1, ROWS, POSITIONS), bool), np.zeros((1, ROWS), np.int32)
    batch = Batch(tokens[..., :-1], tokens[..., 1:], mask, np.zeros_like(tokens[..., 1:]), zeros_AB)
    batch, lr = jax.device_put(batch), jax.numpy.float32(1e-5)
    checkpoints = Checkpoints(folder / "checkpoints")
    baselines = {"primary": np.zeros((1, 8), np.float32)}

    def window(save: str | None) -> dict:
        nonlocal state
        times, saving_s, updated = [], 0.0, threading.Event()
        started, cpu_started = time.perf_counter(), time.process_time()
        for i in range(STEPS):
            if i == 1 and save is not None:
                if save == "blocked":
                    in_turn.submit(updated.wait)
                before = time.perf_counter()
                check_finite(state)  # as `check_diverged` does before every save
                checkpoints.save(state, {}, baselines)
                if save == "synchronous":
                    checkpoints.wait()
                saving_s = time.perf_counter() - before
            before = time.perf_counter()
            state = jax.block_until_ready(step(state, batch, lr))
            times.append(time.perf_counter() - before)
            if i == 1:
                updated.set()
        seconds = time.perf_counter() - started
        checkpoints.wait()
        cpu_seconds = time.process_time() - cpu_started
        return {"seconds": seconds, "saving": saving_s, "after": times[1], "steps": times[2:], "cpu": cpu_seconds}

    variants = {"no save": None, **{name: name for name in ("synchronous", "background", "blocked")}}
    taken, random_order = {name: [] for name in variants}, Random(0)
    for round_ in range(num_rounds + 1):
        for name, save in random_order.sample(list(variants.items()), len(variants)):
            result = window(save)
            if round_:  # the first round compiles, and allocates memory that later ones reuse
                taken[name].append(result)
    checkpoints.close()
    median = {
        name: {key: statistics.median(r[key] for r in results) for key in ("seconds", "saving", "after", "cpu")}
        for name, results in taken.items()
    }
    bare = median["no save"]
    step_s = statistics.median(s for r in taken["no save"] for s in r["steps"])
    sync_s = median["synchronous"]["saving"]
    state_mb = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes")) / 1e6
    rows = []
    for name, of_window in median.items():
        waited_s = of_window["saving"] + of_window["after"] - bare["after"]
        rows.append(
            {
                "variant": name,
                "state_mb": round(state_mb),
                "step_ms": round(step_s * 1e3, 1),
                "window_ms": round(of_window["seconds"] * 1e3),
                "lost_ms": round((of_window["seconds"] - bare["seconds"]) * 1e3),
                "until_saved_ms": round(of_window["saving"] * 1e3),
                "step_after_ms": round(of_window["after"] * 1e3),
                "waited_ms": round(waited_s * 1e3),
                "waited_share": round(waited_s / sync_s, 3),
                "lost_share": round((of_window["seconds"] - bare["seconds"]) / sync_s, 3),
                "cpu_extra_ms": round((of_window["cpu"] - bare["cpu"]) * 1e3),
                "compared_with": "the synchronous save of the same state",
            }
        )
    return rows


if __name__ == "__main__":
    main()
