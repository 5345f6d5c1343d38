"""What is said of options that a run remembers, where its file says something else by now."""

import pytest

from curriculum.config import load_config
from curriculum.errors import InputError
from curriculum.train.resuming.remembered import outranked

FILE = """\
name: first
variables: {length: 64}
sources: {web: {path: web.txt}, law: {path: law.txt, max_epochs: 2}}
phases:
  - {name: a, until: 10, mixture: {web: 1}}
  - {name: b, until: end, mixture: {law: 1}}
evalsets: {primary: {path: val.txt}}
train: {steps: 90, batch_size: 8, seq_len: $variables.length}
"""


def said(folder, *remembered, **given):
    path = folder / "c.yaml"
    path.write_text(FILE)
    config = load_config(path, remembered=remembered, check_paths=False, **given)
    return [line.removeprefix(f"{path}:") for line in outranked(config, remembered, **given)]


def test_only_what_the_file_says_otherwise_is_told(tmp_path):
    told = said(
        tmp_path,
        "--set train.steps=60",
        "--set train.batch_size=8",
        "--set train.seq_len=64",  # as the variable has it
        "--set checkpoint.keep=9",  # of which the file says nothing
        "--set name=second",  # a run stays called what it was called
        "--set phases[1].until=100%",
        "--dataset-dir law=law.txt",
    )
    used = "is used, which the run remembers; to use the file's value, give"
    assert told == [
        f"8:9: train.steps: the file says 90, but --set train.steps=60 {used} --set train.steps=90",
        f'6:15: phases[1].until: the file says "end", but --set phases[1].until=100% {used} '
        "--set 'phases[1].until=\"end\"'",
        '3:33: sources.law: the file says {"path": "law.txt", "max_epochs": 2}, but --dataset-dir law=law.txt '
        f'{used} --set \'sources.law={{"path": "law.txt", "max_epochs": 2}}\'',
    ]
    assert not said(tmp_path)


def test_what_is_given_again_or_anew_is_no_news(tmp_path):
    assert not said(tmp_path, "--set train.steps=60", overrides=["train.steps=60"])
    assert not said(tmp_path, "--set train.steps=60", overrides=["train.steps=70"])
    assert not said(
        tmp_path, "--set phases[1].until=100%", overrides=["phases[1]={name: b, until: end, mixture: {web: 1}}"]
    )
    assert not said(tmp_path, "--dataset-dir law=b.txt", dataset_dirs=["law=c.txt"])
    assert len(said(tmp_path, "--set train.steps=60", overrides=["train.batch_size=16"])) == 1


MORE = FILE.replace("  - {name: b,", "  - {name: new, until: 20, mixture: {law: 1}}\n  - {name: b,")


def remembered_by(folder, *overrides, text=FILE):
    (folder / "c.yaml").write_text(text)
    return load_config(folder / "c.yaml", overrides, check_paths=False).command_line


def test_an_option_of_a_phase_stays_with_it_where_others_come_before_it(tmp_path):
    """Also if its name is a variable's, if an option gives it another, and if one gives the whole phase."""
    (option,) = remembered_by(tmp_path, "phases[1].grad_accum=4")
    assert option == "--set phases.b.grad_accum=4"
    before, after = (
        text.replace("{length: 64}", "{length: 64, last: b}").replace("name: b", "name: $variables.last")
        for text in (FILE, MORE)
    )
    for text in (MORE, after):
        (tmp_path / "c.yaml").write_text(text)
        config = load_config(tmp_path / "c.yaml", remembered=[option], check_paths=False)
        assert {phase.name: phase.grad_accum for phase in config.phases} == {"a": None, "new": None, "b": 4}
        assert config.command_line == [option]
    for renamed, kept in [
        (["phases[1].grad_accum=4", "phases[1].name=c"], ["phases.b.grad_accum=4", "phases.b.name=c"]),
        (["phases[1].name=c", "phases[1].grad_accum=4"], ["phases.b.name=c", "phases.c.grad_accum=4"]),
        (["phases[1].grad_accum=4", "variables.last=c"], ["phases.c.grad_accum=4", "variables.last=c"]),
        (["phases[1]={name: c, until: end, mixture: {web: 1}, grad_accum: 4}"],
         ["phases.b={name: c, until: end, mixture: {web: 1}, grad_accum: 4}"]),
    ]:  # fmt: skip
        options = remembered_by(tmp_path, *renamed, text=before)
        assert options == [f"--set {override}" for override in kept]
        (tmp_path / "c.yaml").write_text(after)
        config = load_config(tmp_path / "c.yaml", remembered=options, check_paths=False)
        grad_accums = {phase.name: phase.grad_accum for phase in config.phases}
        assert grad_accums == {"a": None, "new": None, "c": 4}
        assert sorted(config.command_line) == sorted(options)
    # The variable is given again: the phase has the new name, and the option stays with it.
    options = remembered_by(tmp_path, "phases[1].grad_accum=4", "variables.last=c", text=before)
    for name in "dd":
        config = load_config(tmp_path / "c.yaml", [f"variables.last={name}"], remembered=options, check_paths=False)
        assert config.phases[1].name == name and config.phases[1].grad_accum == 4
        options = config.command_line
        assert sorted(options) == [f"--set phases.{name}.grad_accum=4", f"--set variables.last={name}"]
    assert remembered_by(tmp_path, "phases[1].grad_accum=4", text=FILE.replace("name: b", "name: '7'")) == [
        "--set phases[1].grad_accum=4"
    ]


def test_options_of_what_the_file_has_no_more_are_dropped_and_told(tmp_path):
    gone = [
        "--set phases.c.grad_accum=4",
        "--set phases.d={name: d, until: 30, mixture: {web: 1}}",
        "--set sources.code.max_epochs=2",
        "--set evalsets.sets.code.every=200",
        "--set evalsets.sets.code.max_sequences=9",
    ]
    kept = [
        "--set evalsets.sets.own.every=200",
        "--set evalsets.sets.own.path=own.txt",
        "--eval-dataset-dir more=x.txt",
    ]
    (tmp_path / "c.yaml").write_text(FILE)
    config = load_config(tmp_path / "c.yaml", remembered=[*gone, *kept], check_paths=False)
    assert config.command_line == kept and list(config.evalsets.sets) == ["own", "more"]
    assert [phase.name for phase in config.phases] == ["a", "b"] and list(config.sources) == ["web", "law"]
    told = said(tmp_path, *gone, *kept)
    assert told == [
        f"{tmp_path}/c.yaml: has no such {of} any more: {option}, which the run remembers, is dropped".removeprefix(
            f"{tmp_path}/c.yaml:"
        )
        for of, option in zip(("phase", "phase", "source", "eval set", "eval set"), gone, strict=True)
    ]
    # What is given now is not dropped, but an error.
    for option in gone:
        with pytest.raises(InputError, match="expected exactly one of|needs exactly one of|got '[cd]'"):
            load_config(tmp_path / "c.yaml", [option.removeprefix("--set ")], remembered=gone, check_paths=False)


def test_null_drops_an_eval_set_that_an_earlier_option_added(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    both = ("--eval-dataset-dir law=gone", "--eval-dataset-dir code=there")
    null = "evalsets.sets.law=null"
    config = load_config(path, [null], remembered=both, check_paths=False)
    assert list(config.eval_sources) == ["primary", "code"] and list(config.to_json()["evalsets"]["sets"]) == ["code"]
    later = load_config(path, remembered=config.command_line, check_paths=False)
    assert later.to_json() == config.to_json()
    again = load_config(path, remembered=config.command_line, eval_dataset_dirs=["law=new"], check_paths=False)
    assert again.eval_sources["law"].path == "new"
    for wrong in ("evalsets.primary=null", "evalsets.sets.lwa=null"):
        with pytest.raises(InputError, match=f"{wrong.partition('=')[0]}: got null, expected a mapping"):
            load_config(path, [wrong], remembered=both, check_paths=False)
    in_file = FILE.replace("evalsets: {", "evalsets: {sets: {law: }, ")
    path.write_text(in_file)
    with pytest.raises(InputError, match="evalsets.sets.law: got null"):
        load_config(path, check_paths=False)
