"""What differs between configs, worked by hand on small ones, and where it is told."""

import json
from pathlib import Path

from written_run import PHASES, command, write_run

from curriculum.run import Run, load_run
from curriculum.run_directory import RunDirectory
from curriculum.views.compare import compare
from curriculum.views.compare_text import table
from curriculum.views.config_differences import config_differences, rows

A, B, NEW = ({"name": name, "mixture": {"web": 1.0}} for name in ("a", "b", "new"))
LAW = {"path": None, "held_out_of": "law"}
FIRST = {
    "sources": {"web": {"path": "web", "max_epochs": None}},
    "phases": [{**A, "until": 6, "lr": None}, {**B, "until": "end", "lr": {"peak": 1.0}}],
    "evalsets": {"every": 3, "seq_len": None, "sets": {}},
    "train": {"seq_len": 8},
    "name": "one",
}
SECOND = {
    "sources": {"web": {"path": "web", "max_epochs": 2}},
    "phases": [{**NEW, "until": 2, "lr": None}, {**B, "until": "end", "lr": {"peak": 2.0}}],
    "evalsets": {"every": 3, "seq_len": None, "sets": {"law": LAW}},
    "train": {"seq_len": 8},
    "name": "two",
    "extra": {"null": None},
}
THIRD = {**FIRST, "phases": [FIRST["phases"][0], {**B, "until": "end", "lr": None}], "mesh": {"data": [1, 2]}}


def differing(*configs: dict) -> list[tuple]:
    runs = [Run(RunDirectory(Path("run")), {**c, "command_line": [c["name"]], "derived": c}, []) for c in configs]
    names = "xyz"[: len(configs)]
    found = config_differences(runs, names)
    assert all(list(difference["values"]) == list(names) for difference in found)
    return [(difference["key"], *difference["values"].values()) for difference in found]


def test_every_key_that_differs_is_told_by_its_path_and_phases_by_name():
    assert differing(FIRST, SECOND) == [
        ("sources.web.max_epochs", None, 2),
        ("phases.a.mixture.web", 1.0, None),
        ("phases.a.until", 6, None),
        ("phases.b.lr.peak", 1.0, 2.0),
        ("phases.new.mixture.web", None, 1.0),
        ("phases.new.until", None, 2),
        ("evalsets.sets.law.held_out_of", None, "law"),
    ]
    assert differing(FIRST, THIRD, FIRST) == [("phases.b.lr.peak", 1.0, None, 1.0), ("mesh.data", None, [1, 2], None)]


def test_mixtures_are_compared_as_shares_however_they_are_written():
    def written(**mixture):
        return {**FIRST, "phases": [{**A, "mixture": mixture}]}

    shares = written(web=0.7, law=0.2, code=0.1)
    assert differing(shares, written(web=70.0, law=20.0, code=10.0), written(web=7, law=2, code=1, books=0)) == []
    assert differing(shares, written(web=60.0, law=30.0, code=10.0)) == [
        ("phases.a.mixture.web", 0.7, 0.6),
        ("phases.a.mixture.law", 0.2, 0.3),
    ]


def test_of_what_only_some_runs_have_the_defaults_are_left_out():
    phase = {"name": "b", "until": "end", "mixture": {"web": 1.0}, "ramp_steps": 0, "ramp_shape": "linear"}
    web, law = ({"path": name, "glob": "**/*", "on_exhaust": "error"} for name in ("web", "law"))
    one = {**FIRST, "phases": [phase], "sources": {"web": web}}
    more = {
        **one,
        "phases": [{**phase, "name": "a", "until": 6, "ramp_steps": 2}, phase],
        "sources": {"web": {**web, "glob": "*.txt"}, "law": {**law, "on_exhaust": "stop"}},
    }
    assert differing(one, more) == [
        ("sources.web.glob", "**/*", "*.txt"),
        ("sources.law.path", None, "law"),
        ("sources.law.on_exhaust", None, "stop"),
        ("phases.a.until", None, 6),
        ("phases.a.mixture.web", None, 1.0),
        ("phases.a.ramp_steps", None, 2),
    ]


def test_a_field_of_the_model_that_is_left_out_is_no_other_than_its_default():
    configs = [{"preset": "tiny", "n_layer": None, "bias": None}, {"preset": None, "n_layer": 4, "bias": True}]
    runs = []
    for model in configs:
        start = {
            "event": "training_start",
            "model": {"n_layer": 4, "bias": model["bias"] or False, "num_parameters": 9},
        }
        runs.append(
            Run(RunDirectory(Path("run")), {**FIRST, "model": model, "command_line": [], "derived": {}}, [start])
        )
    assert [(d["key"], *d["values"].values()) for d in config_differences(runs, "xy")] == [
        ("model.preset", "tiny", None),
        ("model.bias", False, True),
    ]


def test_the_length_of_evals_that_is_left_out_is_the_longest_of_training():
    eight, sixteen = ({**FIRST, "evalsets": {**FIRST["evalsets"], "seq_len": length}} for length in (8, 16))
    longer = {**FIRST, "phases": [{**A, "until": 6, "lr": None, "seq_len": 16}, FIRST["phases"][1]]}
    assert differing(FIRST, eight) == []
    assert differing(FIRST, sixteen) == [("evalsets.seq_len", 8, 16)]
    assert differing(sixteen, longer) == [("phases.a.seq_len", None, 16)]


def test_a_phase_that_is_declared_alike_may_have_other_steps():
    """As in a branch from before the run was extended: percentages are then of other totals."""
    config = {**FIRST, "train": {"steps": 9, "seq_len": 8}}

    def run(end, config=config):
        phases = [{"name": "a", "start": 0, "end": end}, {"name": "b", "start": end, "end": 9}]
        start = {"event": "training_start", "plan": {"phases": phases}}
        return Run(RunDirectory(Path("run")), {**config, "command_line": [], "derived": {}}, [start])

    def told(*runs):
        return [(d["key"], *d["values"].values()) for d in config_differences(runs, "xy")]

    assert told(run(6), run(4)) == [
        ("phases.a, its steps", "0 to 6", "0 to 4"),
        ("phases.b, its steps", "6 to 9", "4 to 9"),
    ]
    assert told(run(6), run(6)) == []
    longer = run(4, {**config, "train": {"steps": 12, "seq_len": 8}})  # says it
    assert told(run(6), longer) == [("train.steps", 9, 12)]


def test_what_is_a_section_in_one_and_a_value_in_another_is_told_as_a_whole():
    wandb = {**FIRST, "logging": {"wandb": {"project": "p"}}}
    assert differing(wandb, {**FIRST, "logging": {"wandb": True}}) == [("logging.wandb", {"project": "p"}, True)]


def test_configs_that_differ_in_the_name_alone_differ_in_nothing():
    assert differing(FIRST, {**FIRST, "name": "other"}) == []


def test_values_are_shortened_in_the_middle_unless_they_look_alike_then():
    def told(*values):
        ((key, *cells),) = rows([{"key": "k", "values": dict(enumerate(values))}])
        assert key == "k"
        return cells

    head, tail = "h" * 24, "t" * 21
    assert told(None, "a\nb", 0.5, True, ["x"]) == ["-", "a\\nb", "0.5", "true", '["x"]']
    assert told(f"{head}1234{tail}", f"{head}123{tail}") == [f"{head} … {tail}", f"{head}123{tail}"]
    alike = [head + middle + tail for middle in ("1234", "5678")]
    assert told(*alike) == alike


def test_of_many_keys_of_a_section_the_first_are_shown_and_the_others_counted():
    phases = [{"key": f"phases.p{i}.until", "values": {"a": i, "b": None}} for i in range(5)]
    differences = [*phases, {"key": "train.steps", "values": {"a": 1, "b": 2}}]
    assert [row[0] for row in rows(differences)] == [d["key"] for d in differences]
    assert rows(differences, 5) == rows(differences)
    assert rows(differences, 2) == [
        ("phases.p0.until", "0", "-"),
        ("phases.p1.until", "1", "-"),
        ("3 more keys of phases: --json", "…", "…"),
        ("train.steps", "1", "2"),
    ]


def test_the_configs_stand_above_the_losses_as_text_and_in_json(tmp_path):
    losses = {"val": lambda step: 3.0}
    phases = [("early", 0, 60, {"web": 0.8, "code": 0.2}), PHASES[1]]
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", {**losses, "law": lambda step: 1.0}, phases=phases, name="other")
    third = write_run(tmp_path / "third", losses, name="third")
    lines = [line.split() for line in table(compare([first, second]))]
    begin, end = lines.index(["config", "first", "second"]), lines.index([], lines.index(["config", "first", "second"]))
    assert ["phases.foundation.mixture.web", "0.8", "-"] in lines[begin:end]
    assert ["phases.early.until", "-", "60"] in lines[begin:end]
    assert ["evalsets.sets.law.path", "-", "law"] in lines[begin:end]
    assert lines[end + 1][:2] == ["eval", "set"] and lines[begin - 2][0] == "second"
    assert not any(line[0] == "name" or "domain" in line[0] for line in lines[begin:end])
    code, out, _, _ = command("compare", first, second, "--json")
    told = {difference["key"]: difference["values"] for difference in json.loads(out)["config"]}
    assert code == 0 and told["phases.early.until"] == {"first": None, "second": 60}
    same = compare([first, third])
    assert same.config == () and "No key of the configs differs." in table(same)
    assert load_run(first).config_json != load_run(third).config_json
