"""What is said of options that a run remembers, where its file says something else by now."""

from curriculum.config import load_config
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
