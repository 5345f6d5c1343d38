"""The config: what is accepted, what is refused, and how it is told."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import write_config_reference

from curriculum.config import Config, build_config, changed_config, config_from_json, load_config, run_name_of, sections
from curriculum.errors import InputError
from curriculum.parsing.typed import annotations, key_paths
from curriculum.parsing.variables import substitute
from curriculum.parsing.yaml12 import Origin, parse_yaml, read_override, read_yaml, set_option
from curriculum.plan_warnings import schedule_warnings
from curriculum.scheduling import check_schedule, resolve_schedule
from curriculum.schema.misplaced import OTHER_NAMES

ROOT = Path(__file__).parents[1]

GOOD = """\
name: example
sources:
  web: {path: web.txt, held_out: 10%}
  law: {path: law.txt, max_epochs: 2}
phases:
  - {name: a, until: 50%, mixture: {web: 1}}
  - {name: b, until: end, mixture: {web: 0.5, law: 0.5}, ramp_steps: 5, lr: {peak: 3e-4, rewarm_steps: 4}}
evalsets:
  primary: {held_out_of: web}
  sets: {law: {path: law.txt, every: 200}}
train: {steps: 100, batch_size: 8, seq_len: 64}
optim: {lr: 6e-4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("web.txt", "law.txt"):
        Path(name).write_text("some text")
    return tmp_path


def load(text=GOOD, *overrides, **options):
    Path("c.yaml").write_text(text)
    return load_config("c.yaml", overrides, **options)


def problems(text=GOOD, *overrides, **options):
    with pytest.raises(InputError) as error:
        load(text, *overrides, **options)
    return list(error.value.problems)


def test_a_name_that_a_directory_cannot_have_is_told_with_one_that_it_can(folder):
    """A = in a path parts a name from it."""
    (folder / "data").mkdir()
    (folder / "data/lang=de").mkdir()
    (problem,) = problems(eval_dataset_dirs=["data/lang=de"])
    assert problem.startswith("--eval-dataset-dir data/lang=de: got the name 'data/lang', expected letters")
    assert problem.endswith("; give another: --eval-dataset-dir NAME=data/lang=de")
    (problem,) = problems(eval_dataset_dirs={"x=y": "web.txt"})
    assert problem.startswith("--eval-dataset-dir x=y=web.txt: got the name 'x=y', expected letters")


def test_a_good_config_has_its_values_and_defaults(folder):
    config = load()
    assert config.phases[1].lr.peak == 3e-4 and config.optim.lr == 6e-4
    assert config.train.batch_size == 8 and config.train.grad_accum == 1
    assert list(config.eval_sources) == ["primary", "law"] and config.eval_seq_len == 64
    assert config.seed == 1337 and config.model.preset == "tiny"


def test_json_round_trip_gives_an_equal_config(folder):
    config = load()
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.to_json()["optim"]["b2"] == 0.95


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("steps: 100", "stepz: 100", "c.yaml:11:9: train.stepz: no such key; did you mean 'steps'? (keys: batch_size,"),
        ("steps: 100, ", "", "c.yaml:11:1: train.steps: missing; this key is needed"),
        ("steps: 100", "steps: 10%", 'c.yaml:11:9: train.steps: got "10%", expected an integer, without %'),
        ("lr: 6e-4", "lr: .nan", "c.yaml:12:13: got .nan, expected a finite number"),
        ("lr: 6e-4", "lr: 0,002", "c.yaml:12:15: the key '002' has no value; is it lr: 0.002, with a decimal point?"),
        ("lr: 6e-4", "lr: '0,002'", 'optim.lr: got "0,002", expected a number, with a decimal point: 0.002'),
        ("lr: 6e-4", "lr: -1", "c.yaml:12:9: optim.lr: got -1.0, expected a positive learning rate"),
        ("lr: 6e-4", "lr: 1e39", "c.yaml:12:9: optim.lr: got 1e+39, expected a positive learning rate from 1e-30 to 3.4e+38"),
        ("law: 0.5", "lwa: 0.5", "c.yaml:7:47: phases[1].mixture.lwa: no such source; did you mean 'law'?"),
        ("name: b", "name: a", "c.yaml:7:6: phases[1].name: 'a' is already the name of phases[0]"),
        ("ramp_steps: 5", "ramp: 5", "phases[1].ramp: no such key; did you mean 'ramp_steps' or 'ramp_shape'? (keys:"),
        ("steps: 100", "accum: 100", "train.accum: no such key; did you mean 'grad_accum'?"),
        ("path: web.txt", "path: web.text", "sources.web.path: 'web.text' does not exist; did you mean 'web.txt'?"),
        ("held_out: 10%", "held_out: 110%", "c.yaml:3:24: sources.web.held_out: expected a share such as"),
        ("max_epochs: 2", "max_epochs: 0", "sources.law.max_epochs: got 0.0, expected a finite number above 0; leave it out for no cap"),
        ("max_epochs: 2", "on_exhaust: stop", "sources.law.on_exhaust: got stop, which has no effect without max_epochs: the"),
        ("path: law.txt, max", "path: law.txt, hf: x, max", "c.yaml:4:24: sources.law.hf: a source needs exactly one of path and hf"),
        ("every: 200}}", "every: 200}}\n  gold: {minimise: primary/los}", "c.yaml:11:10: evalsets.gold.minimise: got 'primary/los', expected one of SET/loss"),
        ("every: 200}}", "every: 200}}\n  gold: {minimise: lwa/loss}", "c.yaml:11:10: evalsets.gold.minimise: got 'lwa/loss': no such eval set; did you mean 'law'?"),
        ("every: 200}}", "every: 200}}\n  gold: {subject_to: {lwa: {max_increase: 0.1}}}", "c.yaml:11:23: evalsets.gold.subject_to.lwa: no such eval set; did you mean 'law'?"),
        ("every: 200}}", "every: 200}}\n  gold: {minimise: val/loss}", "c.yaml:11:10: evalsets.gold.minimise: got 'val/loss': no such eval set; did you mean 'primary', which record and console call val? (eval sets: law, primary)"),
        ("every: 200}}", "every: 200}}\n  gold: {subject_to: {val: {max_increase: 0.1}}}", "c.yaml:11:23: evalsets.gold.subject_to.val: no such eval set; did you mean 'primary', which record"),
        ("every: 200}}", "every: 200}}\n  gold: {subject_to: {law: 0.1}}", "gold.subject_to.law: got 0.1, expected a mapping: {max_increase: 0.1}"),
        ("every: 200}}", "every: 200}}\n  gold: {subject_to: {web: {max_increase: 0.1}}}", "gold.subject_to.web: no such eval set; did you mean 'primary', which is held out of web? (eval sets:"),
        ("every: 200}}", "every: 200}, lwa: {tolerance: 0.1}}", "evalsets.sets.lwa: got none, expected exactly one of 'held_out_of', 'path' and 'hf'; did you mean the set 'law'?"),
        ("every: 200}}", "every: 200}}\n  gold: {gate: no-such-gate --strict}", "c.yaml:11:10: evalsets.gold.gate: got the program 'no-such-gate', which is neither"),
        ("every: 200}}", "every: 200}}\n  regression: {tolerance: -1}", "c.yaml:11:16: evalsets.regression.tolerance: got -1.0, expected a finite number"),
        ("every: 200}}", "every: 200}}\n  regression: {confidence: 1}", "c.yaml:11:16: evalsets.regression.confidence: got 1.0, expected above 0.5"),
        ("held_out_of: web}", "path: web.txt}\n  regression: {action: replay}", "evalsets.regression.action: got replay, but no eval set is held out of a source"),
        ("held_out_of: web", "held_out_of: wbe", "evalsets.primary.held_out_of: got 'wbe': no such source; did you mean 'web'?"),
        ("held_out_of: web", "held_out_of: law", "source law holds nothing out; give sources.law a 'held_out' share"),
        ("{held_out_of: web}", "{}", "evalsets.primary: got none, expected exactly one of"),
        ("every: 200", "every: 150", "evalsets.sets.law.every: got 150, expected a multiple of evalsets.every (100)"),
        ("sets: {law:", "sets: {a/b:", "evalsets.sets.a/b: got the name 'a/b', expected letters (a-z, A-Z), digits"),
        ("sets: {law:", "sets: {law_sem:", "the name 'law_sem' is reserved for the record"),
        ("sets: {law:", "sets: {Val:", "evalsets.sets.Val: the name 'Val' is reserved for the record"),
        ("every: 200}}", "every: 200}, LAW: {held_out_of: web}}", "evalsets.sets.LAW: differs from 'law' by case alone, expected another name: each set has a folder"),
        ("batch_size: 8", "batch_size: 8, grad_accum: 3", "train.grad_accum: got 3, expected a divisor of train.batch"),
        ("seq_len: 64", "seq_len: 9999", "train.seq_len: got 9999 for phases without their own (a, b), expected at most the model's max_seq_len (1024)"),
        ("name: example", "name: a b", "c.yaml:1:1: name: got 'a b', expected letters"),
        ("steps: 100", "steps: 100, compute_dtype: x", "train.compute_dtype: no such key; did you mean model.compute_dtype? (keys:"),
        ("steps: 100", "steps: 100, lr: 1", "train.lr: no such key; did you mean phases[N].lr or optim.lr? (keys:"),
        ("steps: 100", "steps: 100, every: 9", "train.every: no such key; did you mean evalsets.every or checkpoint.every or logging.every? (keys:"),
        ("steps: 100", "steps: 100, save_steps: 9", "train.save_steps: no such key; did you mean 'steps' or checkpoint.every? (keys:"),
        ("steps: 100", "max_iters: 100", "train.max_iters: no such key; did you mean train.steps? (keys:"),
        ("every: 200", "held_out: 1%", "evalsets.sets.law.held_out: no such key; did you mean 'held_out_of' or sources.NAME.held_out? (keys:"),
        ("name: example", "learning_rate: 1", "c.yaml:1:1: learning_rate: no such key; did you mean optim.lr? (keys:"),
        ("name: example", "seed: -1", "c.yaml:1:1: seed: got -1, expected at least 0"),
        ("name: example", "model: {preset: tinny}", "model.preset: no such preset: 'tinny'; did you mean 'tiny'?"),
        ("name: example", "model: {preset: tiny, vocab_size: 100}", "model.vocab_size: got 100, expected at least the"),
        ("name: example", "tokenizer: {kind: bpe}", "c.yaml:1:13: tokenizer.kind: kind bpe needs vocab_size"),
        ("name: example", "tokenizer: {kind: tiktoken}", "c.yaml:1:13: tokenizer.kind: kind tiktoken needs name"),
        ("name: example", "name: x\nname: y", "c.yaml:2:1: the key 'name' occurs twice"),
        ("name: example", 'name: "\\ud800"', "half of a surrogate pair"),
        ("{web: 1}", "{<<: {web: 1}}", "c.yaml:6:37: merge keys (<<) are not part of YAML 1.2; write the keys out"),
        ("{held_out_of: web}", "{held_out_of: web, glob: x}", "evalsets.primary.glob: text_key, glob and format apply to 'path'"),
        ("{held_out_of: web}", "{held_out_of: web, format: messages}", "evalsets.primary.format: text_key, glob and format apply"),
        ("{path: law.txt, every: 200}", "{path: law.bin, format: messages}", "c.yaml:10:31: evalsets.sets.law.format: format messages needs rows of"),
        ("{held_out_of: web}", "{path: law.txt, format: completion, text_key: x}", "evalsets.primary.text_key: text_key applies to"),
        ("{held_out_of: web}", "{hf: ':x'}", "evalsets.primary.hf: hf is ':x'; expected a dataset of the hub"),
        ("name: example", "tokenizer: {kind: bpe, path: none}", "c.yaml:1:24: tokenizer.path: 'none' does not exist"),
        ("name: example", "tokenizer: {kind: byte, vocab_size: 5}", "c.yaml:1:25: tokenizer.vocab_size: vocab_size applies to kind bpe"),
        ("name: example", "? [a]\n: 1", "got a collection as a key"),
    ],
)  # fmt: skip
def test_problems_name_place_and_mending(folder, old, new, expected):
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    assert any(expected in problem for problem in found), found


def test_all_problems_are_told_at_once_in_the_order_of_the_file(folder):
    text = GOOD.replace("law: 0.5", "lwa: 0.5").replace("steps: 100", "stepz: 100").replace("lr: 6e-4", "lr: -1")
    found = problems(text)
    assert [p.split(": ")[1] for p in found] == ["phases[1].mixture.lwa", "train.steps", "train.stepz", "optim.lr"]
    # Options come last, whatever they look like.
    told = problems(GOOD.replace("lr: 6e-4", "lr: -1"), "sources.web.path=c.yaml:1:1: x")
    assert [problem[:21] for problem in told] == ["c.yaml:12:9: optim.lr", "--set sources.web.pat"]


def test_yaml_1_2_scalars(folder):
    config = load(GOOD.replace("lr: 6e-4", "lr: 1e-3").replace("name: example", "name: on"))
    assert config.optim.lr == 1e-3 and config.name == "on"


def test_a_tag_that_says_text_is_heard(folder):
    assert load(GOOD.replace("name: example", "name: !!str 007")).name == "007"
    assert load(GOOD.replace("name: example", "name: ! 7")).name == "7"
    assert 'train.steps: got "100", expected an integer' in problems(GOOD.replace("steps: 100", "steps: !!str 100"))[0]
    assert "got the tag 'tag:yaml.org,2002:int'" in problems(GOOD.replace("steps: 100", "steps: !!int 100"))[0]


def test_one_set_that_is_held_out_is_enough_for_replay(folder):
    """The set law has a path of its own."""
    replay = load(GOOD.replace("every: 200}}", "every: 200}}\n  regression: {action: replay}"))
    assert replay.evalsets.regression.action == "replay" and replay.eval_sources["law"].held_out_of is None


def test_a_vocabulary_has_room_for_every_id_of_the_tokenizer(folder):
    """The ids of kind byte: 256 bytes and end-of-text."""
    assert load(GOOD, "model={preset: tiny, vocab_size: 257}").model.vocab_size == 257
    (problem,) = problems(GOOD.replace("name: example", "name: a\nmodel: {preset: tiny, vocab_size: 256}"))
    assert "model.vocab_size: got 256, expected at least the" in problem


def test_one_problem_hides_no_other(folder):
    found = problems(GOOD.replace("name: example", "name: a b\nmodel: {preset: tiny, vocab_size: 100}"))
    assert [p.split(": ")[1] for p in found] == ["name", "model.vocab_size"]


def test_an_alias_repeats_what_it_names_but_not_itself_and_not_without_end(folder):
    assert parse_yaml(f"[{'1,' * 120_000}]", Origin()) == [1] * 120_000  # each of them is written
    assert "alias contains itself" in problems("a: &a [*a]\n")[0]


def test_of_phases_named_by_numbers_set_finds_the_name_and_brackets_the_place(folder):
    text = GOOD.replace("name: a,", 'name: "1",').replace("name: b,", 'name: "0",')
    for given in ("phases.1.until=7", "phases[0].until=7"):
        assert [p.until for p in load(text, given).phases] == [7, "end"]
    for given in ("phases.0.mixture={law: 1}", "phases[1].mixture={law: 1}"):
        config = load(text, given)
        assert [p.mixture for p in config.phases] == [{"web": 1.0}, {"law": 1.0}]
        assert config.command_line == ["--set phases[1].mixture={law: 1}"]
    # What a run remembers is a place, as before there were such names.
    again = load(text, remembered=[*config.command_line, "--set phases.0.until=7"])
    assert again.phases[1].mixture == {"law": 1.0} and [p.until for p in again.phases] == [7, "end"]


def test_set_overrides_values_and_is_named_in_problems(folder):
    config = load(GOOD, "train.steps=40", "phases[0].until=20", "phases.1.mixture={law: 1}", "optim.lr=1e-3")
    assert config.train.steps == 40 and config.phases[0].until == 20 and config.optim.lr == 1e-3
    assert config.phases[1].mixture == {"law": 1.0}
    assert problems(GOOD, "train.stepz=4") == [
        "--set train.stepz=4: train.stepz: no such key; did you mean 'steps'? "
        "(keys: batch_size, deterministic, grad_accum, rollback, seq_len, skip_updates, steps)"
    ]
    assert "expected KEY=VALUE" in problems(GOOD, "train.steps")[0]
    for index in ("7", "²"):
        assert f"phases has 2 entries (0 to 1), got {index!r}" in problems(GOOD, f"phases[{index}].until=3")[0]
    second = load(GOOD).phases[1].name
    by_name, by_number = load(GOOD, f"phases.{second}.ramp_steps=3"), load(GOOD, "phases[1].ramp_steps=3")
    assert by_name.phases[1].ramp_steps == 3 and by_name == by_number != load(GOOD)
    assert by_name.command_line == by_number.command_line == [f"--set phases.{second}.ramp_steps=3"]
    assert problems("- {a: 1}\n", "0.a=2") == ['c.yaml:1:1: got [{"a": 1}], expected a mapping of sections']
    assert problems(GOOD, "phases.c.until=3") == [
        f"--set phases.c.until=3: phases has 2 entries (0 to 1), got 'c' (names: {load(GOOD).phases[0].name}, {second})"
    ]
    one = GOOD.partition("phases:")[0] + "phases: [{name: all, until: end, mixture: {law: 1}}]\n"
    assert "phases has 1 entry (0), got 'c' (names: all)" in problems(one, "phases.c.until=3")[0]
    assert "got 'al'; did you mean 'all'? (names: all)" in problems(one, "phases.al.until=3")[0]
    assert "--set phases[0].until=3: phases has 0 entries, got '0'" in problems("phases: []\n", "phases[0].until=3")
    for override, message in [
        ("sources.web.held_out=50", 'expected a share such as "1%"'),
        ("sources.web.path=", "a source needs exactly one of path and hf"),
        ("sources.web.hf=x", "a source needs exactly one of path and hf"),
        ("sources.web.dtype=u16", "dtype applies to a flat .bin file"),
        ("evalsets.sets.law.format=completion", "text_key, glob and format apply"),
        ("evalsets.sets.law.hf=x", "got held_out_of and hf, expected exactly one of"),
    ]:
        given = GOOD.replace("{path: law.txt, every", "{held_out_of: web, every")
        key = override.partition("=")[0]
        found = problems(given, override)
        assert any(p.startswith(f"--set {override}: {key}: ") and message in p for p in found), found
    assert problems(GOOD, "a.b.c=1")[0].startswith("--set a.b.c=1: a: no such key")


def test_a_problem_of_an_option_that_the_run_remembers_says_so(folder):
    (found,) = problems(GOOD, remembered=["--set train.steps=0"])
    assert found.startswith("--set train.steps=0 (which the run remembers): train.steps: got 0")
    (found,) = problems(GOOD, "train.steps=0", remembered=["--set train.steps=0"])
    assert found.startswith("--set train.steps=0: train.steps: got 0")


def test_remembered_options_come_first_and_a_new_directory_wins(folder):
    Path("b.txt").write_text("other")
    config = load(
        GOOD, remembered=["--set sources.law.path=web.txt", "--set train.steps=7"], dataset_dirs=["law=b.txt"]
    )
    assert config.sources["law"].path == "b.txt" and config.train.steps == 7
    assert config.command_line == ["--set train.steps=7", "--dataset-dir law=b.txt"]


def test_a_directory_is_remembered_to_its_last_blank(folder):
    Path("b ").write_text("other")
    assert load(GOOD, dataset_dirs=["law=b "]).command_line == ["--dataset-dir law=b "]


def test_what_a_directory_replaced_is_told_with_what_gives_it_again(folder):
    Path("b.txt").write_text("other")
    told = [f"--dataset-dir {name}=b.txt replaced all of sources.{name}" for name in ("web", "law")]
    again = ["--set sources.web.held_out=10%", "--set sources.law.max_epochs=2"]

    def warned(config):
        schedule = resolve_schedule(config, dict.fromkeys(config.sources, 10**6))
        return [line for line in schedule_warnings(config, schedule, {}) if "replaced" in line]

    place = "c.yaml:9:13: evalsets.primary.held_out_of: source"
    assert problems(GOOD, dataset_dirs=["web=b.txt"]) == [f"{place} web holds nothing out; {told[0]}: add {again[0]}"]
    unnamed = GOOD.replace("  web: {path: web.txt, held_out: 10%}\n", "")
    by_option = "--dataset-dir web=b.txt gives its path alone: add --set sources.web.held_out=1%"
    assert problems(unnamed, dataset_dirs=["web=b.txt"])[0].endswith(f" web holds nothing out; {by_option}")
    # Of options too, as of those that a run remembers.
    options = ["--dataset-dir web=web.txt", "--set sources.web.held_out=20%"]
    (found,) = problems(GOOD, remembered=options, dataset_dirs=["web=b.txt"])
    assert found.endswith(f"{told[0]}: add --set sources.web.held_out=20%")
    directories = {"dataset_dirs": ["web=b.txt", "law=b.txt"], "eval_dataset_dirs": ["law=b.txt"]}
    config = load(GOOD, "sources.web.held_out=1%", **directories)
    assert warned(config) == [
        f"{told[1]}; to keep its max_epochs, add {again[1]}",
        "--eval-dataset-dir law=b.txt replaced all of evalsets.sets.law; to keep its every, add "
        "--set evalsets.sets.law.every=200",
    ]
    held_out = GOOD.replace("{path: law.txt, every: 200}", "{held_out_of: web, every: 200}")
    assert warned(load(held_out, eval_dataset_dirs=["law=b.txt"])) == [warned(config)[1]]
    (problem,) = config.error([("sources.law.max_epochs", "got null, but the run had 2")]).problems
    assert (
        problem
        == f"--dataset-dir law=b.txt: sources.law.max_epochs: got null, but the run had 2; {told[1]}: add {again[1]}"
    )
    own = changed_config(load(), dataset_dirs=["law=b.txt"])  # of no file: with every default
    assert warned(own) == [f"{told[1]}; to keep its max_epochs, add --set sources.law.max_epochs=2.0"]


VARIABLES = (
    GOOD
    + """\
variables:
  main: web
  folder: law
  law_path: ${variables.folder}.txt
  size: {batch: 16, length: 32}
"""
)


@pytest.mark.parametrize(
    "value",
    ["*.jsonl", "2%", "2", "true", "null", "", "a: b", "[x", "é 'q' \"r\"", "a\x85b\u2028", 3, [1, 2], {"a": 0.5}],
)
def test_an_advised_option_says_what_it_is_made_of(value):
    flag, given = shlex.split(set_option("a.b", value))
    data = {}
    read_override(data, Origin("c.yaml"), given)
    assert flag == "--set" and data == {"a": {"b": value}} and type(data["a"]["b"]) is type(value)


def test_variables_are_used_whole_and_inside_text(folder):
    text = VARIABLES.replace("batch_size: 8", "batch_size: $variables.size.batch").replace(
        "{path: law.txt, max", "{path: '${variables.law_path}', max"
    )
    config = load(text.replace("seq_len: 64", "seq_len: $variables.size.length"), "variables.size.batch=4")
    assert config.train.batch_size == 4 and config.train.seq_len == 32 and config.sources["law"].path == "law.txt"
    assert "variables" not in config.to_json()


@pytest.mark.parametrize(
    "value, words",
    [
        ("$variables.mian", "no such variable: 'mian'; did you mean 'main'? (variables: main, folder,"),
        ("a${variables.size}", "variable 'size' is neither text nor a number"),
        ("${variables.size.none}", "no such variable: 'size.none'"),
        ("x$variables.main", "got 'x$variables.main', which uses no variable; inside text write ${variables.x}"),
        ("$variables.main and more", "inside text write ${variables.x}"),
        ("${variable.main}", "inside text write ${variables.x}"),
        ("${variables.main", "inside text write ${variables.x}"),
        ("a${variables.main}$variables.main", "inside text write ${variables.x}"),
    ],
)
def test_variables_that_cannot_be_resolved(folder, value, words):
    found = problems(VARIABLES.replace("name: example", f"name: {value}"))
    assert found[0].startswith("c.yaml:1:1: name: ") and words in found[0]


def test_a_variable_that_is_not_there_is_one_problem(folder):
    (found,) = problems(VARIABLES.replace("seq_len: 64", "seq_len: $variables.mian"))
    assert "train.seq_len: no such variable: 'mian'" in found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "a-1"),
        (["variables.tag=b"], "b-1"),
        (["variables.n=007"], "a-007"),
        (["variables.n=2.50", "variables.n=x"], "a-x"),
        (["variables.n=2.50", "variables={tag: b, n: 3}"], "b-3"),
        (["variables={tag: b, n: 2}"], "b-2"),
        (["name=exp"], "exp"),
        (["name=${variables.n}-x", "variables.n=3"], "3-x"),
    ],
)
def test_the_name_of_a_run_is_found_before_its_other_options(folder, options, expected):
    named = "name: ${variables.tag}-${variables.n}\nvariables: {tag: a, n: 1}"
    assert load(GOOD.replace("name: example", named), *options).name == expected
    assert run_name_of("c.yaml", options) == expected
    # Whether there is such a phase, options that the run remembers may decide.
    assert run_name_of("c.yaml", [*options, "phases[7].until=5"]) == expected


def test_a_number_inside_text_stands_there_as_it_is_written(folder):
    text = (
        VARIABLES.replace("{batch: 16, length: 32}", "{rate: 3e-4}")
        + "  version: 1.10\n  day: 007\n  same: $variables.day\n"
    )
    named = text.replace("name: example", "name: ${variables.size.rate}-${variables.day}-${variables.same}")
    assert load(named).name == run_name_of("c.yaml") == "3e-4-007-7"
    assert load(text.replace("lr: 6e-4", "lr: $variables.size.rate")).optim.lr == 3e-4
    assert (
        "'v1.10.txt' does not exist"
        in problems(text.replace("path: law.txt", "path: 'v${variables.version}.txt'", 1))[0]
    )
    named = GOOD.replace("name: example", "name: ${variables.a.x}-${variables.a.y}-${variables.z}-${variables.old}")
    options = ["variables={old: 1e05}", "variables.a={x: 1e00, y: 010}", "variables.z=2e00"]
    assert load(named, *options).name == "1e00-010-2e00-1e05"


@pytest.mark.parametrize("name", ["a.b", "a b", "''", "é"])
def test_a_variable_that_no_use_can_name_is_refused(folder, name):
    found = problems(VARIABLES + f"  {name}: 1\n")
    assert (
        f"got the name {name if name != chr(39) * 2 else ''!r}, expected letters (a-z, A-Z), digits, '_' and '-'"
        in found[0]
    )
    assert len(found) == 1 and found[0].startswith("c.yaml:")


def test_a_variable_that_is_set_and_nothing_uses_is_told(folder):
    text = VARIABLES.replace("law.txt", "$variables.law_path")
    unused = "variables.foldre: nothing uses this variable; did you mean 'folder'? (used: folder, law_path)"
    assert problems(text, "variables.foldre=web") == [f"--set variables.foldre=web: {unused}"]
    assert "variables.main: nothing uses this variable (used:" in problems(text, "variables.main=law")[0]
    text = text.replace("batch_size: 8", "batch_size: $variables.size.batch")
    unused = "variables.size.batchh: nothing uses this variable; did you mean 'size.batch'? (used:"
    assert unused in problems(text, "variables.size.batchh=4")[0]
    assert load(text, "variables.size.batch=4") == load(text, "variables.size={batch: 4}")
    # A file that uses it no more is not held against what the run remembers of it.
    Path("c.yaml").write_text(text)
    assert load_config("c.yaml", remembered=["--set variables.main=law"]).sources["law"].path == "law.txt"


def test_variables_that_nothing_uses_are_resolved_too(folder):
    assert problems(GOOD, "variables.a=$variables.b", "variables.b=x${variables.a}") == [
        "--set variables.a=$variables.b: variables.a: variables use each other in a circle: b -> a -> b",
        "--set variables.b=x${variables.a}: variables.b: variables use each other in a circle: a -> b -> a",
    ]
    assert (
        "--set variables.a={x: [1, $variables.none]}: variables.a.x[1]: no such variable: 'none' (variables: a)"
    ) in problems(GOOD, "variables.a={x: [1, $variables.none]}")
    assert "variables.a: got 'x $variables.a'" in problems(GOOD, "variables.a=x $variables.a")[0]


@pytest.mark.parametrize(
    "uses",
    [
        [f"'${{variables.v{i}}}${{variables.v{i}}}'" for i in range(1, 31)],  # doubles with each
        [f"$variables.v{i}" for i in range(1, 501)],
        [f"a${{variables.v{i}}}" for i in range(1, 501)],
        ["{k: " * 40 + f"$variables.v{i}" + "}" * 40 for i in range(1, 13)],
    ],
)
def test_variables_without_end_are_refused_at_once(folder, uses):
    lines = [f"  v{i}: {use}\n" for i, use in enumerate([*uses, "a"])]
    [problem] = problems(f"{GOOD}\nvariables:\n{''.join(lines)}")
    assert "variables: expand to more than 100,000 values or 200 levels" in problem


def test_a_config_itself_may_have_more_values_than_variables_may_bring():
    data = {"sources": [[0.5] * 1000] * 200}
    assert substitute({**data, "variables": {"a": "$variables.b", "b": 1}}, {}) == (data, [])


def test_a_circle_of_variables_need_not_hold_the_first_one(folder):
    found = problems(GOOD.replace("name: example", "name: $variables.a\nvariables: {a: $variables.b, b: $variables.b}"))
    circles = [problem.split(": ", 1)[1] for problem in found if "circle" in problem]
    words = "variables use each other in a circle: b -> b"
    assert circles == [f"name: {words}", f"variables.a: {words}", f"variables.b: {words}"]


def test_directories_of_the_command_line_become_sources_and_sets(folder):
    Path("extra").mkdir()
    config = load(GOOD, dataset_dirs=["law=extra"], eval_dataset_dirs=["extra", "mine=law.txt"])
    assert config.sources["law"].path == "extra"
    assert config.evalsets.sets["extra"].path == "extra" and config.evalsets.sets["mine"].path == "law.txt"
    assert config.command_line == [
        "--dataset-dir law=extra",
        "--eval-dataset-dir extra=extra",
        "--eval-dataset-dir mine=law.txt",
    ]
    config = load(GOOD, "evalsets.sets.extra.glob=x.md", "sources.law.format=messages",
                  dataset_dirs=["law=extra"], eval_dataset_dirs=["extra"])  # fmt: skip
    assert config.evalsets.sets["extra"].glob == "x.md" and config.sources["law"].format == "messages"
    assert config.evalsets.sets["extra"].path == config.sources["law"].path == "extra"
    for option in ("dataset_dirs", "eval_dataset_dirs"):
        flag = "--" + option.removesuffix("s").replace("_", "-")
        assert problems(GOOD, **{option: ["extra=law.txt", "b=law.txt", "extra"]}) == [
            f"{flag} extra: extra is already the name of law.txt; expected another one, as in OTHER=extra"
        ]
    found = problems(GOOD, eval_dataset_dirs=["mine=nowhere"])
    assert found == [
        "--eval-dataset-dir mine=nowhere: evalsets.sets.mine.path: 'nowhere' does not exist "
        "(paths are relative to the working folder)"
    ]


def test_what_is_missing_is_missing_in_the_file_and_not_in_an_option_beside_it(folder):
    without = "".join(
        line for line in GOOD.splitlines(keepends=True) if not line.startswith(("evalsets", "  primary", "  sets"))
    )
    missing = "evalsets.primary: missing; this key is needed"
    assert problems(without, eval_dataset_dirs=["mine=law.txt"]) == [f"c.yaml:1:1: {missing}"]
    assert problems(without + "evalsets: {every: 5}\n", eval_dataset_dirs=["mine=law.txt"]) == [
        f"c.yaml:10:1: {missing}"
    ]
    assert problems(GOOD, "evalset.every=5")[0].startswith("--set evalset.every=5: evalset: no such key")


def test_plain_data_builds_a_config_for_library_use(folder):
    config = build_config(
        {
            "sources": {"web": {"path": "web.txt", "held_out": 0.1}},
            "phases": [{"name": "only", "until": "end", "mixture": {"web": 1}}],
            "evalsets": {"primary": {"held_out_of": "web"}},
            "train": {"steps": 5},
        }
    )
    assert config.name == "run" and config.phases[0].mixture == {"web": 1.0}


def test_what_python_has_beside_yaml_is_taken_or_refused_with_its_place(folder):
    data = {
        "variables": {"text": Path("web.txt")},
        "sources": {"web": {"path": "$variables.text", "held_out": np.float64(0.1)}},
        "phases": ({"name": np.str_("only"), "until": "end", "mixture": {"web": np.float32(0.5)}},),
        "evalsets": {"primary": {"held_out_of": "web"}},
        "train": {"steps": np.int64(5), "deterministic": np.bool_(True)},
    }
    config = build_config(data)
    assert config.to_json() == build_config(json.loads(json.dumps(config.to_json()))).to_json()
    assert (config.sources["web"].path, config.sources["web"].held_out) == ("web.txt", 0.1)
    assert (config.train.steps, config.train.deterministic) == (5, True) and type(config.train.steps) is int
    with pytest.raises(InputError) as told:
        build_config(data | {"train": {"steps": np.arange(2), "seq_len": 1j}, "name": [{1}]})
    assert told.value.problems == (
        "config: train.steps: got a ndarray, expected a YAML value: text, a number, a list or a mapping",
        "config: train.seq_len: got a complex, expected a YAML value: text, a number, a list or a mapping",
        "config: name[0]: got a set, expected a YAML value: text, a number, a list or a mapping",
    )


def test_the_schema_and_the_reference_are_true():
    assert not write_config_reference.stale(), "run python tools/write_config_reference.py"
    reference = (ROOT / "docs/config.md").read_text()
    rows = [line.split(" | ") for line in reference.splitlines() if line.startswith("| `")]
    assert len(rows) > 60 and all(row[3].strip(" |") for row in rows), "a key without its meaning"
    assert json.loads((ROOT / "configs/schema.json").read_text())["$defs"]["TrainSection"]["required"] == ["steps"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_of_the_repository_loads(path):
    config = load_config(path, check_paths=False)
    check_schedule(config)
    assert config.phases
    assert resolve_schedule(config, dict.fromkeys(config.sources, 10**12)).warnings == ()


def fits(value, schema, definitions):
    """Whether a JSON schema takes the value, for the keywords that ours has."""
    known = {"title", "description", "default", "$schema", "$defs", "anyOf", "$ref", "type", "enum", "const", "pattern"}
    known |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items", "properties", "required"}
    assert set(schema) <= known | {"additionalProperties"}
    if "$ref" in schema:
        return fits(value, definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "anyOf" in schema:
        return any(fits(value, option, definitions) for option in schema["anyOf"])
    kinds = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None), "integer": int}
    if not isinstance(value, kinds.get(schema["type"], int | float)):
        return False
    if isinstance(value, bool):
        return schema["type"] == "boolean"
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        inside = [(item, properties.get(key, others)) for key, item in value.items()]
        return set(schema.get("required", [])) <= value.keys() and all(
            item_schema if isinstance(item_schema, bool) else fits(item, item_schema, definitions)
            for item, item_schema in inside
        )
    if isinstance(value, list):
        return all(fits(item, schema["items"], definitions) for item in value)
    if isinstance(value, str):
        return value in schema.get("enum", [schema.get("const", value)]) and bool(
            re.search(schema.get("pattern", ""), value)
        )
    return value is None or (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", value - 1)
        and value < schema.get("exclusiveMaximum", value + 1)
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_of_the_repository_fits_the_schema(path):
    schema = json.loads((ROOT / "configs/schema.json").read_text())
    assert fits(read_yaml(path)[0], schema, schema["$defs"])


@pytest.mark.parametrize(
    "old, new, fit",
    [
        ("", "", True),
        ("batch_size: 8", "batch_size: $variables.rows", True),
        ("batch_size: 8", "batch_size: '${variables.rows}'", True),
        ("batch_size: 8", "batch_size: 'x${variables.rows}'", False),
        ("batch_size: 8", "batch_size: eight", False),
        ("mixture: {web: 1}", "mixture: $variables.mixture", True),
        ("lr: {peak: 3e-4", "lr: {peak: $variables.peak", True),
        ("train: {", "train: $variables.train #", True),
        ("{law: {path: law.txt, every: 200}}", "{law: $variables.law}", True),
        ("{law: {path: law.txt, every: 200}}", "{law: law.txt}", False),
        ("lr: 6e-4", "lr: 6e-4, schedule: $variables.schedule", True),
        ("lr: 6e-4", "lr: 6e-4, schedule: sometimes", False),
        ("lr: 6e-4", "lrs: 6e-4", False),
    ],
)  # fmt: skip
def test_the_schema_takes_a_variable_for_every_value(folder, old, new, fit):
    assert old in GOOD
    Path("c.yaml").write_text(GOOD.replace(old, new, 1))
    schema = json.loads((ROOT / "configs/schema.json").read_text())
    assert fits(read_yaml("c.yaml")[0], schema, schema["$defs"]) is fit


def test_the_reference_names_variables_and_the_kinds_of_lists():
    rows = (ROOT / "docs/config.md").read_text().splitlines()
    assert any(row.startswith("| `variables` | NAME: value |  | Values named once") for row in rows)
    assert any(row.startswith("| `logging.wandb.tags` | list of text | `[]` |") for row in rows)


def test_names_of_other_tools_stand_for_keys_that_there_are():
    paths = {path for section in sections() for path in key_paths(annotations(Config)[section.name], section.name)}
    assert len(OTHER_NAMES) > 25 and set(OTHER_NAMES.values()) <= paths
    assert not set(OTHER_NAMES) & {path.rpartition(".")[2] for path in paths}
