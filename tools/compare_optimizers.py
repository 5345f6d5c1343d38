"""Compare optimizers on the quickstart's text at equal tokens, each with a learning rate of its own.

    python tools/build_quickstart_corpus.py --output data/quickstart
    python tools/compare_optimizers.py --steps 1000 --seeds 3 --json compare.json
    python tools/compare_optimizers.py --steps 100 --seeds 1 --optimizers lion --lr-times 0.3 1 3

Every run goes through `train()` with the config of the quickstart, in a folder of its own; seeds are 0, 1, ... The
optimizers take turns within a seed, so that a machine that slows down slows them all. Started again with the same
options, it keeps the runs that are finished. Prints a Markdown table: losses are nats per token at the last step, mean
and standard deviation over the seeds; times are of a step, without evals, saves and the first compilation.
"""

import contextlib
import json
import statistics
import sys
from pathlib import Path

from results import json_parser, write_json

# Overrides of `optim`. AdamW has the quickstart's learning rate. The others have the best of two or three rates, which
# are a factor of 3 apart, by the loss of one seed after 60 steps: a coarse choice. muon+lion has the rates of its two.
OPTIMIZERS = {
    "adamw": {"lr": 2e-3},
    "adamw-nesterov": {"lr": 2e-3, "adam.nesterov": True},
    "lion": {"name": "lion", "lr": 1e-3},
    "muon": {"name": "muon", "lr": 6e-3},
    "muon+lion": {"name": "muon", "lr": 1e-3, "muon.rest": "lion", "muon.lr_scale": 6.0},
    "sophia": {"name": "sophia", "lr": 1e-3},
}
QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--config", default=QUICKSTART, help="the run that is repeated (default: the quickstart)")
    parser.add_argument("--steps", type=int, default=1000, help="updates of each run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per variant")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--lr-times", nargs="+", type=float, default=[1.0], help="factors of the learning rate to try")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/compare_optimizers"), help="where the runs go")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.seeds < 1:
        parser.error("expected --steps of at least 2 and --seeds of at least 1")
    for option in ("optimizers", "lr_times"):
        if len(set(getattr(args, option))) < len(getattr(args, option)):
            parser.error(f"--{option.replace('_', '-')}: expected different values")

    from curriculum.errors import InputError

    rows: dict[str, list[dict]] = {}
    try:
        for seed in range(args.seeds):
            for name in args.optimizers:
                for factor in args.lr_times:
                    label = name if factor == 1 else f"{name} lr x{factor:g}"
                    run_dir = args.output_dir / f"{label.replace(' ', '-')}-{args.steps}-steps-seed-{seed}"
                    optim = OPTIMIZERS[name] | {"lr": OPTIMIZERS[name]["lr"] * factor}
                    rows.setdefault(label, []).append(measure(args.config, optim, args.steps, seed, run_dir))
    except InputError as error:
        parser.exit(2, f"{error}\n")
    results = summarise(rows)
    print_table(results)
    write_json(args.json, {"steps": args.steps, "seeds": args.seeds, "results": results})


def measure(config_file: Path, optim: dict, num_steps: int, seed: int, run_dir: Path) -> dict:
    """Train or finish one run, and read its result from its record."""
    import jax

    from curriculum.config import load_config
    from curriculum.model.presets import ModelConfig
    from curriculum.model.transformer import init_params
    from curriculum.record.events import eval_sets
    from curriculum.run import load_run
    from curriculum.train.optimizer import make_optimizer
    from curriculum.train.trainer import train

    settings = {f"optim.{key}": setting for key, setting in optim.items()}
    settings |= {"seed": seed, "train.steps": num_steps, "evalsets.every": num_steps, "checkpoint.every": num_steps}
    settings |= {"logging.tensorboard": False, "logging.every": max(1, min(20, num_steps // 2))}
    config = load_config(config_file, [f"{key}={json.dumps(setting)}" for key, setting in settings.items()])
    with contextlib.redirect_stdout(sys.stderr):
        complete = train(config, run_dir, resume="latest")

    run = load_run(run_dir)
    last = [event for event in run.events if event["event"] == "eval"][-1]
    model = ModelConfig.of(json.loads((run_dir / "model.json").read_text()))
    params = init_params(model, seed)
    state = jax.tree.leaves(jax.eval_shape(make_optimizer(config.optim).init, params))
    return {
        "lr": config.optim.lr,
        "tokens": complete["total_tokens"],
        "losses": {name: measured.loss for name, measured in eval_sets(last).items()},
        # Without the first row, which includes filling the caches.
        "step_seconds": statistics.median(row["step_time_s"] for row in run.metrics[1:]),
        "state_bytes": sum(array.size * array.dtype.itemsize for array in state),
        "num_parameters": sum(array.size for array in jax.tree.leaves(params)),
    }


def summarise(rows: dict[str, list[dict]]) -> list[dict]:
    """One result per optimizer and rate: [mean, standard deviation over the seeds] of each loss (None for one seed)."""
    baseline = "adamw" if "adamw" in rows else next(iter(rows))
    results = []
    for label, runs in rows.items():
        ratios = [run["step_seconds"] / other["step_seconds"] for run, other in zip(runs, rows[baseline], strict=True)]
        losses = {name: [run["losses"][name] for run in runs] for name in runs[0]["losses"]}
        results.append(
            {
                "optimizer": label,
                "lr": runs[0]["lr"],
                "tokens": runs[0]["tokens"],
                "losses": {
                    name: [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None]
                    for name, values in losses.items()
                },
                "step_ms": 1e3 * statistics.mean(run["step_seconds"] for run in runs),
                "time_ratio": statistics.mean(ratios),
                "time_baseline": baseline,
                "state_bytes_per_parameter": runs[0]["state_bytes"] / runs[0]["num_parameters"],
            }
        )
    return results


def print_table(results: list[dict]) -> None:
    losses = list(results[0]["losses"])
    head = ["optimizer", "lr", *losses, f"time of a step / {results[0]['time_baseline']}'s", "state bytes a parameter"]
    print("|", " | ".join(head), "|")
    print("|---" + "|---:" * (len(head) - 1) + "|")
    for result in results:
        cells = [result["optimizer"], f"{result['lr']:g}"]
        for mean, std in result["losses"].values():
            cells.append(f"{mean:.4f}" if std is None else f"{mean:.4f} ± {std:.4f}")
        cells += [f"{result['time_ratio']:.2f}", f"{result['state_bytes_per_parameter']:.2f}"]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
