"""The sections of a model card that come from the run's record up to one step, as Markdown.

`step` and `weights` are the exported ones. A run without events has lost its record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from curriculum.errors import InputError
from curriculum.record.events import METRICS, config_name
from curriculum.record.queries import (
    EvalPoint,
    consumption,
    documents_are_few,
    eval_points,
    evalset_facts,
    last_detectable,
    measured_sets,
    planned_tokens,
    source_facts,
    standing_regressions,
    warned_sets,
)
from curriculum.record.sentences import new_offenders, skipped_line, verdict, what_changed
from curriculum.record.windows import recorded_windows
from curriculum.record.wording import (
    NOT_JUDGED,
    WITH_SCATTER,
    epochs_text,
    few_documents,
    interval_text,
    metric_texts,
    metric_titles,
    signed,
    unseen,
)
from curriculum.run import Run
from curriculum.run_directory import read_arrays
from curriculum.saved_weights import Weights
from curriculum.views.compare import paired
from curriculum.views.inspection import declared_set, edits_of, tolerance_of
from curriculum.views.inspection_text import by_eval, mixture_text, offender_in
from evalsets.metrics import student_quantile

_HAPPENED = ("eval_regression", "eval_recovered", "schedule_edit", "rollback", "diverged")


def training(run: Run, step: int, tokens_drawn: Mapping[str, int] | None, unknown: list[str]) -> list[str]:
    """Phases and sources with the tokens read of each, from the record.

    The last phase's come from `tokens_drawn`, a ledger's totals at `step`, unless that is None. What cannot be read is
    added to `unknown`.
    """
    plan = plan_of(run)
    phases = [phase for phase in plan["phases"] if phase["start"] < step]
    if not phases:
        return ["Nothing yet: these are the parameters that the run began with."]
    read: dict[str, dict[str, Any]] = {}
    if run.events:
        at = None if tokens_drawn is None else (phases[-1]["name"], step, tokens_drawn)
        try:
            names = [phase["name"] for phase in phases]
            read = {row["phase"]: row for row in consumption(run, at) if row["phase"] in names}
        except InputError as error:
            unknown += error.problems
    by_event = (event["tokens_processed"] for event in reversed(run.events) if event["step"] == step)
    total = next(by_event, None) or planned_tokens(plan, step)
    return [
        f"{total:,} tokens up to step {step:,}.",
        _phase_table(run, phases, step, read),
        _source_table(run, step, read),
    ]


def _phase_table(
    run: Run, phases: Sequence[Mapping[str, Any]], step: int, read: Mapping[str, Mapping[str, Any]]
) -> str:
    rows = []
    for phase in phases:
        steps = f"{phase['start']:,} to {min(phase['end'], step):,}"
        if step < phase["end"]:
            steps += f" of {phase['end']:,}"
        if phase["ramp_steps"]:
            steps += f", a ramp over the first {phase['ramp_steps']:,}"
        edits = [edit for edit in edits_of(run.events, phase) if edit["step"] < step]
        mixture = mixture_text({**phase, "edits": edits}, lambda share: f"{share:.4g}")
        tokens = read.get(phase["name"], {}).get("tokens", {})
        told = ", ".join(f"{name} {num:,}" for name, num in tokens.items()) or "not known"
        rows.append((phase["name"], steps, mixture, told))
    return table_of(("phase", "steps", "mixture", "tokens read in it"), rows)


def _source_table(run: Run, step: int, read: Mapping[str, Mapping[str, Any]]) -> str:
    drawn: Counter[str] = Counter()
    for row in read.values():
        drawn.update(row["tokens"])
    # If the run was resumed at this very step, it may have read other text from there on.
    facts = source_facts(run.events) | source_facts(event for event in run.events if event["step"] < step)
    # A source that a resume dropped is in the config that the run began with, unless it was added in between.
    sources = run.resolved["sources"]
    begun_with = run.start["config"]["sources"] if run.events else {}
    rows = []
    for name in dict.fromkeys([*sources, *drawn]):
        source = sources.get(name) or begun_with.get(name)
        its, num = facts.get(name, {}), drawn[name]
        place = _place(source) if source else "not known"
        documents, tokens = (f"{its[key]:,}" if key in its else "not known" for key in ("documents", "tokens"))
        tokens_read = epochs = "not known"
        if read:
            tokens_read = f"{num:,}"
        if read and its.get("tokens_per_epoch"):
            epochs = epochs_text(num / its["tokens_per_epoch"])
        rows.append((name, place, documents, tokens, tokens_read, epochs))
    header = ("source", "from", "documents", "tokens in it", "tokens read", "epochs read")
    return table_of(header, rows, right=range(2, 6))


def evals(run: Run, step: int, weights: Weights, opens_with: str | None, unknown: list[str]) -> list[str]:
    """Every set at its last eval, or a mean's phase end; windows that cannot be read are named in `unknown`."""
    if not run.events:
        return ["The record of the run was missing at export, so its evals are not known."]
    before = [event for event in run.events if event["step"] <= step]
    points, about = eval_points(before), evalset_facts(before)
    suffix = "" if weights.average is None else f"@{weights.average}"
    judged = _Judged.up_to(before, step)
    rows, begun_with = [], run.start["config"]["evalsets"]["sets"]
    for name in [name for name in points if "@" not in name]:
        key = config_name(name)
        described = declared_set(run, name) or begun_with.get(key, {})
        origin = f"held out of {described['held_out_of']}" if described.get("held_out_of") else _place(described)
        facts = about.get(name, {})
        num_documents, num_windows, tokens = (facts.get(key, 0) for key in ("documents", "windows", "tokens"))
        cells = [f"{name} (primary)" if key == "primary" else name, origin, f"{num_documents:,}", f"{tokens:,}"]
        first = points[name][0]
        # A mean is measured at the end of its phase; earlier evals are of other phases.
        own = [p for p in points.get(name + suffix, ()) if weights.phase is None or p.step == step]
        if not own:
            rows.append((*cells, "not measured", *[""] * (3 + len(metric_titles()))))
            continue
        last = own[-1]
        interval = "-"
        if last.sem is not None and num_windows:
            half = float(student_quantile(0.025, facts["clusters"] - 1)) * last.sem
            interval = f"{last.loss - half:.4f} to {last.loss + half:.4f}"
        told = judged.verdict(name, tolerance_of(run, name), last.sem)
        if name not in judged.still_measured:
            told = "no longer measured"
        elif suffix:  # only the raw parameters are judged
            told = f"raw parameters: {told}"
        change = _change(run, name, suffix, first, last, unknown)
        rows.append((*cells, f"{last.step:,}", *metric_texts(vars(last)), interval, change, told))
    header = ("eval set", "text", "documents", "tokens", "step", *metric_titles())
    intervals = ("95 %", "change since the start", "verdict")
    measured = table_of((*header, *intervals), rows, right=range(2, len(header)))
    few = [name for name in points if name in about and documents_are_few(about[name])]
    return [
        measured,
        *([f"Few documents: {few_documents(few)}."] if few else []),
        "Loss in nats per token, `bpb` in bits per UTF-8 byte. The intervals cover the choice of held-out text alone; "
        "the change is from the first eval of the same windows, below 0 is better. Each document is preceded by the "
        "token that opens one"
        + (f" (`{opens_with}`)" if opens_with else "")
        + f" and cut into disjoint windows of {run.eval_seq_len:,} tokens; every token is scored once, in a "
        "conversation only those of the answers.",
    ]


class _Judged(NamedTuple):
    """What the record up to a step says of the verdicts, by eval set."""

    still_measured: set[str]
    worse: dict[str, list[str]]  # the baselines that a set stands regressed against
    alarms: dict[str, int]  # the step of a set's last alarm
    detectable: Mapping[str, float]
    warned: Collection[str]

    @staticmethod
    def up_to(events: Sequence[Mapping[str, Any]], step: int) -> _Judged:
        """Of the `events` up to `step`. A set that a resume or rollback at that very step dropped was still judged."""
        judged = [event for event in events if event["step"] < step or event["event"] not in ("resume", "rollback")]
        worse: dict[str, list[str]] = {}
        for pair in standing_regressions(judged):
            worse.setdefault(pair["set"], []).append(pair["baseline"].replace("_", " "))
        raised = [event for event in judged if event["event"] == "eval_regression"]
        alarms = {pair["set"]: event["step"] for event in raised for pair in new_offenders(event)[0]}
        still_measured = measured_sets(events) | measured_sets(judged)
        return _Judged(still_measured, worse, alarms, last_detectable(events), warned_sets(events))

    def verdict(self, name: str, tolerance: float, sem: float | None) -> str:
        """Of a set that may rise by `tolerance`, and whose last loss has the standard error `sem`."""
        if name in self.worse:
            return f"regressed against its {' and '.join(self.worse[name])}"
        hidden = unseen(self.detectable.get(name), tolerance, sem)
        if hidden == NOT_JUDGED:
            return hidden
        told = f"no alarm now, the last was of step {self.alarms[name]}" if name in self.alarms else "no alarm"
        if name in self.warned:
            told += ", but it may be worse"
        return f"{told}; {hidden}" if hidden else told


def _change(run: Run, name: str, suffix: str, first: EvalPoint, last: EvalPoint, unknown: list[str]) -> str:
    """The change of the loss since the first eval, paired by window if the windows of both are on file."""
    if not suffix and first.step == last.step:
        return "-"
    before_file, now_file = (run.directory.results(point.step) for point in (first, last))
    key = config_name(name)
    try:
        before = recorded_windows(before_file, read_arrays(before_file), key, first.loss)
        now = recorded_windows(now_file, read_arrays(now_file), f"{key}{suffix}", last.loss)
        between = paired("its start", now, before)
    except InputError as error:
        unknown += [f"The change of {name} has no interval: {problem}" for problem in error.problems]
        return signed(last.loss - first.loss)
    except KeyError as missing:
        unknown.append(f"The change of {name} has no interval: {missing} is not in the results of both evals.")
        return signed(last.loss - first.loss)
    return f"{signed(between.delta)} ({interval_text(between.interval)})"


def happened(run: Run, step: int) -> list[str]:
    """Regressions, recoveries, rollbacks, edits, divergence and skipped updates."""
    if not run.events:
        return ["The record of the run was missing at export."]
    lines, judged = [], False
    for event in run.events:
        if event["step"] > step or event["event"] not in _HAPPENED:
            continue
        judged |= "offenders" in event
        if event["event"] == "eval_regression":
            new, still = new_offenders(event)
            action = f" | {event['action']}" if event["action"] else ""
            lines.append("; ".join([f"eval regression at step {event['step']}", *still]) + action)
            lines += [f"  - {offender_in(event, o, what_changed(o))}" for o in by_eval(new)]
        else:
            lines.append(verdict(event))
    rows = run.metrics if (run.directory.path / METRICS).exists() else []
    last = next((row for row in reversed(rows) if row["step"] <= step), None)
    if last is not None and (skipped := skipped_line(last, {})):
        lines.append(skipped)
    if not lines:
        return ["No regression of an eval set, no rollback, no edit of the schedule, no skipped update."]
    told = ["\n".join(line if line.startswith("  - ") else f"- {one_line(line)}" for line in lines)]
    if judged:
        told.append(f"The intervals here are {WITH_SCATTER}, and so wider than that of the change above.")
    return told


def plan_of(run: Run) -> dict[str, Any]:
    return run.plan if run.events else run.resolved["derived"]


def _place(described: Mapping[str, Any]) -> str:
    if described.get("hf"):
        return f"hub: {described['hf']}"
    return f"`{described['path']}`" if described.get("path") else "-"


def table_of(header: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """A Markdown table; the columns in `right` are right-aligned."""
    right = set(right)
    marks = ["---:" if i in right else "---" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(one_line(str(cell)) for cell in row)} |" for row in (header, marks, *rows))


def one_line(line: str) -> str:
    """The text as one line that cannot end a table cell or a list item."""
    return " ".join(line.split()).replace("|", "\\|")


def fenced(language: str, text: str) -> str:
    """A fenced block of code, which may itself hold fences."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
