"""wandb's offline files, read back without wandb's help: they say what the record says, and nothing is sent."""

import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from recorded import PLAN, tokens_at, train

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.record.events import Record, cut_record, read_events, read_metrics
from curriculum.record.wandb_log import WandbConfig, WandbLog

pytest.importorskip("wandb", reason="wandb is not installed: pip install 'curriculum[wandb]'")

CONFIG = {"name": "example", "seed": 7, "optim": {"lr": 6e-4, "allow_jump": False}, "phases": PLAN["phases"]}
OFFLINE = WandbConfig(project="tests", entity="team", mode="offline", tags=("a", "b"))


def records(path):
    """Messages of a .wandb file: a 7-byte header, then LevelDB's log format (32 KiB blocks of checksummed parts)."""
    from wandb.proto import wandb_internal_pb2

    content, at, message, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little is left of the block for another part
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            found.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return found


def logged(run_dir):
    """[(records, history)] of each process, oldest first; a history is [{name: value}]."""
    import wandb

    wandb.teardown()  # what is finished is on file once the background process has ended
    folders = sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda p: p.stat().st_ctime_ns)
    processes = []
    for folder in folders:
        found = records(next(folder.glob("*.wandb")))
        history = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in found
            if record.HasField("history")
        ]
        processes.append((found, history))
    return processes


def environment(**changes):
    """Ours without what wandb left there: a process of its own shall not talk to our wandb's background process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | changes


def curve(history, name):
    return [(line["step"], line[name]) for line in history if name in line]


def config_of(found):
    run = next(record.run for record in found if record.HasField("run"))
    return {item.key: json.loads(item.value_json) for item in run.config.update if not item.key.startswith("_")}


def begin(run_dir, settings=OFFLINE):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.resolved.json").write_text(json.dumps(CONFIG))
    (run_dir / "config.yaml").write_text("name: example\n")
    views = [] if settings is None else [WandbLog(run_dir, settings, CONFIG)]
    record = Record(run_dir, tokens_at, views=views)
    record.event("training_start", 0, config=CONFIG, model={"num_parameters": 1000}, plan=PLAN)
    return record


def resume(run_dir, offsets, step, kind="resume", **fields):
    views = [WandbLog(run_dir, OFFLINE, {**CONFIG, "seed": 8})]
    cut_record(run_dir, offsets)
    record = Record(run_dir, tokens_at, views=views)
    record.event(kind, step, plan=PLAN, **fields)
    return record


COMPLETE = {
    "final_train_loss": 2.8,
    "final_val_loss": 2.8,
    "best_val_loss": 2.75,
    "total_tokens": 768,
    "gold_step": None,
}


def test_curves_config_and_files_are_those_of_the_record(tmp_path, capfd):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 12)
    record.event("training_complete", 12, **COMPLETE)
    record.close()
    assert capfd.readouterr() == ("", "")

    ((found, history),) = logged(run_dir)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert curve(history, "train/loss") == [(row["step"], row["loss"]) for row in rows]
    assert curve(history, "train/loss/law") == [(row["step"], row["loss_law"]) for row in rows[3:]]
    assert curve(history, "mixture/law") == [(row["step"], row["mixture"]["law"]) for row in rows]
    assert curve(history, "phase/index") == [(2, 0), (4, 0), (6, 0), (8, 1), (10, 1), (12, 1)]
    norms = curve(history, "train/grad_norm")
    assert math.isnan(float(norms[0][1])) and norms[1:] == [(step, 0.25) for step in (4, 6, 8, 10, 12)]
    evals = [event for event in read_events(run_dir) if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [4, 8, 12]
    for name, key in (("val/loss", "val_loss"), ("val/bpb", "val_bpb"), ("code/loss", "eval_code")):
        assert curve(history, f"eval/{name}") == [(event["step"], event[key]) for event in evals if key in event] != []
    switch = "phase switch at step 6: foundation → domain | web 1 → 0.25 | law 0 → 0.75 | lr 1.00e-04"
    assert curve(history, "phase_switch") == [(6, switch)]
    names = {name for line in history for name in line if not name.startswith("_")}
    of_rows = {f"train/{name}" for name in ("loss", "loss/web", "loss/law", "grad_norm", "lr", "tokens_per_sec")}
    of_evals = {f"eval/{name}/{metric}" for name in ("val", "general", "code") for metric in ("loss", "bpb")}
    assert names == {"step", "mixture/web", "mixture/law", "phase/index", "phase_switch", *of_rows, *of_evals}

    assert config_of(found) == CONFIG == read_events(run_dir)[0]["config"]
    run = next(record.run for record in found if record.HasField("run"))
    assert (run.entity, run.project, run.display_name) == ("team", "tests", "example")
    assert list(run.tags) == ["a", "b"]
    axes = [(m.metric.name or m.metric.glob_name, m.metric.step_metric) for m in found if m.HasField("metric")]
    assert ("*", "step") in axes
    (artifact,) = [r.request.log_artifact.artifact for r in found if r.request.HasField("log_artifact")] or [
        r.artifact for r in found if r.HasField("artifact")
    ]
    assert sorted(entry.path for entry in artifact.manifest.contents) == ["config.resolved.json", "config.yaml"]
    summary = {item.key: json.loads(item.value_json) for r in found for item in r.summary.update}
    assert {key: summary.get(key) for key in COMPLETE} == COMPLETE


def test_a_resume_goes_on_under_the_same_id(tmp_path):
    run_dir = tmp_path / "example"
    record = begin(run_dir)
    train(record, 0, 8)
    offsets = record.offsets()
    record.close()
    record = resume(run_dir, offsets, 8)
    train(record, 8, 12)
    record.close()
    (first, first_history), (second, second_history) = logged(run_dir)
    runs = [next(r.run for r in found if r.HasField("run")) for found in (first, second)]
    assert runs[0].run_id == runs[1].run_id == (run_dir / "wandb/run_id").read_text().strip()
    assert len(runs[0].run_id) == 8
    assert curve(first_history + second_history, "train/loss") == [
        (r["step"], r["loss"]) for r in read_metrics(run_dir)
    ]
    assert curve(second_history, "train/loss")[0][0] == 10
    assert (config_of(first)["seed"], config_of(second)["seed"]) == (7, 8)


def test_a_run_that_was_killed_on_its_way_back_goes_on_under_the_same_id(tmp_path):
    record = begin(tmp_path)
    train(record, 0, 4)
    offsets = record.offsets()
    record.close()
    went_back = {"number": 1, "max": 1, "told_at_step": 6, "reason": "loss", "first_bad_step": 4, "skip_steps": 2}
    record = resume(tmp_path, offsets, 4, "rollback", **went_back)
    train(record, 4, 8)
    record.close()
    (first, _), (second, history) = logged(tmp_path)
    ids = [next(r.run for r in found if r.HasField("run")).run_id for found in (first, second)]
    assert ids[0] == ids[1]
    assert [step for step, _ in curve(history, "rollback")] == [4]
    assert curve(history, "phase/index") == [(6, 0), (8, 1)]


def test_what_goes_on_and_was_not_logged_so_far_is_logged_from_its_beginning(tmp_path):
    """A branch has the record of its trunk; a run may be logged only from a resume on."""
    record = begin(tmp_path, settings=None)
    train(record, 0, 8)
    offsets = record.offsets()
    record.close()
    record = resume(tmp_path, offsets, 8)
    train(record, 8, 12)
    record.close()
    ((_, history),) = logged(tmp_path)
    rows = read_metrics(tmp_path)
    assert curve(history, "train/loss") == [(row["step"], row["loss"]) for row in rows] and len(rows) == 6
    assert curve(history, "phase/index") == [(2, 0), (4, 0), (6, 0), (8, 1), (10, 1), (12, 1)]
    assert [step for step, _ in curve(history, "eval/val/loss")] == [4, 8, 12]
    assert [step for step, _ in curve(history, "phase_switch")] == [6]


def test_a_row_that_lacks_a_field_and_a_broken_one_end_no_training(tmp_path):
    """The rest is logged; of a file with a line that is broken, none."""
    record = begin(tmp_path, settings=None)
    train(record, 0, 8)
    offsets = record.offsets()
    record.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    del rows[1]["mixture"]
    rows[2]["phase"] = "a former name"
    lacking = "".join(json.dumps(row) + "\n" for row in rows)
    for content, steps in ((lacking, [2, 8, 10, 12]), (lacking + "{\n", [10, 12])):
        (tmp_path / "metrics.jsonl").write_text(content)
        record = resume(tmp_path, {**offsets, "metrics.jsonl": len(content)}, 8)
        train(record, 8, 12)
        record.close()
        (_, history) = logged(tmp_path)[-1]
        assert [step for step, _ in curve(history, "train/loss")] == steps
        assert [step for step, _ in curve(history, "eval/val/loss")] == [4, 8, 12]
        shutil.rmtree(tmp_path / "wandb")
        (tmp_path / "events.jsonl").write_bytes((tmp_path / "events.jsonl").read_bytes()[: offsets["events.jsonl"]])


def test_a_run_that_starts_anew_is_another_run_but_not_if_it_goes_back_to_its_start(tmp_path):
    ids = []
    for _ in range(2):
        begin(tmp_path).close()
        ids.append((tmp_path / "wandb/run_id").read_text())
    assert len(set(ids)) == 2
    (tmp_path / "going_back.json").write_text("{}")
    begin(tmp_path).close()
    assert (tmp_path / "wandb/run_id").read_text() == ids[1]


def test_a_damaged_id_does_not_end_training(tmp_path):
    begin(tmp_path).close()
    (tmp_path / "wandb/run_id").write_bytes(b"\xff\xfe")
    (tmp_path / "going_back.json").write_text("{}")  # the run goes on, with the id that it has
    record = begin(tmp_path)
    train(record, 0, 4)
    record.close()
    assert re.fullmatch("[0-9a-f]{8}", (tmp_path / "wandb/run_id").read_text().strip())


def test_a_run_that_the_caller_has_open_is_left_alone(tmp_path):
    import wandb

    own = wandb.init(project="own", mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    record = begin(tmp_path / "example")
    train(record, 0, 2)
    record.close()
    assert wandb.run is own
    own.finish()
    (_, history), *others = logged(tmp_path / "example")
    assert curve(history, "train/loss") == [(2, 3.8)] and others == []
    assert logged(tmp_path)[0][1] == []


def test_the_end_says_whether_the_run_is_complete(tmp_path):
    for name, events in (("stopped", []), ("complete", [("training_complete", 12, COMPLETE)])):
        record = begin(tmp_path / name)
        for event, step, fields in events:
            record.event(event, step, **fields)
        record.close()
        ((found, _),) = logged(tmp_path / name)
        (code,) = [r.exit.exit_code for r in found if r.HasField("exit")]
        assert code == (0 if events else 1)


def test_all_files_lie_in_the_run_directory_and_nothing_is_sent(tmp_path):
    """Home, cache and temporary folder are empty ones; a proxy and a server of our own count who calls."""
    calls = []
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"

    def count():
        while True:
            try:
                calls.append(server.accept())
            except OSError:
                return

    thread = threading.Thread(target=count)
    thread.start()
    home = tmp_path / "home"
    home.mkdir()
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import test_wandb_log as t\n"
        "record = t.begin(Path(sys.argv[1])); t.train(record, 0, 12)\n"
        "record.event('training_complete', 12, **t.COMPLETE); record.close()\n"
    )
    proxies = {name: address for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "WANDB_BASE_URL")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run"), str(Path(__file__).parent)],
        env=environment(**proxies, HOME=str(home), NO_PROXY="", no_proxy="", PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
    )
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    assert done.returncode == 0 and (done.stdout, done.stderr) == ("", ""), done.stderr
    assert curve(logged(tmp_path / "run")[0][1], "train/loss")[-1] == (12, 2.8)
    assert calls == [] and list(home.rglob("*")) == []


def test_a_failure_of_wandb_is_told_once_and_the_record_goes_on(tmp_path):
    """The background process that wandb talks to is killed in the middle."""
    script = (
        "import os, signal, sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import test_wandb_log as t\n"
        "record = t.begin(Path(sys.argv[1])); t.train(record, 0, 4)\n"
        "parents = {int(p.parent.name): p.read_text().rpartition(')')[2].split()[1] for p in Path('/proc').glob('[0-9]*/stat')}\n"
        "(child,) = [pid for pid, parent in parents.items() if parent == str(os.getpid())]\n"
        "os.kill(child, signal.SIGKILL); os.waitpid(child, 0); time.sleep(0.5)\n"
        "t.train(record, 4, 12); record.close(); print('done')\n"
    )
    if not Path("/proc/self/stat").exists():
        pytest.skip("child processes are found through /proc")
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
    assert done.stderr.count("wandb failed; nothing more is logged to it:") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [2, 4, 6, 8, 10, 12]


def test_a_failure_that_cannot_be_told_ends_no_training(tmp_path, monkeypatch):
    """As with stderr in a file of the disk that is full."""
    (tmp_path / "wandb").write_text("")
    with open("/dev/full", "w", buffering=1) as full:  # as stderr is
        monkeypatch.setattr("sys.stderr", full)
        record = begin(tmp_path)
        train(record, 0, 4)
        record.close()
        monkeypatch.undo()
        with suppress(OSError):  # what it still holds
            full.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 4]


def test_an_id_that_is_still_in_use_ends_no_training(tmp_path, capfd):
    """As in a sweep, whose background process outlives a killed run. What wandb then raises is no wandb.Error."""
    killed = begin(tmp_path)
    train(killed, 0, 4)
    record = resume(tmp_path, killed.offsets(), 4)
    train(record, 4, 8)
    record.close()
    killed.close()
    assert capfd.readouterr().err.count("wandb failed; nothing more is logged to it:") == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 4, 6, 8]


def test_a_disk_that_refuses_the_folder_of_wandb_ends_no_training(tmp_path, capfd):
    (tmp_path / "wandb").write_text("")
    record = begin(tmp_path)
    train(record, 0, 4)
    record.close()
    assert capfd.readouterr().err.count("wandb failed; nothing more is logged to it:") == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 4]


def test_an_error_of_ours_is_not_taken_for_one_of_wandb(tmp_path):
    record = begin(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        record.row({"step": 2, "loss": 1.0, "phase": "nowhere", "mixture": {}})
    record.close()


def test_a_missing_package_is_told_before_anything_is_created(tmp_path, monkeypatch):
    from curriculum.train.trainer import train as train_run

    monkeypatch.setitem(sys.modules, "wandb", None)
    config = build_config(run_config(tmp_path))
    with pytest.raises(
        InputError, match=r"logging\.wandb: the package wandb is not installed; pip install 'curriculum\[wandb\]'"
    ):
        train_run(config, tmp_path / "run", store_dir=tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_a_missing_login_is_told_before_anything_is_created(tmp_path):
    script = (
        "from curriculum.record.wandb_log import WandbConfig, check_wandb; from curriculum.errors import InputError\n"
        "check_wandb(WandbConfig('p', mode='offline'))\n"
        "try: check_wandb(WandbConfig('p'))\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("logging.wandb: No API key configured"), done.stderr
    assert "set WANDB_API_KEY, or choose mode: offline" in done.stdout


def run_config(folder, **wandb):
    text = "one two three four five six seven eight nine ten " * 200
    (folder / "text.txt").write_text(text)
    return {
        "name": "small",
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 32},
        "tokenizer": {"kind": "byte"},
        "sources": {"web": {"path": str(folder / "text.txt"), "held_out": "10%"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
        "evalsets": {"primary": {"held_out_of": "web"}, "every": 4},
        "train": {"steps": 8, "batch_size": 4, "seq_len": 32},
        "optim": {"schedule": "constant"},
        "logging": {"every": 2, "tensorboard": False, "wandb": {"project": "tests", "mode": "offline", **wandb}},
    }


def test_a_training_run_logs_and_its_resume_too(tmp_path, capsys):
    from curriculum.train.trainer import train as train_run

    data = run_config(tmp_path)
    train_run(build_config(data), tmp_path / "run", store_dir=tmp_path / "store")
    data["train"]["steps"] = 12
    train_run(build_config(data), tmp_path / "run", store_dir=tmp_path / "store", resume="latest")
    captured = capsys.readouterr()
    folder = tmp_path / "run/wandb"
    (line,) = (line for line in captured.out.splitlines() if "wandb" in line)
    assert line.startswith(f"  wandb      offline, {folder}; later: ") and "wandb" not in captured.err
    assert line.endswith(f"wandb sync {folder}/offline-run-*")
    assert len(list(folder.glob("offline-run-*"))) == 2
    processes = logged(tmp_path / "run")
    assert len(processes) == 2
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    history = processes[0][1] + processes[1][1]
    assert curve(history, "train/loss") == [(row["step"], row["loss"]) for row in rows]
    assert config_of(processes[0][0]) == read_events(tmp_path / "run")[0]["config"]
    evals = [(e["step"], e["val_loss"]) for e in read_events(tmp_path / "run") if e["event"] == "eval"]
    assert curve(history, "eval/val/loss") == evals and len(evals) == 4


@pytest.mark.parametrize(
    ("wandb", "problem"),
    [
        ({"project": ""}, "logging.wandb.project: got '', expected 1 to 128 characters"),
        ({"project": "a/b"}, "logging.wandb.project: got 'a/b', expected"),
        ({"tags": ["x", ""]}, "logging.wandb.tags[1]: got '', expected 1 to 64 characters"),
        ({"mode": "disabled"}, 'logging.wandb.mode: got "disabled"'),
        ({"projekt": "x"}, "did you mean 'project'?"),
    ],
)
def test_a_problem_names_its_field(tmp_path, wandb, problem):
    with pytest.raises(InputError) as caught:
        build_config(run_config(tmp_path, **wandb))
    assert problem in str(caught.value)
