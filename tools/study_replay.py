"""Study how much replay keeps of what a model knew: adapt one base to C++ with several shares of its old text mixed in.

    python tools/build_quickstart_corpus.py --output data/quickstart
    python tools/study_replay.py --json study.json

Trains configs/adaptation_base.yaml once, then configs/adaptation.yaml from it once per share. The replayed text is half
docs and half Python; steps, rates, seed and the order of the domain's text are the same for all. Started again with the
same options, it goes on where it was and keeps what is finished. Prints a Markdown table: loss in nats per token at the
last step on general (docs), domain (C++) and code (Python), and the change since the base with half its 95 % interval
as `curriculum compare` computes it: paired by window, clustered by document, Student's quantile.
"""

import contextlib
import json
import math
import sys
from pathlib import Path

from results import json_parser, write_json

CONFIGS = Path(__file__).parents[1] / "configs"
SETS = ("general", "domain", "code")


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--replay", nargs="+", type=float, default=[0, 0.01, 0.05, 0.2], help="shares to compare")
    parser.add_argument("--steps", type=int, help="updates of each adaptation (default: as in its config)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/study_replay"), help="where the runs go")
    args = parser.parse_args(argv)
    if len(set(args.replay)) < len(args.replay) or not all(0 <= share < 1 for share in args.replay):
        parser.error("--replay: expected different shares of at least 0 and below 1")

    from curriculum.errors import InputError

    steps = [] if args.steps is None else [f"train.steps={args.steps}"]
    try:
        base = args.output_dir / "base"
        run("adaptation_base.yaml", base, [])
        results = []
        for share in args.replay:
            replay = {"docs": share / 2, "python": share / 2} if share else {}
            overrides = [*steps, f"adaptation.replay={json.dumps(replay)}"]
            run_dir = args.output_dir / f"replay-{share:g}"
            complete = run("adaptation.yaml", run_dir, overrides, init_from=str(base))
            results.append({"replay": share, **measure(run_dir, complete["total_steps"], replay)})
    except InputError as error:
        parser.exit(2, f"{error}\n")
    add_removed(results)
    print("\n".join(table(results)))
    write_json(args.json, results)


def run(config_name: str, run_dir: Path, overrides: list[str], **begin) -> dict:
    """Train or finish one run, with evals at its start and end only. Returns its `training_complete` event."""
    from curriculum.config import load_config
    from curriculum.train.trainer import train

    ends = ["evalsets.every=1000000", "logging.tensorboard=false"]
    config = load_config(CONFIGS / config_name, [*ends, *overrides], **begin, continues=run_dir)
    with contextlib.redirect_stdout(sys.stderr):
        return train(config, run_dir, resume="latest")


def measure(run_dir: Path, last_step: int, replay: dict[str, float]) -> dict:
    """Each set's loss before and after, and the paired change with its 95 % interval; the share of replay drawn, the
    learning rate, steps and tokens."""
    from curriculum.find_checkpoint import read_ledger
    from curriculum.record.windows import read_results
    from curriculum.run import load_run
    from curriculum.views.compare import paired
    from evalsets.metrics import summarise

    drawn = {
        name: s["tokens_drawn"] for name, s in read_ledger(run_dir / f"checkpoints/{last_step}")["sources"].items()
    }
    found = {
        "replay_given": sum(drawn[name] for name in replay) / sum(drawn.values()),
        "lr": load_run(run_dir).config.optim.lr,
        "steps": last_step,
        "tokens": sum(drawn.values()),
        "sets": {},
    }
    before, after = (read_results(run_dir / f"evals/{step}.npz") for step in (0, last_step))
    for name in SETS:
        difference = paired("base", after[name], before[name])
        found["sets"][name] = {
            "base": summarise(before[name]).loss,
            "loss": summarise(after[name]).loss,
            "change": difference.delta,
            "interval": difference.interval,  # None if the set is one cluster
        }
    return found


def add_removed(results: list[dict]) -> None:
    """Add the part of the forgetting that each share of replay removes; None if nothing is forgotten without replay."""
    without = next((result for result in results if result["replay"] == 0), None)
    for result in results:
        for name in ("general", "code"):
            forgotten = math.nan if without is None else without["sets"][name]["change"]
            removed = 1 - result["sets"][name]["change"] / forgotten if forgotten > 0 else None
            result["sets"][name]["removed"] = removed


def table(results: list[dict]) -> list[str]:
    lines = [f"| replay | {' | '.join(SETS)} |", "|---:" * 4 + "|"]
    base = " | ".join(f"{results[0]['sets'][name]['base']:.3f}" for name in SETS)
    lines.append(f"| base | {base} |")
    for result in results:
        cells = []
        for name in SETS:
            found = result["sets"][name]
            low, high = found["interval"] or (math.nan, math.nan)
            cells.append(f"{found['loss']:.3f} ({found['change']:+.3f} ± {(high - low) / 2:.3f})")
        lines.append(f"| {100 * result['replay']:g}% | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
