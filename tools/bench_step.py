"""Time one update of one model and batch: in `curriculum train`, on its own, in plain jax, and in torch.

    python tools/bench_step.py --json bench.json
    python tools/bench_step.py --sizes small --variants step step:layers=scanned step:attention=xla step:skip=select
    python tools/bench_step.py --sizes medium long --variants step step:blocks=1 step:blocks=4
    python tools/bench_step.py --sizes small --variants step:n_layer=24 step:n_layer=24,layers=scanned
    python tools/bench_step.py --sizes small --variants step plain --wait-every 1
    python tools/bench_step.py --sizes gpt2-124m llama-360m llama-1b --dtype bfloat16

    train           `curriculum train` in a process of its own: text, logging every 10 steps, checkpoints, TensorBoard;
                    its times are those of its record (`step_time_s`, without evals and saves); the first row is left
                    out
    step            the update of curriculum.train.step on a batch that is on the device already; after a colon there
                    may follow fields of ModelConfig and of Formulation (curriculum/model/formulation.py), and blocks=N
                    (at most N blocks of queries in plain attention)
    plain           tools/plain_jax.py, which has GPT-2's sizes only
    torch, torch_compile, hf, hf_compile, hf_trainer      tools/torch_update.py; the first two have GPT-2's sizes only

Each variant but `train` is a process that stays alive; they take turns, a few steps at a time after one that is not
timed. A time is the mean of ten steps, as in the record of a run: as there, they are dispatched one after the other and
waited for at the end, which hides what a dispatch takes (`--wait-every 1` waits for each). Those in jax have the
trainer's malloc. The machine may be shared: trust only the ratios within one run. What cannot run, or fails, is left
out and named at the end. An update's FLOPs are 6 per token and parameter of the blocks' matrices and the head, and 6 x
layers x positions x width per token for attention's two products (causal: half of 12). flop_share, the model FLOP
utilisation, is FLOPs per second over a peak. On a CPU that is the best float32 product of 1,024 x 1,024 matrices in the
same run. On a GPU it is the dense bfloat16 figure of the card's data sheet, halved for float32, whose products are TF32
there, in jax by default and in torch as asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from results import json_parser, machine, print_figures, print_table, write_json

LEARNING_RATE, GRAD_CLIP, LOG_EVERY = 1e-3, 1.0, 10
# nanoGPT's CPU run, its default, that with longer rows, and some for a GPU; LLAMAS are presets.
# SIZES: rows, positions, layers, heads, width, vocabulary.
# TURNS: rounds, steps of each variant in a round, and steps of `train`.
SIZES = {
    "small": (12, 64, 4, 4, 128, 65),
    "medium": (16, 256, 6, 6, 384, 65),
    "long": (4, 1024, 6, 6, 384, 65),
    "gpt2-124m": (32, 1024, 12, 12, 768, 50_257),
    "gpt2-355m": (16, 1024, 24, 16, 1024, 50_257),
    "llama-360m": (16, 1024, 32, 15, 960, 49_152),
    "llama-1b": (4, 2048, 16, 32, 2048, 128_256),
}
TURNS = {
    "small": (3, 100, 120),
    "medium": (4, 10, 20),
    "long": (4, 10, 20),
}
TURNS_ON_A_CARD = (3, 20, 60)
VARIANTS = ("train", "step", "plain", "torch", "torch_compile", "hf", "hf_compile", "hf_trainer")
LLAMAS, OF_GPT2 = ("llama-360m", "llama-1b"), ("plain", "torch", "torch_compile")
TORCH_NEEDS = {"torch": [], "torch_compile": [], "hf": ["transformers"], "hf_compile": ["transformers"]}
TORCH_NEEDS |= {"hf_trainer": ["transformers", "accelerate"]}
TARGETS = {  # by size: (first, second, least ratio of their speeds)
    "small": [("train", "step", 0.97), ("step", "plain", 0.97), ("step", "torch", 1.6), ("step", "torch_compile", 1.6)],
    "medium": [
        ("train", "step", 0.97),
        ("step", "plain", 0.97),
        ("step", "torch", 1.4),
        ("step", "torch_compile", 1.4),
    ],
    "long": [("train", "step", 0.97), ("step", "plain", 0.97), ("step", "torch", 1.0), ("step", "torch_compile", 1.0)],
    "gpt2-124m": [("train", "step", 0.97), ("step", "plain", 0.97), ("train", "hf_compile", 1.0)],
    "llama-360m": [("train", "step", 0.97), ("train", "hf_compile", 1.0)],
    "llama-1b": [("train", "step", 0.97), ("train", "hf_compile", 1.0)],
}
DATA_SHEET = {  # FLOPs a second of dense bfloat16 products, by a part of the card's name; the first that fits counts
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, help="rounds per variant; by default 3, for medium and long 4")
    parser.add_argument(
        "--steps", type=int, help="timed steps per round; by default 20, for small 100, for medium and long 10"
    )
    parser.add_argument(
        "--wait-every",
        type=int,
        default=LOG_EVERY,
        help=f"steps between two waits for the device; by default {LOG_EVERY}, as in a run",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of matrix products")
    parser.add_argument("--worker", nargs=2, metavar=("VARIANT", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # The processes are there at once: on a card each would otherwise take three quarters of what is free.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.worker:
        return work(*args.worker, args.dtype, args.wait_every)
    if args.wait_every < 1:
        parser.error(f"--wait-every: got {args.wait_every}, expected 1 or more")
    if unknown := [name for name in args.variants if name.partition(":")[0] not in VARIANTS]:
        parser.error(f"--variants: no such variant: {', '.join(unknown)} (variants: {', '.join(VARIANTS)})")
    if fixed := [name for name in args.variants if ":" in name and not name.startswith("step:")]:
        parser.error(f"--variants: {', '.join(fixed)}: only step takes settings, such as step:layers=scanned")

    report = {
        "machine": machine("jax", "torch", "transformers"),
        "dtype": args.dtype,
        "skipped": {},
        "results": [],
        "ratios": [],
    }
    variants = []
    for name in args.variants:
        if why := missing(name):
            report["skipped"][name] = why
        else:
            variants.append(name)
    any_failed = False
    for size in args.sizes:
        left_out = [name for name in variants if name in OF_GPT2 and size in LLAMAS]
        report["skipped"] |= {f"{name} of {size}": "only sizes of GPT-2's shape" for name in left_out}
        rows, failed, card = measure(size, [name for name in variants if name not in left_out], args)
        report["machine"] |= card
        any_failed |= bool(failed)
        report["skipped"] |= {f"{name} of {size}": why for name, why in failed.items()}
        report["results"] += rows
        report["ratios"] += ratios(size, rows)
    print_report(report)
    write_json(args.json, report)
    if any_failed:
        sys.exit(1)


def missing(variant: str) -> str | None:
    """Why a variant cannot run here; None if it can."""
    for module in ["torch", *TORCH_NEEDS[variant]] if variant in TORCH_NEEDS else []:
        if find_spec(module) is None:
            return f"{module} is not installed (make parity; accelerate comes with the extra `judge`)"
    if variant in ("torch_compile", "hf_compile") and shutil.which("g++") is None:
        return "torch.compile needs a C++ compiler, and there is no g++"
    return None


# ------------------------------------------------------------------------------------------ the parent process


def measure(size: str, variants: list[str], args: argparse.Namespace) -> tuple[list[dict], dict[str, str], dict]:
    """A row for each variant, timed in turns; why others failed, by name; and the card, if there is one."""
    rounds, steps, train_steps = TURNS.get(size, TURNS_ON_A_CARD)
    rounds, steps = args.rounds or rounds, args.steps or steps
    failed = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {"peak": stack.enter_context(Worker("peak", size, args))}
        for variant in variants:
            try:
                if variant == "train":
                    workers[variant] = TrainRuns(folder, size, args.dtype, args.steps or train_steps)
                else:
                    workers[variant] = stack.enter_context(Worker(variant, size, args))
                    workers[variant].turn(2)  # warm up
                    workers[variant].forget()
            except Failed as error:
                failed[variant] = str(error)
        workers = {name: worker for name, worker in workers.items() if name not in failed}
        for number in range(rounds):
            names = list(workers)
            for name in names if number % 2 == 0 else reversed(names):
                try:
                    workers[name].turn(steps)
                except Failed as error:
                    if name == "peak":
                        raise
                    failed[name] = str(error)
                    del workers[name]
                print(f"{size}: round {number + 1} of {rounds}: {name}", file=sys.stderr)
    peak = workers.pop("peak")
    flops_per_sec = max(peak.flops_per_sec, default=None)
    return [row_of(size, variant, worker, flops_per_sec) for variant, worker in workers.items()], failed, peak.about


def config_of(size: str, **settings):
    """The model of a size with other settings: a preset of llama's, or the shape of GPT-2 without biases."""
    from curriculum.model.presets import PRESETS, ModelConfig

    if size in LLAMAS:
        return replace(PRESETS[size], **settings)
    _, num_positions, num_layers, num_heads, width, vocab_size = SIZES[size]
    shape = {"n_layer": num_layers, "n_head": num_heads, "n_kv_head": num_heads, "d_model": width, "d_ff": 4 * width}
    shape |= {"max_seq_len": num_positions, "vocab_size": vocab_size, "pos_encoding": "learned"}
    return ModelConfig(**shape | {"mlp_type": "gelu", "norm_type": "layernorm"} | settings)


class Failed(Exception):
    """A variant that ended before it was measured."""


class Worker:
    """A process that runs one variant; `turn(n)` has it make n updates while the others wait."""

    def __init__(self, variant: str, size: str, args: argparse.Namespace):
        command = [sys.executable, __file__, "--worker", variant, size, "--dtype", args.dtype]
        command += ["--wait-every", str(args.wait_every)]
        threads = str(os.cpu_count()) if variant in TORCH_NEEDS else os.environ.get("OMP_NUM_THREADS", "")
        environment = os.environ | ({"OMP_NUM_THREADS": threads} if threads else {})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.forget()
        self.about = self._answer()

    def forget(self) -> None:
        self.seconds, self.cpu_seconds, self.flops_per_sec = [], [], []

    def turn(self, num_steps: int) -> None:
        with suppress(BrokenPipeError):  # it ended; `_answer` tells how
            self.process.stdin.write(f"{num_steps}\n")
            self.process.stdin.flush()
        answer = self._answer()
        self.seconds += answer.get("seconds", [])
        self.cpu_seconds += answer.get("cpu_seconds", [])
        self.flops_per_sec += answer.get("flops_per_sec", [])
        self.about |= {name: answer[name] for name in ("peak_memory_mb",) if name in answer}

    def _answer(self) -> dict:
        for line in self.process.stdout:  # libraries may print there too
            if line.startswith('{"bench"'):
                return json.loads(line)["bench"]
        raise Failed(f"ended with exit code {self.process.wait()}; see above")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


class TrainRuns:
    """`curriculum train` from start to end, a new run each turn; step times are those of its record."""

    def __init__(self, folder: Path, size: str, dtype: str, num_steps: int):
        self.folder, self.num_steps, self.runs = folder, max(num_steps, 2 * LOG_EVERY), 0
        num_rows, num_positions, *_ = SIZES[size]
        shape = config_of(size, compute_dtype=dtype)
        fields = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_seq_len", "vocab_size", "pos_encoding")
        fields += ("mlp_type", "norm_type", "rope_theta", "compute_dtype")
        model = {name: getattr(shape, name) for name in fields}
        model["num_ids"] = shape.vocab_size  # of few characters, but as many ids are predicted
        write_text(folder / "text")
        config = {
            "name": "bench",
            "tokenizer": {"kind": "char"},
            "model": model,
            "sources": {"text": {"path": str(folder / "text"), "held_out": "2%"}},
            "phases": [{"name": "only", "until": "end", "mixture": {"text": 1}}],
            "evalsets": {"every": self.num_steps, "primary": {"held_out_of": "text", "max_sequences": 32}},
            "train": {"steps": self.num_steps, "batch_size": num_rows, "seq_len": num_positions},
            "optim": {"lr": LEARNING_RATE, "grad_clip": GRAD_CLIP, "warmup_steps": 5},
            "checkpoint": {"every": self.num_steps // 2},
            "logging": {"every": LOG_EVERY, "tensorboard": True},
        }
        (folder / "config.json").write_text(json.dumps(config))
        self.about = {}
        self.seconds, self.cpu_seconds = [], []

    def turn(self, _: int) -> None:
        self.runs += 1
        run_dir = self.folder / f"run{self.runs}"
        command = [sys.executable, "-m", "curriculum", "train", "config.json", "--run-dir", run_dir]
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        resolved = json.loads((run_dir / "config.resolved.json").read_text())
        self.seconds += [row["step_time_s"] for row in rows[1:]]
        # The compile time is the first run's: later runs load the program that it compiled.
        self.about = (
            {"num_parameters": resolved["derived"]["num_parameters"]}
            | {"compile_seconds": rows[0]["first_step_compile_time_s"]}
            | self.about
            | {"peak_memory_mb": round(max(row["peak_memory_gb"] for row in rows) * 1e3)}
        )


def write_text(folder: Path) -> None:
    """600 documents over 64 characters, 1.2 MB, the same each time; the tokenizer adds an end-of-text."""
    import numpy as np

    alphabet = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n"))
    folder.mkdir()
    for number, picked in enumerate(np.random.default_rng(0).integers(0, len(alphabet), (600, 2000))):
        (folder / f"{number:03}.txt").write_text("".join(alphabet[picked]))


def model_flops(config, num_tokens: int, seq_len: int) -> int:
    """FLOPs of an update, counted as the module says."""
    from curriculum.model.counts import num_projections

    matrices = num_projections(config) + config.vocab_size * config.d_model
    width = config.n_head * config.head_width
    return num_tokens * 6 * (matrices + config.n_layer * seq_len * width)


def row_of(size: str, variant: str, worker: Worker | TrainRuns, peak: float | None) -> dict:
    import numpy as np

    num_rows, num_positions, *_ = SIZES[size]
    config, _ = chosen(size, variant, "float32", "other")
    tokens = num_rows * num_positions
    flops = model_flops(config, tokens, num_positions)
    ms, cpu_ms = np.array(worker.seconds) * 1e3, np.array(worker.cpu_seconds) * 1e3
    median = float(np.median(ms))
    return {
        "size": size,
        "variant": variant,
        "num_parameters": worker.about["num_parameters"],
        "tokens_per_sec": round(tokens / median * 1e3, 1),
        "ms_median": round(median, 3),
        "ms_p10": round(float(np.percentile(ms, 10)), 3),
        "ms_p90": round(float(np.percentile(ms, 90)), 3),
        "cpu_ms_median": round(float(np.median(cpu_ms)), 3) if len(cpu_ms) else None,
        "num_times": len(ms),
        "compile_seconds": round(worker.about["compile_seconds"], 2),
        "peak_memory_mb": worker.about["peak_memory_mb"],
        "flop_share": round(flops / median * 1e3 / peak, 3) if peak else None,
        "peak_gflops": round(peak / 1e9, 1) if peak else None,
    }


def chosen(size: str, variant: str, dtype: str, backend: str) -> list[Any]:
    """The model of a size and the formulation of a backend, with the settings after the variant's colon."""
    from curriculum.model.formulation import BY_BACKEND

    settings = [setting for setting in variant.partition(":")[2].split(",") if setting and "blocks=" not in setting]
    return applied(settings, config_of(size, compute_dtype=dtype), BY_BACKEND[backend])


def applied(settings: Iterable[str], *to: Any) -> list[Any]:
    """Dataclasses with settings FIELD=VALUE, each of the first that has such a field; exits if one is wrong."""
    from curriculum.parsing.typed import read

    given = (setting.partition("=") for setting in settings)
    values = {name: int(value) if value.isdigit() else value for name, _, value in given}
    own = [{field.name: values.pop(field.name) for field in fields(one) if field.name in values} for one in to]
    problems = [(name, "no such setting") for name in values]
    changed = [read(type(one), asdict(one) | of_one, "", problems) for one, of_one in zip(to, own, strict=True)]
    if problems:
        sys.exit("\n".join(f"{path.lstrip('.')}: {message}" for path, message in problems))
    return changed


def ratios(size: str, rows: list[dict]) -> list[dict]:
    """Speed of the first variant over that of the second, from medians."""
    by_name = {row["variant"]: row for row in rows}
    found = []
    for one, other, target in TARGETS.get(size, []):
        if one in by_name and other in by_name:
            ratio = by_name[other]["ms_median"] / by_name[one]["ms_median"]
            found.append({"size": size, "of": one, "to": other, "ratio": round(ratio, 3), "at_least": target})
    return found


def print_report(report: dict) -> None:
    print_figures(report["machine"] | {"products": report["dtype"]})
    left_out = ("num_times", "peak_gflops")
    print_table([{name: row[name] for name in row if name not in left_out} for row in report["results"]])
    for row in report["ratios"]:
        told = "reached" if row["ratio"] >= row["at_least"] else "missed"
        print(f"{row['size']}: {row['of']} / {row['to']} = {row['ratio']} (at least {row['at_least']}: {told})")
    for name, why in report["skipped"].items():
        print(f"{name}: skipped: {why}")


# --------------------------------------------------------------------------------------- the worker processes


def work(variant: str, size: str, dtype: str, wait_every: int) -> None:
    """Build and compile, print what was built, then make as many updates as each line of stdin asks for."""

    def tell(answer: dict) -> None:
        print(json.dumps({"bench": answer}), flush=True)

    name = variant.partition(":")[0]
    if name in TORCH_NEEDS:
        import torch_update

        num_rows, num_positions, *_ = SIZES[size]
        shape = (num_rows, num_positions, dtype, wait_every)
        run, num_parameters = torch_update.program(name, config_of(size), *shape)
        started = time.perf_counter()
        run(1)
        about = {"num_parameters": num_parameters, "compile_seconds": time.perf_counter() - started}
    elif name == "peak":
        run, about = matmul_run(dtype)
    else:
        run, about = jax_run(variant, size, dtype, wait_every)
    tell(about)
    for line in sys.stdin:
        if name != "peak":
            run(1)  # not timed: while the others had their turn, caches and perhaps pages went away
        answer = run(int(line))
        if name != "peak":
            seconds, cpu_seconds = (means(times, wait_every) for times in answer)
            answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory_mb": peak_memory_mb()}
        tell(answer)


def matmul_run(dtype: str):
    """What tells the peak, and {"card": its name} if there is one."""
    import jax
    import jax.numpy as jnp

    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        known = data_sheet_flops(kind)
        if known is None:
            print(f"no data sheet's figure for {kind}: no share of it; add it to DATA_SHEET", file=sys.stderr)
            return lambda _: {}, {"card": kind}
        return lambda _: {"flops_per_sec": [known if dtype == "bfloat16" else known / 2]}, {"card": kind}
    side = 1024
    product, matrix = jax.jit(lambda a, b: a @ b), jnp.ones((side, side))
    product(matrix, matrix).block_until_ready()

    def run(_):
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            seconds.append(time.perf_counter() - started)
        return {"flops_per_sec": [2 * side**3 / min(seconds)]}

    return run, {}


def data_sheet_flops(kind: str) -> float | None:
    """FLOPs a second of a kind of card in bfloat16; None if it is not in DATA_SHEET."""
    return next((flops for card, flops in DATA_SHEET.items() if re.search(rf"\b{card}\b", kind)), None)


def means(times: list[float], size: int) -> list[float]:
    """Means of `size` times each, the last of what is left."""
    return [statistics.fmean(times[at : at + size]) for at in range(0, len(times), size)]


class Program(NamedTuple):
    """A compiled update: `state_of(compiled(state, *inputs))` is the next state. The state is donated."""

    compiled: Any
    state: Any
    inputs: tuple
    state_of: Callable[[Any], Any]
    compile_seconds: float


def jax_program(variant: str, size: str, dtype: str) -> Program:
    """`plain`, or `step` with the settings after its colon; on random tokens."""
    from curriculum.train.device import tune_device

    tune_device(deterministic=None)  # both programs have the trainer's malloc, and on a card its flags
    import jax
    import numpy as np

    from curriculum.model import formulation

    backend = formulation.backend()
    config, formulation.BY_BACKEND[backend] = chosen(size, variant, dtype, backend)
    num_rows, num_positions, *_ = SIZES[size]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, num_rows, num_positions + 1), np.int32)
    lr = jax.numpy.float32(LEARNING_RATE)
    if variant == "plain":
        import plain_jax

        step, state = plain_jax.make_program(plain_jax.Size(*SIZES[size]), dtype)
        inputs = (*jax.device_put((tokens[0, :, :-1], tokens[0, :, 1:])), lr)
        state_of = lambda out: out[0]  # noqa: E731
    else:
        from curriculum.model.transformer import init_params, transformer
        from curriculum.train.optimizer import OptimConfig, make_optimizer
        from curriculum.train.step import init_state, make_train_step
        from phases.batches import Batch

        if blocks := re.search(r"\bblocks=(\d+)", variant):
            formulation.MOST_BLOCKS = int(blocks[1])
        optimizer = make_optimizer(OptimConfig())
        step = jax.jit(make_train_step(transformer(config), optimizer, 1, grad_clip=GRAD_CLIP), donate_argnums=0)
        params = jax.tree.map(jax.numpy.asarray, init_params(config, seed=0))
        state = jax.device_put(init_state(params, optimizer, num_sources=1))
        inputs, targets, zeros_AB = tokens[..., :-1], tokens[..., 1:], np.zeros(tokens.shape[:2], np.int32)
        batch = Batch(inputs, targets, np.ones(inputs.shape, bool), np.zeros_like(inputs), zeros_AB)
        inputs = (*jax.device_put((batch, lr)), jax.numpy.int32(0))
        state_of = lambda out: out  # noqa: E731
    started = time.perf_counter()
    compiled = step.lower(state, *inputs).compile()
    return Program(compiled, state, inputs, state_of, time.perf_counter() - started)


def jax_run(variant: str, size: str, dtype: str, wait_every: int):
    import jax

    compiled, state, inputs, state_of, compile_seconds = jax_program(variant, size, dtype)
    num_parameters = sum(array.size for array in jax.tree.leaves(state[0]))
    about = {"num_parameters": num_parameters, "compile_seconds": compile_seconds}
    held = [state]
    del state

    def run(num_steps):
        seconds, cpu_seconds = [], []
        for first in range(0, num_steps, wait_every):
            num = min(wait_every, num_steps - first)
            before, cpu_before = time.perf_counter(), time.process_time()
            for _ in range(num):
                held[0] = state_of(compiled(held[0], *inputs))
            jax.block_until_ready(held[0])
            seconds += [(time.perf_counter() - before) / num] * num
            cpu_seconds += [(time.process_time() - cpu_before) / num] * num
        return seconds, cpu_seconds

    return run, about


def peak_memory_mb() -> int:
    """Peak memory of the card, if it is known, else of this process."""
    if "jax" in sys.modules:
        import jax

        stats = jax.local_devices()[0].memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            return round(stats["peak_bytes_in_use"] / 1e6)
    elif "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        return round(sys.modules["torch"].cuda.max_memory_allocated() / 1e6)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in bytes there, else in KiB
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


if __name__ == "__main__":
    main()
