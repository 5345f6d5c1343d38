"""TensorBoard, read back with TensorBoard's own readers: its curves are the record's numbers."""

import json
import math
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from recorded import PLAN, SAME_UPDATES, tokens_at, train
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.util import tensor_util

from curriculum.config import build_config
from curriculum.record import board
from curriculum.record.board import Board, _phase_switch_markdown
from curriculum.record.events import EVENTS, METRICS, Record, cut_record, read_events, read_metrics

NO_TRANSFER = {"phases": [], "steps": [], "sets": {}}
CONFIG = {
    "name": "example",
    "seed": 7,
    "sources": {"web": {"path": "data/web"}},
    "model": {"preset": "tiny", "dropout": None},
    "optim": {"name": "adamw", "lr": 6e-4, "allow_jump": False},
    "phases": [
        {"name": "foundation", "mixture": {"web": 1.0}},
        {"name": "domain", "mixture": {"web": 0.25, "law": 0.75}},
    ],
    "evalsets": {"every": 4, "sets": {"general": {}, "code": {"every": 8}}},
}


def begin(run_dir):
    record = Record(run_dir, tokens_at, views=[Board(run_dir)])
    record.event("training_start", 0, config=CONFIG, model={"num_parameters": 1000}, plan=PLAN)
    return record


def resume(run_dir, offsets, step):
    cut_record(run_dir, offsets)
    record = Record(run_dir, tokens_at, views=[Board(run_dir)])
    record.event("resume", step, plan=PLAN)
    return record


def shown(logdir):
    """What TensorBoard shows of the folder: {run: {tag: [(step, value), ...]}}, by its Python reader."""
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0, "text": 0, "hparams": 0})
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    return {
        run: {
            tag: [
                (event.step, tensor_util.make_ndarray(event.tensor_proto).tolist())
                for event in multiplexer.Tensors(run, tag)
            ]
            for tag in tags["tensors"]
        }
        for run, tags in multiplexer.Runs().items()
    }


def float32(value):
    return tensor_util.make_ndarray(tensor_util.make_tensor_proto(value, dtype="float32")).item()


def files(folder):
    return sorted(folder.glob("*.tfevents.*"))


def loaded(path):
    return list(EventFileLoader(str(path)).Load())


def test_curves_are_the_numbers_of_the_record(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 12)
    record.close()
    runs = shown(tmp_path)
    assert set(runs) == {f"example/tensorboard{name}" for name in ("", "/val", "/general", "/code")}
    main = runs["example/tensorboard"]

    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert main["train/loss"] == [(row["step"], float32(row["loss"])) for row in rows]
    assert main["train/loss/web"] == [(row["step"], float32(row["loss_web"])) for row in rows]
    assert main["train/loss/law"] == [(row["step"], float32(row["loss_law"])) for row in rows[3:]]
    assert main["train/lr"] == [(row["step"], float32(row["lr"])) for row in rows]
    assert main["mixture/law"] == [(2, 0.0), (4, 0.0), (6, 0.0), (8, 0.75), (10, 0.75), (12, 0.75)]
    assert main["phase/index"] == [(2, 0), (4, 0), (6, 0), (8, 1), (10, 1), (12, 1)]
    assert math.isnan(main["train/grad_norm"][0][1]) and main["train/grad_norm"][1:] == [
        (step, 0.25) for step in (4, 6, 8, 10, 12)
    ]
    assert {tag for tag in main if tag.startswith("train/")} == {
        "train/loss",
        "train/loss/web",
        "train/loss/law",
        "train/grad_norm",
        "train/lr",
        "train/tokens_per_sec",
    }

    evals = [event for event in read_events(run_dir) if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [4, 8, 12]
    for name, loss, bpb in (
        ("val", "val_loss", "val_bpb"),
        ("general", "eval_general", "eval_general_bpb"),
        ("code", "eval_code", "eval_code_bpb"),
    ):
        losses = [(event["step"], float32(event[loss])) for event in evals if loss in event]
        bpbs = [(event["step"], float32(event[bpb])) for event in evals if bpb in event]
        assert [step for step, _ in losses] == ([8] if name == "code" else [4, 8, 12])
        assert main[f"eval/{name}/loss"] == losses and main[f"eval/{name}/bpb"] == bpbs
        assert runs[f"example/tensorboard/{name}"] == {"eval_sets/loss": losses, "eval_sets/bpb": bpbs}


def test_points_are_on_file_at_once_at_the_time_of_their_event(tmp_path):
    record = begin(tmp_path)
    event = record.event("eval", 4, val_loss=3.5, val_bpb=1.5)
    path = files(tmp_path / "tensorboard" / "val")[0]
    points = [point for point in loaded(path) if point.HasField("summary")]
    assert [point.step for point in points] == [4]
    assert points[0].wall_time == datetime.fromisoformat(event["timestamp"]).timestamp()
    record.close()


def test_a_resumed_run_has_one_point_a_step(tmp_path):
    """A process dies after step 11 with a checkpoint at 8; the next takes other values from there."""
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 8)
    offsets = record.offsets()
    train(record, 8, 11)
    resumed = resume(run_dir, offsets, 8)
    train(resumed, 8, 12, loss=lambda step: 2.0)
    resumed.close()
    runs = shown(tmp_path)
    main = runs["example/tensorboard"]
    losses = ((2, 3.8), (4, 3.6), (6, 3.4), (8, 3.2), (10, 2.0), (12, 2.0))
    assert main["train/loss"] == [(step, float32(loss)) for step, loss in losses]
    assert main["train/loss"] == [(row["step"], float32(row["loss"])) for row in read_metrics(run_dir)]
    expected = [(4, float32(4.6)), (8, float32(4.2)), (12, 3.0)]
    assert main["eval/general/loss"] == runs["example/tensorboard/general"]["eval_sets/loss"] == expected
    assert [step for step, _ in main["phase_switch"]] == [6]


def test_a_resume_at_a_step_without_a_row_writes_none_again(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 7)
    resumed = resume(run_dir, record.offsets(), 7)
    train(resumed, 7, 10)
    resumed.close()
    losses = shown(tmp_path)["example/tensorboard"]["train/loss"]
    assert [step for step, _ in losses] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("step", [8, 0])
def test_a_run_that_goes_back_has_one_point_a_step(tmp_path, step):
    """In one process: to its checkpoint at 8, or to its start."""
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    offsets = record.offsets()
    train(record, 0, 8)
    offsets = record.offsets() if step else dict.fromkeys(offsets, 0)
    train(record, 8, 11)
    record.cut_back(offsets)
    if step == 0:
        record.event("training_start", 0, config=CONFIG, model={"num_parameters": 1000}, plan=PLAN)
    told = {"told_at_step": 11, "first_bad_step": 9, "skip_steps": 2, "number": 1, "max": 3, "reason": "bad"}
    record.event("rollback", step, **told, plan=PLAN)
    train(record, step, 12, loss=lambda step: 2.0)
    record.close()
    main = shown(tmp_path)["example/tensorboard"]
    assert main["train/loss"] == [(row["step"], float32(row["loss"])) for row in read_metrics(run_dir)]
    assert [s for s, _ in main["train/loss"]] == [2, 4, 6, 8, 10, 12] and main["train/loss"][-2][1] == 2.0
    assert [s for s, _ in main["eval/general/loss"]] == [4, 8, 12]
    ((told_at, text),) = main["rollback"]
    assert told_at == step and text.decode().startswith(f"rollback 1 of 3 at step 11, to step {step}: bad")


def test_a_set_left_out_on_resume_ends_where_the_resume_begins(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 6)
    offsets = record.offsets()
    train(record, 6, 8)
    resumed = resume(run_dir, offsets, 6)
    train(resumed, 6, 12, sets=("code", "new"))
    resumed.close()
    runs = shown(tmp_path)
    assert [step for step, _ in runs["example/tensorboard/general"]["eval_sets/loss"]] == [4]
    assert [step for step, _ in runs["example/tensorboard/new"]["eval_sets/loss"]] == [8, 12]


def test_what_is_recorded_where_a_run_resumes_stands_there_once_however_often_it_does(tmp_path):
    """Twice the same resume at 6 with an edit and a new set, the first of which is killed before its next checkpoint."""
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 6)
    gold = {"metric": "primary/loss", "value": 3.2, "previous": None, "previous_step": None, "path": "gold/4"}
    record.event("gold_checkpoint", 4, **gold)  # confirmed at 6
    offsets = record.offsets()
    for until in (7, 12):
        record = resume(run_dir, offsets, 6)
        edit = {"kind": "replay", "phase": "domain", "until": 12, "reason": "replay of web, as code got worse"}
        record.event("schedule_edit", 6, **edit, mixture_before={"web": 0.25}, mixture_after={"web": 0.5})
        measured = {"eval_new": 5.0 + until, "eval_new_bpb": 2.0}
        record.event("eval", 6, lr=1e-4, phase="foundation", eval_duration_s=0.5, **measured)
        train(record, 6, until)
    record.close()
    runs = shown(tmp_path)
    main = runs["example/tensorboard"]
    once = {tag: [step for step, _ in main[tag]] for tag in ("phase_switch", "gold_checkpoint", "schedule_edit")}
    assert once == {"phase_switch": [6], "gold_checkpoint": [6], "schedule_edit": [6]}
    assert main["eval/new/loss"] == runs["example/tensorboard/new"]["eval_sets/loss"] == [(6, 17.0)]
    assert [step for step, _ in main["train/loss"]] == [2, 4, 6, 8, 10, 12]
    points = [point for path in files(run_dir / "tensorboard") for point in loaded(path) if point.step == 6]
    again = [p.wall_time for p in points for v in p.summary.value if v.tag == "phase_switch"]
    assert len(again) == 3 and len(set(again)) == 1  # at the time of the event


def test_lines_of_an_older_record_that_lack_fields_are_passed_over_where_a_run_resumes(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 5)
    record.close()
    record = Record(run_dir, tokens_at)
    record.row({"step": 6})
    record.event("phase_switch", 6)
    record.event("eval", 6, val_loss=3.0, val_bpb=1.5, lr=1e-4, phase="foundation", eval_duration_s=0.5)
    offsets = record.offsets()
    record.close()
    resumed = resume(run_dir, offsets, 6)
    train(resumed, 6, 8)
    resumed.close()
    main = shown(tmp_path)["example/tensorboard"]
    assert [step for step, _ in main["train/loss"]] == [2, 4, 8] and "phase_switch" not in main
    assert main["eval/val/loss"] == [(4, float32(3.6)), (6, 3.0), (8, float32(3.2))]


def test_a_half_written_point_of_a_killed_process_hides_nothing_after_it(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 4)
    offsets = record.offsets()
    for path in (run_dir / "tensorboard").rglob("*.tfevents.*"):
        with open(path, "ab") as file:
            file.write(b"\x18\x00\x00\x00\x00")
    resumed = resume(run_dir, offsets, 4)
    train(resumed, 4, 8)
    resumed.close()
    runs = shown(tmp_path)
    assert [step for step, _ in runs["example/tensorboard"]["train/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in runs["example/tensorboard/val"]["eval_sets/loss"]] == [4, 8]


def test_every_file_begins_with_the_first_step_of_its_process(tmp_path):
    record = begin(tmp_path)
    train(record, 0, 4)
    offsets = record.offsets()
    resumed = resume(tmp_path, offsets, 4)
    resumed.close()
    for folder in ("", "val", "general"):
        starts = []
        for path in files(tmp_path / "tensorboard" / folder):
            version, start = loaded(path)[:2]
            assert version.file_version == "brain.Event:2"
            assert start.session_log.status == SessionLog.START
            starts.append(start.step)
        assert starts == [0, 4]
    record.close()


def test_a_run_that_starts_anew_shows_nothing_of_the_old_record(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 8)
    record.close()
    cut_record(run_dir, {EVENTS: 0, METRICS: 0})
    record = begin(run_dir)
    train(record, 0, 4, sets=())
    record.close()
    runs = shown(tmp_path)
    assert set(runs) == {"example/tensorboard", "example/tensorboard/val"}
    assert [step for step, _ in runs["example/tensorboard"]["train/loss"]] == [2, 4]


def test_what_happened_is_text(tmp_path):
    record = begin(tmp_path)
    train(record, 0, 6)
    offender = {
        "set": "code", "baseline": "best", "baseline_step": 4, "loss": 2.6, "baseline_loss": 2.1, "delta": 0.5,
        "sem": 0.02, "interval": [0.46, 0.54], "t": 24.5, "df": 10, "tolerance": 0.01, "first_step": 8,
        "mixture_change": {"web": [1.0, 0.25]},
    }  # fmt: skip
    record.event("eval_regression", 8, phase="domain", offenders=[offender], action=None)
    recovered = {**offender, "delta": -0.01, "interval": [-0.05, 0.03]}
    record.event("eval_recovered", 12, phase="domain", offenders=[recovered])
    gold = {"metric": "primary/loss", "value": 3.2, "previous": None, "previous_step": None, "path": "gold/8"}
    record.event("gold_checkpoint", 8, **gold)
    reason = "overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x"
    blocked = {"metric": "primary/loss", "value": 3.1, "best": 3.2, "best_step": 8, "guard": "overfit"}
    record.event("gold_blocked", 12, **blocked, reason=reason)
    edit = {"kind": "replay", "phase": "domain", "until": 12, "reason": "replay of web, as code got worse"}
    mixtures = {"mixture_before": {"web": 0.25, "law": 0.75}, "mixture_after": {"web": 0.5, "law": 0.5}}
    record.event("schedule_edit", 8, **edit, **mixtures)
    record.close()
    main = shown(tmp_path)["tensorboard"]
    assert main["phase_switch"] == [
        (
            6,
            "**foundation → domain** at step 6, lr 1.00e-04\n"
            "\n"
            "| source | share before | share after | tokens consumed | epochs |\n"
            "|---|---|---|---|---|\n"
            "| law | 0 | 0.75 | 0 | 0 |\n"
            "| web | 1 | 0.25 | 384 | 0.5 |".encode(),
        )
    ]
    ramped = {
        "from_phase": "a",
        "new_phase": "b",
        "step": 6,
        "lr": 1e-4,
        **SAME_UPDATES,
        "ramp_steps": 10,
        "consumed": {"web": 1_234_567},
        "epochs": {},
    }
    told = _phase_switch_markdown({**ramped, "mixture_before": {"web": 1.0}, "mixture_after": {"law": 1.0}})
    assert "| share before | share after a ramp of 10 steps |" in told and "| web | 1 | 0 | 1,234,567 | 0 |" in told
    texts = {
        tag: [(step, text.decode()) for step, text in main[tag]]
        for tag in ("regressions", "eval_recovered", "gold_checkpoint", "gold_blocked", "schedule_edit")
    }
    (at, regression), (recovered_at, recovery) = *texts["regressions"], *texts["eval_recovered"]
    assert (at, recovered_at) == (8, 12)
    for line, words in (
        (regression, ("eval regression at step 8", "code", "+0.5000 (95 % +0.4600 to +0.5400) against best at step 4")),
        (recovery, ("eval recovered at step 12", "code", "-0.0100 (95 % -0.0500 to +0.0300) against best at step 4")),
    ):
        assert all(part in line for part in words), line
    assert texts["gold_checkpoint"] == [(12, "gold checkpoint at step 8: primary/loss 3.2000")]
    assert texts["gold_blocked"] == [
        (12, "gold blocked at step 12: overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x")
    ]
    ((step, edited),) = texts["schedule_edit"]
    assert step == 12 and all(
        part in edited for part in ("step 8", "replay of web, as code got worse", "web 0.25 → 0.5", "law 0.75 → 0.5")
    )


def test_how_the_sets_went_from_phase_to_phase_is_a_table(tmp_path):
    record = begin(tmp_path / "told")
    val = {
        "start": 5.5, "start_step": 0, "loss": [4.0, 3.5],
        "forgetting": {"value": 0.0, "interval": [0.0, 0.0], "best_phase": "domain"},
        "gain": {"value": 2.0, "interval": [1.75, 2.25]},
    }  # fmt: skip
    code = {
        "start": 5.25, "start_step": 6, "loss": [None, "NaN"],
        "forgetting": {"value": "NaN", "interval": None, "best_phase": None},
        "gain": {"value": 0.5, "interval": None},
    }  # fmt: skip
    record.event(
        "training_complete",
        12,
        transfer={"phases": ["foundation", "domain"], "steps": [6, 12], "sets": {"val": val, "code": code}},
    )
    record.close()
    [(step, text)] = shown(tmp_path)["told/tensorboard"]["transfer"]
    assert step == 12 and text.decode().splitlines()[2:] == [
        "| after | step | val | code |",
        "|---|---|---|---|",
        "| start | 0 | 5.5000 | 5.2500 at 6 |",
        "| foundation | 6 | 4.0000 | - |",
        "| domain | 12 | 3.5000 | nan |",
        "| **forgetting** |  | +0.0000 (95 % +0.0000 to +0.0000) | +nan |",
        "| **gain** |  | +2.0000 (95 % +1.7500 to +2.2500) | +0.5000 |",
    ]
    record = begin(tmp_path / "empty")
    record.event("training_complete", 12, transfer=NO_TRANSFER)
    record.close()
    assert "transfer" not in shown(tmp_path)["empty/tensorboard"]


def test_hyperparameters_name_the_run_and_its_end(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    end = record.event("training_complete", 12, transfer=NO_TRANSFER)
    record.close()
    values = [
        value
        for event in loaded(files(run_dir / "tensorboard")[0])
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "hparams"
    ]
    start_value, end_value = values
    start = hparams_metadata.parse_session_start_info_plugin_data(start_value.metadata.plugin_data.content)
    assert start.group_name == "example"
    hparams = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert hparams == {
        "seed": 7.0,
        "model.preset": "tiny",
        "optim.name": "adamw",
        "optim.lr": 6e-4,
        "optim.allow_jump": False,
        "mixture.foundation.web": 1.0,
        "mixture.domain.web": 0.25,
        "mixture.domain.law": 0.75,
        "phases": "foundation, domain",
    }
    finish = hparams_metadata.parse_session_end_info_plugin_data(end_value.metadata.plugin_data.content)
    assert finish.end_time_secs == datetime.fromisoformat(end["timestamp"]).timestamp()


def test_every_section_that_the_board_names_is_one_of_a_config_and_arrives(tmp_path):
    config = build_config(
        {
            "sources": {"web": {"path": "x", "held_out": "1%"}},
            "phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}],
            "evalsets": {"primary": {"held_out_of": "web"}},
            "train": {"steps": 5},
            "averages": {"ema_decay": 0.9},
        },
        check_paths=False,
    ).to_json()
    assert set(board._HPARAM_SECTIONS) <= config.keys()
    view = Board(tmp_path / "run")
    stamp = {"timestamp": "2026-11-20T14:45:12+01:00", "step": 0}
    view.event({"event": "training_start", **stamp, "config": config, "plan": PLAN})
    view.close()
    (value,) = (
        value
        for event in loaded(files(tmp_path / "run/tensorboard")[0])
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "hparams"
    )
    start = hparams_metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
    assert {name.partition(".")[0] for name in start.hparams} == {*board._HPARAM_SECTIONS, "mixture", "phases"}
    assert start.hparams["averages.ema_decay"].number_value == 0.9


def test_no_heavy_library_is_needed(tmp_path):
    """Modules of their names stand on the path, and importing one ends the process with its name."""
    for name in ("tensorflow", "tensorboardX", "torch", "jax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"import os; os.write(2, b'{name}'); os._exit(3)")
    script = """
import json, sys
from pathlib import Path
from curriculum.record.board import Board
board = Board(Path(sys.argv[1]))
for line in sys.stdin:
    board.event(json.loads(line))
board.row({"step": 1, "loss": 1.0, "phase": "foundation", "mixture": {"web": 1.0}})
board.close()
"""
    stamp = {"timestamp": "2026-11-20T14:45:12+01:00", "elapsed_s": 0.0, "tokens_processed": 0, "step": 0}
    lines = [
        {"event": "training_start", **stamp, "config": CONFIG, "plan": PLAN},
        {"event": "eval", **stamp, "val_loss": 4.0, "val_bpb": 1.5},
        {"event": "training_complete", **stamp, "transfer": NO_TRANSFER},
    ]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        input="\n".join(json.dumps(line) for line in lines),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), root))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert shown(tmp_path)["run/tensorboard"]["eval/val/loss"] == [(0, 4.0)]
