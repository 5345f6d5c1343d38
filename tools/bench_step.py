"""Time the jitted training step on a resident batch, beside the same model written naively.

    python tools/bench_step.py --sizes small medium --rounds 3 --steps 30 --json bench.json

Variants, each in a process of its own, taking turns within a round:

    curriculum   curriculum.train.step as the trainer runs it, malloc settings included
    untuned      the same step with malloc as it comes
    naive        a plain-jax step of the same architecture: [B, T, D] throughout, einsum, optax.adamw

Times are of steps that are waited for one by one. On a machine that others use, believe the ratios, and of those
the ones of processor seconds first.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version

SIZES = {  # nanoGPT's CPU run and its default run; rows, positions and the fields of ModelConfig that they share
    "small": (12, 64, {"n_layer": 4, "n_head": 4, "d_model": 128}),
    "medium": (16, 256, {"n_layer": 6, "n_head": 6, "d_model": 384}),
}
VARIANTS = ("curriculum", "untuned", "naive")
VOCAB_SIZE, LEARNING_RATE, GRAD_CLIP = 65, 1e-3, 1.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each variant in each round")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(*args.measure, args.steps)))
        return

    results = []
    for size in args.sizes:
        runs = {variant: [] for variant in args.variants}
        for _ in range(args.rounds):
            for variant in args.variants:
                command = [sys.executable, __file__, "--measure", variant, size, "--steps", str(args.steps)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[variant].append(json.loads(done.stdout.splitlines()[-1]))
        results += summarise(size, runs)
    report = {"machine": machine(), "results": results}
    print_table(report)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


def measure(variant: str, size: str, num_steps: int) -> dict:
    """Times of one variant in this process: the first call, then `num_steps` of them after two more."""
    import jax
    import numpy as np

    from curriculum.model.presets import ModelConfig
    from curriculum.model.transformer import init_params, transformer
    from curriculum.train.device import tune_malloc
    from curriculum.train.optimizer import OptimConfig, make_optimizer
    from curriculum.train.step import init_state, make_train_step
    from phases.batches import Batch

    if variant == "curriculum":
        tune_malloc()
    num_rows, num_positions, shape = SIZES[size]
    config = ModelConfig(
        **shape,
        vocab_size=VOCAB_SIZE,
        n_kv_head=shape["n_head"],
        d_ff=4 * shape["d_model"],
        max_seq_len=num_positions,
        pos_encoding="learned",
        mlp_type="gelu",
        norm_type="layernorm",
    )
    params = jax.tree.map(jax.numpy.asarray, init_params(config, seed=0))
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, num_rows, num_positions + 1), np.int32)
    lr = jax.numpy.float32(LEARNING_RATE)
    if variant == "naive":
        step, state = naive_step(config, params)
        batch = jax.device_put((tokens[0, :, :-1], tokens[0, :, 1:]))
    else:
        optimizer = make_optimizer(OptimConfig())
        step = jax.jit(make_train_step(transformer(config), optimizer, 2, grad_clip=GRAD_CLIP), donate_argnums=0)
        state = jax.device_put(init_state(params, optimizer, num_sources=2))
        mask, zeros_AB = np.ones(tokens[..., 1:].shape, bool), np.zeros(tokens.shape[:2], np.int32)
        batch = Batch(tokens[..., :-1], tokens[..., 1:], mask, np.zeros_like(tokens[..., 1:]), zeros_AB)
        batch = jax.device_put(batch)

    seconds, cpu_seconds = [], []
    for _ in range(3 + num_steps):
        before, cpu_before = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(step(state, batch, lr))
        seconds.append(time.perf_counter() - before)
        cpu_seconds.append(time.process_time() - cpu_before)
    units_per_mb = 1 << 20 if sys.platform == "darwin" else 1 << 10  # getrusage counts in bytes there, else in KiB
    return {
        "tokens_per_step": num_rows * num_positions,
        "num_parameters": sum(array.size for array in jax.tree.leaves(params)),
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[3:],
        "cpu_step_seconds": cpu_seconds[3:],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb,
    }


def naive_step(config, params):
    """(jitted step, state) as one writes them without measuring; the arrays are those of curriculum's model."""
    import jax
    import jax.numpy as jnp
    import optax

    def layer_norm(scale_D, x_BTD):
        mean_BT1, var_BT1 = x_BTD.mean(-1, keepdims=True), x_BTD.var(-1, keepdims=True)
        return (x_BTD - mean_BT1) / jnp.sqrt(var_BT1 + config.norm_eps) * scale_D

    def attention(weights, x_BTD):
        def heads(name):
            kernel_DHK = weights[name]["kernel"].reshape(config.d_model, config.n_head, config.head_width)
            return jnp.einsum("btd,dhk->bthk", x_BTD, kernel_DHK)

        query_BTHK, key_BTHK, value_BTHK = heads("query"), heads("key"), heads("value")
        scores_BHTT = jnp.einsum("bqhk,bthk->bhqt", query_BTHK, key_BTHK) / config.head_width**0.5
        visible_TT = jnp.tril(jnp.ones(scores_BHTT.shape[-2:], bool))
        shares_BHTT = jax.nn.softmax(jnp.where(visible_TT, scores_BHTT, -jnp.inf))
        mixed_BTHK = jnp.einsum("bhqt,bthk->bqhk", shares_BHTT, value_BTHK)
        kernel_HKD = weights["out"]["kernel"].reshape(config.n_head, config.head_width, config.d_model)
        return jnp.einsum("bthk,hkd->btd", mixed_BTHK, kernel_HKD)

    def mlp(weights, x_BTD):
        inner_BTF = jax.nn.gelu(jnp.einsum("btd,df->btf", x_BTD, weights["up"]["kernel"]))
        return jnp.einsum("btf,fd->btd", inner_BTF, weights["down"]["kernel"])

    def mean_nats(params, inputs_BT, targets_BT):
        x_BTD = params["embed"]["embedding"][inputs_BT] + params["positions"]["embedding"][: inputs_BT.shape[1]]
        for block in params["blocks"].values():
            x_BTD += attention(block["attention"], layer_norm(block["attention_norm"]["scale"], x_BTD))
            x_BTD += mlp(block["mlp"], layer_norm(block["mlp_norm"]["scale"], x_BTD))
        x_BTD = layer_norm(params["norm"]["scale"], x_BTD)
        logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, params["embed"]["embedding"])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()

    def make_optimizer(lr):
        def matrices(params):
            return jax.tree.map(lambda array: array.ndim >= 2, params)

        return optax.chain(
            optax.clip_by_global_norm(GRAD_CLIP), optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)
        )

    def step(state, batch, lr):
        params, opt_state, _ = state
        loss, grads = jax.value_and_grad(mean_nats)(params, *batch)
        updates, opt_state = make_optimizer(lr).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=0), (params, make_optimizer(LEARNING_RATE).init(params), jnp.float32(0))


def summarise(size: str, runs: dict[str, list[dict]]) -> list[dict]:
    """One row a variant; ratios are against the last variant, above 1 where the row is faster."""
    import numpy as np

    rows = []
    for variant, measured in runs.items():
        ms = np.concatenate([run["step_seconds"] for run in measured]) * 1e3
        cpu_ms = np.concatenate([run["cpu_step_seconds"] for run in measured]) * 1e3
        rows.append(
            {
                "size": size,
                "variant": variant,
                "num_parameters": measured[0]["num_parameters"],
                "tokens_per_sec": round(measured[0]["tokens_per_step"] / np.median(ms) * 1e3, 1),
                "ms_median": round(float(np.median(ms)), 3),
                "ms_p10": round(float(np.percentile(ms, 10)), 3),
                "ms_p90": round(float(np.percentile(ms, 90)), 3),
                "cpu_ms_median": round(float(np.median(cpu_ms)), 3),
                "compile_seconds": round(float(np.median([run["first_step_seconds"] for run in measured])), 2),
                "peak_memory_mb": round(max(run["peak_memory_mb"] for run in measured)),
            }
        )
    for row in rows:
        row["speed_ratio"] = round(rows[-1]["ms_median"] / row["ms_median"], 3)
        row["cpu_ratio"] = round(rows[-1]["cpu_ms_median"] / row["cpu_ms_median"], 3)
    return rows


def print_table(report: dict) -> None:
    print(", ".join(f"{key}: {setting}" for key, setting in report["machine"].items()))
    columns = [name for name in report["results"][0] if name != "num_parameters"]
    print("  ".join(f"{name:>15}" for name in columns))
    for row in report["results"]:
        print("  ".join(f"{row[name]:>15}" for name in columns))


def machine() -> dict:
    model = platform.processor()
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return {"name": platform.node(), "processor": model, "cores": os.cpu_count(), "jax": version("jax")}


if __name__ == "__main__":
    main()
