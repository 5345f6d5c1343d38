"""Commands that messages name."""

import sys

from curriculum.record.commands import program, tensorboard_link


def test_a_program_is_called_as_it_can_be_typed(tmp_path, monkeypatch):
    """By its name alone only where that calls the one of this environment."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        (folder / "curriculum").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    for path, typed in ((here, "curriculum"), (elsewhere, str(here / "curriculum")), (tmp_path, f"{here}/curriculum")):
        monkeypatch.setenv("PATH", str(path))
        assert program("curriculum") == typed
    monkeypatch.chdir(tmp_path)
    assert program("curriculum") == "here/curriculum"


def test_link_takes_the_name_of_a_run_literally_and_leaves_out_averages(tmp_path):
    run_dir = tmp_path / "runs/a.b+c"
    (run_dir / "tensorboard/val").mkdir(parents=True)
    link = "http://127.0.0.1:6006/?runFilter=%5Ea%5C.b%5C%2Bc%2F{}&tagFilter=eval_sets&smoothing=0#timeseries"
    assert tensorboard_link(run_dir) == link.format("")
    (run_dir / "tensorboard/val@ema").mkdir()
    assert tensorboard_link(run_dir) == link.format("%5B%5E%40%5D%2A%24")  # [^@]*$
