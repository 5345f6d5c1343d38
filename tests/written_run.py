"""A run directory written through the record's own writer, without training: its numbers are the test's to choose."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from curriculum.config import build_config
from curriculum.record.events import Record, config_name, eval_key
from curriculum.record.windows import write_results
from evalsets.metrics import WindowResults, summarise
from evalsets.summary import RECORDED

TOKENS_PER_STEP = 100
PHASES = (("foundation", 0, 60, {"web": 0.8, "code": 0.2}), ("domain", 60, 100, {"law": 0.9, "web": 0.1}))


def windows(loss: float, num_documents: int = 25, spread: float = 0.0, seed: int = 0) -> WindowResults:
    """Two windows a document of 10 and 20 tokens. Every token has about `loss`; documents differ by `spread`."""
    tokens_N = np.tile([10, 20], num_documents)
    document_N = np.repeat(np.arange(num_documents), 2)
    noise_D = np.random.default_rng(seed).normal(0, spread, num_documents) if spread else np.zeros(num_documents)
    return WindowResults(
        nats_N=tokens_N * (loss + noise_D[document_N]),
        correct_N=tokens_N // 3,
        tokens_N=tokens_N,
        bytes_N=4 * tokens_N,
        document_N=document_N,
    )


def write_run(
    path: Path,
    losses: Mapping[str, Callable[[int], float | WindowResults | None]],
    *,
    phases: Sequence[tuple[str, int, int, Mapping[str, float]]] = PHASES,
    every: int = 20,
    until: int | None = None,
    more: Mapping[int, Sequence[tuple[str, dict]]] | None = None,
    detectable: Mapping[str, float] | None = None,
    averages: Mapping[str, Callable[[int], float]] | None = None,
    hashes: Mapping[str, str] | None = None,
    tokens_per_step: int = TOKENS_PER_STEP,
    shapes: Mapping[str, Mapping] | None = None,
    train_loss: Callable[[int, str], float | None] = lambda step, source: 3.0,
    start: Mapping | None = None,
    complete: Mapping | None = None,
    branched_from: Mapping | None = None,
    name: str = "written",
) -> Path:
    """Every set's loss is a function of the step: a number, the windows themselves, or None where it is not measured.

    `until` ends an unfinished run; `more` are events by step, after that step's eval; `averages` measure each set with
    averages of the parameters; `start`, `complete` are further fields of those events; `shapes` are those of each
    phase, {batch_size, seq_len, rope_theta}, in place of `tokens_per_step`.
    """
    total = phases[-1][2]
    last = total if until is None else until
    sources = list(dict.fromkeys(s for *_, mixture in phases for s in mixture))
    sizes = {source: 10_000 for source in sources}
    config = build_config(
        {
            "name": name,
            "tokenizer": {"kind": "byte"},
            "sources": {source: {"path": source} for source in sources},
            "phases": [{"name": n, "until": e, "mixture": dict(m)} for n, _, e, m in phases],
            "evalsets": {"primary": {"path": "val"}, "sets": {n: {"path": n} for n in losses if n != "val"}},
            "train": {"steps": total},
        },
        check_paths=False,
    ).to_json()
    shape = {"batch_size": 1, "seq_len": tokens_per_step, "grad_accum": 1, "rope_theta": None, "lr_scale": 1.0}
    shape_of = {n: {**shape, **(shapes or {}).get(n, {})} for n, *_ in phases}
    described = [
        {"name": n, "start": s, "end": e, "mixture": dict(m), "ramp_steps": 0, **shape_of[n]} for n, s, e, m in phases
    ]
    sizes_of_step = [(p["start"], p["end"], p["batch_size"] * p["seq_len"]) for p in described]
    plan = {
        "total_steps": total,
        "tokens_per_step": tokens_per_step if shapes is None else None,
        "step_sizes": [{"start": s, "end": e, "tokens_per_step": n} for s, e, n in sizes_of_step],
        "num_parameters": 1000,
        "phases": described,
        "learning_rate": [{"start": 0, "end": total, "piece": {"start": 0, "first": 1e-3, "last": 1e-3}, "scale": 1.0}],
        "lineage": None,
    }

    def tokens_at(step: int) -> int:
        return sum(max(min(e, step) - s, 0) * n for s, e, n in sizes_of_step)

    path.mkdir(parents=True, exist_ok=True)
    derived = plan | ({"branched_from": dict(branched_from)} if branched_from else {})
    (path / "config.resolved.json").write_text(json.dumps({**config, "command_line": [], "derived": derived}))
    (path / "config.yaml").write_text("name: written\n")

    record = Record(path, tokens_at)
    facts = {"documents": 25, "clusters": 25, "windows": 50, "tokens": 750, "bytes": 3000}
    record.event(
        "training_start",
        0,
        config=config,
        model={"n_layer": 1, "d_model": 8, "num_parameters": 1000},
        devices={"platform": "cpu", "kind": "cpu", "num": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}},
        plan=plan,
        sources={source: {"tokens_per_epoch": size} for source, size in sizes.items()},
        evalsets={
            "primary" if n == "val" else n: {**facts, "content_hash": (hashes or {}).get(n, f"hash-of-{n}")}
            for n in losses
        },
        **{"lineage": None, "warnings": [], **(start or {})},
    )
    skipped = dict.fromkeys(("skipped_updates", "skipped_nonfinite", "skipped_outliers"), 0)
    drawn, left = dict.fromkeys(sources, 0), 0  # left: passed over, of each source
    steps = sorted({0, *range(0, last + 1, every), *(e for _, _, e, _ in phases if e <= last), last})
    for step in steps:
        i, (phase, *_, mixture) = next((i, p) for i, p in enumerate(phases) if max(step - 1, 0) < p[2])
        if step:
            before = steps[steps.index(step) - 1]
            read = tokens_at(step) - tokens_at(before)
            drawn = {s: n + round(read * mixture.get(s, 0)) for s, n in drawn.items()}
            record.row(
                {
                    "step": step,
                    "loss": train_loss(step, "all"),
                    **{f"loss_{s}": train_loss(step, s) if mixture.get(s) else None for s in sources},
                    "grad_norm": 1.0 + 1 / step,
                    **skipped,
                    "tokens_per_sec": None,
                    "lr": 1e-3 * (1 - step / (2 * total)),
                    "phase": phase,
                    "mixture": {s: mixture.get(s, 0.0) for s in sources},
                }
            )
        measured = {}
        for set_name, loss in losses.items():
            value = loss(step)
            if value is not None:
                measured[set_name] = value if isinstance(value, WindowResults) else windows(value)
        write_results(path / "evals" / f"{step}.npz", {config_name(n): result for n, result in measured.items()}, {})
        averaged = {a: _losses({n: windows(of(step)) for n in measured}) for a, of in (averages or {}).items() if step}
        knows = {"detectable": dict(detectable)} if detectable and step else {}
        record.event("eval", step, progress_pct=0.0, lr=1e-3, phase=phase, **_losses(measured), **averaged, **knows)
        if step == phases[i][2] and step < total:
            record.event(
                "phase_switch",
                step,
                from_phase=phase,
                new_phase=phases[i + 1][0],
                mixture_before=dict(mixture),
                mixture_after=dict(phases[i + 1][3]),
                ramp_steps=0,
                tokens_drawn=drawn,
                consumed={s: n + left for s, n in drawn.items()},
                epochs={s: (n + left) / sizes[s] for s, n in drawn.items()},
                lr=1e-3,
                shape_before=shape_of[phase],
                shape_after=shape_of[phases[i + 1][0]],
                passed_over={} if shapes is None else dict.fromkeys(sources, 7),
            )
            left += 0 if shapes is None else 7
        for event, fields in (more or {}).get(step, ()):
            record.event(event, step, **fields)
    state = {"step": last, "phase": phase, "tokens_drawn": drawn, "consumed": {s: n + left for s, n in drawn.items()}}
    (path / "training_state.json").write_text(json.dumps(state))
    if until is None:
        record.event("training_complete", total, **{"total_steps": total, "train_steps": total, **(complete or {})})
    record.close()
    return path


def _losses(measured: Mapping[str, WindowResults]) -> dict[str, float | None]:
    fields = {}
    for name, results in measured.items():
        of_set = summarise(results)
        fields |= {eval_key(name, metric): getattr(of_set, metric) for metric in RECORDED}
    return fields


def offender(
    set_name: str, baseline: str, step: int, *, first_step: int, loss: float = 2.6, delta: float = 0.5
) -> dict:
    """One entry of an `eval_regression` event."""
    return {
        "set": set_name,
        "baseline": baseline,
        "baseline_step": step,
        "loss": loss,
        "baseline_loss": loss - delta,
        "delta": delta,
        "sem": delta / 10,
        "interval": [delta * 0.8, delta * 1.2],
        "t": 9.8,
        "df": 20,
        "tolerance": 0.01,
        "first_step": first_step,
        "mixture_change": {"web": [0.8, 0.1]},
    }


def without(*fields: str) -> Callable[[Path], object]:
    """Takes these fields out of every event of a record that it is given."""

    def edit(record: Path) -> None:
        events = [json.loads(line) for line in record.read_text().splitlines()]
        left = [{key: value for key, value in event.items() if key not in fields} for event in events]
        record.write_text("".join(f"{json.dumps(event)}\n" for event in left))

    return edit


def command(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str, set[str]]:
    """Exit code, output, errors and the modules imported by a command of this program."""
    script = (
        "import json, sys\n"
        "from curriculum.cli.main import main\n"
        f"sys.argv = ['curriculum', *{list(map(str, arguments))!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True)
    *errors, modules = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(errors), set(json.loads(modules))
