"""TensorBoard: a view of the record in `<run>/tensorboard/`, written without TensorFlow.

The folder itself is the main run: `train/...` from the metrics rows, `mixture/<source>`, `phase/index`,
`eval/<set>/loss` and `eval/<set>/bpb`, hyperparameters, and as text the phase switches, schedule edits, rollbacks,
regressions, gold decisions, samples, and at the end the losses of the sets from phase to phase. Below it each eval
set is a run of its own. These share the tags `eval_sets/loss` and `eval_sets/bpb`, so that one chart shows every set
in its own colour; a set measured with an average of the parameters is one more, `<set>@<average>`. With
`tensorboard --logdir runs` the runs are named `quickstart/tensorboard`, `quickstart/tensorboard/general` and so on.
The primary set is called `val`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import dropwhile
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from curriculum.disk.append import Appender
from curriculum.errors import InputError
from curriculum.record.curves import all_sets, eval_curves, row_curves
from curriculum.record.events import TAKEN_UP, last_row, number, read_events
from curriculum.record.sentences import shape_moves, verdict
from curriculum.record.wording import counted, epochs_text, loss, printable

_MAIN = "."
_HPARAM_SECTIONS = ("seed", "tokenizer", "model", "packing", "train", "optim", "adaptation", "averages", "mesh")


class Board:
    """Writes the events and rows of one process; all is in the files when a call returns, unless the disk is full.

    A process begins with `training_start` or `resume`, which has the plan. What an earlier process wrote from the step
    on that was resumed from is taken back (`SessionLog.START`), so curves never run backwards; what the record still
    has of that step is written again. TensorBoard's default data server ignores START: it drops a tag's old points as
    the tag is written again. Wall times are the timestamps of events; rows have none and take the current time. A row's
    `mixture` names every source, even without a share, so that its curve falls to 0 when the source ends.

    of_whole_record: the lines are those of a record that is whole, by step: nothing is ever taken back.
    """

    def __init__(self, run_dir: Path, of_whole_record: bool = False):
        self._of_whole_record = of_whole_record
        self._run_dir = run_dir
        self._folder = run_dir / "tensorboard"
        self._run_name = run_dir.resolve().name
        self._writers: dict[str, RecordWriter] = {}
        self._first_step = 0
        self._newest_step = 0  # of an event
        self._phase_names: list[str] = []

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] in TAKEN_UP:
            self._phase_names = [phase["name"] for phase in event["plan"]["phases"]]
        match event["event"]:
            case "training_start":
                # A run that starts anew has its old record set aside; a view of both would mix two runs.
                self.close()
                self._first_step = self._newest_step = 0
                for path in self._folder.rglob("*.tfevents.*"):
                    path.unlink()
            case "resume" | "rollback" if not self._of_whole_record:
                self._take_back(event)
        self._show(event)

    def _take_back(self, event: dict[str, Any]) -> None:
        """Take back what was written from a resume's step on, and write again what the record still has of it."""
        self.close()
        step = self._first_step = self._newest_step = event["step"]
        for folder in {path.parent for path in self._folder.rglob("*.tfevents.*")}:
            self._writer(str(folder.relative_to(self._folder)))
        there = list(dropwhile(lambda e: e["step"] < step, (e for e in read_events(self._run_dir) if e != event)))
        # A row that is broken was told of as the run was taken up. What else is damaged ends no training either.
        passed_over = suppress(InputError, KeyError, TypeError, ValueError)
        with passed_over:
            row = last_row(self._run_dir)
            if row is not None and row["step"] == step:
                self._row(row, _wall_time(there[0] if there else event))
        for earlier in there:
            with passed_over:
                self._show(earlier)

    def _show(self, event: dict[str, Any]) -> None:
        wall_time = _wall_time(event)

        # An event of an earlier step (a confirmed gold) is written at the newest step: TensorBoard's data server takes
        # a step back for a restart and forgets what the tag had after it. So each kind of text has its own tag.
        self._newest_step = max(self._newest_step, event["step"])

        def write(run: str, values: Iterable[Summary.Value]) -> None:
            self._write(run, self._newest_step, wall_time, values)

        match event["event"]:
            case "training_start":
                write(_MAIN, self._hparams(event["config"], wall_time))
            case "eval":
                curves = eval_curves(event)
                write(_MAIN, _scalars(curves))
                for name in all_sets(event):
                    own = f"eval/{name}/"
                    shared = {tag.replace(own, "eval_sets/"): v for tag, v in curves.items() if tag.startswith(own)}
                    write(name, _scalars(shared))
            case "phase_switch":
                write(_MAIN, [_text("phase_switch", _phase_switch_markdown(event))])
            case "eval_regression":
                write(_MAIN, [_text("regressions", verdict(event))])
            case (
                "eval_recovered" | "gold_checkpoint" | "gold_blocked" | "schedule_edit" | "rollback" | "diverged"
            ) as kind:
                write(_MAIN, [_text(kind, verdict(event))])
            case "generation":
                write(_MAIN, [_text("generation", _samples_markdown(event))])
            case "training_complete":
                transfer = event["transfer"]
                table = [_text("transfer", _transfer_markdown(transfer))] if transfer["sets"] else []
                write(_MAIN, [_session_end(wall_time), *table])

    def row(self, row: dict[str, Any]) -> None:
        self._row(row, time.time())

    def _row(self, row: dict[str, Any], wall_time: float) -> None:
        self._write(_MAIN, row["step"], wall_time, _scalars(row_curves(row, self._phase_names)))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, run: str) -> RecordWriter:
        if run not in self._writers:
            folder = self._folder / run
            # TensorBoard reads a run's files in the order of their names. A clock may go back, the count cannot.
            count = len(list(folder.glob("*.tfevents.*")))
            now = time.time()
            writer = RecordWriter(Appender(folder / f"events.out.tfevents.{count:06d}.{now:.0f}", new=True))
            self._writers[run] = writer
            start = SessionLog(status=SessionLog.START)
            writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            writer.write(Event(wall_time=now, step=self._first_step, session_log=start).SerializeToString())
        return self._writers[run]

    def _write(self, run: str, step: int, wall_time: float, values: Iterable[Summary.Value]) -> None:
        event = Event(step=step, wall_time=wall_time, summary=Summary(value=values))
        self._writer(run).write(event.SerializeToString())

    def _hparams(self, config: dict[str, Any], wall_time: float) -> list[Summary.Value]:
        told = {name: config[name] for name in _HPARAM_SECTIONS if name in config}
        told["mixture"] = {phase["name"]: phase["mixture"] for phase in config["phases"]}
        hparams = {**dict(_flat(told)), "phases": ", ".join(self._phase_names)}
        # The trial is the run: two runs of one configuration stay two lines of the table.
        return list(hparams_summary.hparams_pb(hparams, self._run_name, wall_time).value)


def _wall_time(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _phase_switch_markdown(event: dict[str, Any]) -> str:
    before, after = event["mixture_before"], event["mixture_after"]
    ramp = f" a ramp of {counted(event['ramp_steps'], 'step')}" if event["ramp_steps"] else ""
    lines = [
        f"**{event['from_phase']} → {event['new_phase']}** at step {event['step']}, lr {event['lr']:.2e}",
        *(["", "; ".join(moves)] if (moves := shape_moves(event)) else []),
        "",
        f"| source | share before | share after{ramp} | tokens consumed | epochs |",
        "|---|---|---|---|---|",
    ]
    for source in sorted({*before, *after}):
        shares = f"{before.get(source, 0.0):.4g} | {after.get(source, 0.0):.4g}"
        read = f"{event['consumed'].get(source, 0):,} | {epochs_text(event['epochs'].get(source, 0.0))}"
        lines.append(f"| {source} | {shares} | {read} |")
    return "\n".join(lines)


def _samples_markdown(event: dict[str, Any]) -> str:
    """Each sample as preformatted text: the prompt and its continuation, separated by a bar."""
    blocks = []
    for sample in event["samples"]:
        shown = printable(f"{sample['prompt']}▏{sample['text']}", also="\n\t")
        blocks.append("\n".join(f"    {line}" for line in shown.split("\n")))
    return "\n\n---\n\n".join(blocks)


def _transfer_markdown(transfer: dict[str, Any]) -> str:
    """Every set's loss at every phase end, its forgetting and gain, from the `transfer` of `training_complete`."""
    sets = transfer["sets"]
    added = {name: f" at {of_set['start_step']}" for name, of_set in sets.items() if of_set["start_step"]}
    rows = [("start", 0, *(loss(of_set["start"]) + added.get(name, "") for name, of_set in sets.items()))]
    for i, (phase, step) in enumerate(zip(transfer["phases"], transfer["steps"], strict=True)):
        rows.append((phase, step, *(loss(of_set["loss"][i]) for of_set in sets.values())))
    for what in ("forgetting", "gain"):
        rows.append((f"**{what}**", "", *(_change(of_set[what]) for of_set in sets.values())))
    lines = [
        "Loss of each eval set at the end of each phase, nats per token. Forgetting: the last loss minus the lowest of "
        "the phase ends, and of the start unless that was random. Gain: the loss at the start minus the last; positive "
        "is better.",
        "",
        f"| after | step | {' | '.join(sets)} |",
        f"|---|---|{'---|' * len(sets)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines)


def _change(told: dict[str, Any]) -> str:
    """A difference with its interval and the phase that it counts from, if it has these."""
    value = number(told["value"])
    interval = " (95 % {:+.4f} to {:+.4f})".format(*told["interval"]) if told["interval"] else ""
    since = f" since {told['best_phase']}" if value and told.get("best_phase") else ""
    return f"{value:+.4f}{interval}{since}"


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


def _scalars(values: dict[str, float]) -> list[Summary.Value]:
    """A scalar for each value, by its tag; float32, as TensorBoard's default data server silently drops doubles."""
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _text(tag: str, markdown: str) -> Summary.Value:
    plugin_data = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=plugin_data, data_class=DATA_CLASS_TENSOR),
        tensor=TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[markdown.encode()]),
    )


def _session_end(wall_time: float) -> Summary.Value:
    end = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=wall_time)
    return Summary.Value(
        tag=hparams_metadata.SESSION_END_INFO_TAG,
        metadata=hparams_metadata.create_summary_metadata(HParamsPluginData(session_end_info=end)),
        tensor=hparams_metadata.NULL_TENSOR,
    )
