"""tools/bench_step.py: the arithmetic of its table, and that its programs are the same model."""

import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import bench_step
import jax
import numpy as np
import plain_jax
import pytest
import results


def test_a_row_by_hand():
    """Medium: 4,096 tokens; matrices 6 x 12 x 384^2 + 65 x 384; attention 6 x 256 x 384, all of it times 6."""
    about = {"num_parameters": 7, "compile_seconds": 1.234, "peak_memory_mb": 5}
    worker = SimpleNamespace(seconds=[0.5] * 9 + [9.0], cpu_seconds=[1.0], about=about)
    row = bench_step.row_of("medium", "step", worker, peak=1e12)
    flops = 4096 * 6 * (10_616_832 + 24_960 + 589_824)
    assert row["flop_share"] == pytest.approx(flops / 0.5 / 1e12, abs=5e-4)
    assert (row["tokens_per_sec"], row["ms_median"], row["compile_seconds"]) == (8192.0, 500.0, 1.23)
    deep = bench_step.row_of("medium", "step:n_layer=12,layers=scanned", worker, peak=1e12)
    assert deep["flop_share"] == pytest.approx(4096 * 6 * (2 * 11_206_656 + 24_960) / 0.5 / 1e12, abs=5e-4)


def test_the_card_is_known_by_its_name():
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12}
    assert {name: bench_step.data_sheet_flops(name) for name in names} == names
    assert bench_step.data_sheet_flops("NVIDIA GeForce RTX 3060") is None
    worker = SimpleNamespace(
        seconds=[1.0], cpu_seconds=[], about={"num_parameters": 7, "compile_seconds": 1, "peak_memory_mb": 5}
    )
    assert bench_step.row_of("small", "step", worker, peak=None)["flop_share"] is None


def test_ratios_say_how_much_faster():
    times = {"train": 12.5, "step": 10.0, "plain": 9.0}
    found = bench_step.ratios("small", [{"variant": name, "ms_median": ms} for name, ms in times.items()])
    assert [(one["of"], one["to"], one["ratio"]) for one in found] == [("train", "step", 0.8), ("step", "plain", 0.9)]


def test_a_time_is_the_mean_between_two_waits():
    assert bench_step.means([1.0, 3.0, 2.0, 6.0, 5.0], 2) == [2.0, 4.0, 5.0]
    assert bench_step.means([1.0, 3.0], 10) == [2.0]


def test_what_cannot_run_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(bench_step, "find_spec", lambda name: None if name == "accelerate" else object())
    assert bench_step.missing("step") is None is bench_step.missing("hf")
    assert bench_step.missing("torch_compile") == "torch.compile needs a C++ compiler, and there is no g++"
    assert bench_step.missing("hf_trainer").startswith("accelerate is not installed")


def test_an_unknown_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_step.main(["--variants", "step", "torhc"])
    assert "no such variant: torhc (variants: train, step, plain" in capsys.readouterr().err


def test_a_wait_is_after_a_step_or_more(capsys):
    with pytest.raises(SystemExit):
        bench_step.main(["--wait-every", "0"])
    assert "--wait-every: got 0, expected 1 or more" in capsys.readouterr().err


def test_settings_of_another_variant_than_step_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_step.main(["--variants", "step:layers=scanned", "train:n_layer=2"])
    assert "train:n_layer=2: only step takes settings" in capsys.readouterr().err


def test_settings_are_of_the_model_or_its_formulation():
    variant = "step:n_layer=2,layers=scanned,blocks=1,skip=select"
    config, formulation = bench_step.chosen("small", variant, "bfloat16", "cpu")
    assert (config.n_layer, config.layers, config.compute_dtype) == (2, "scanned", "bfloat16")
    assert (formulation.skip, formulation.layers, formulation.qkv) == ("select", "unrolled", "joined")
    with pytest.raises(SystemExit, match='qv: no such setting\nremat: got "all", expected'):
        bench_step.chosen("small", "step:qv=apart,remat=all", "float32", "cpu")


def test_the_plain_program_makes_the_update_that_ours_makes(monkeypatch):
    """From the same parameters, the same loss and the same parameters after one update; attention has two blocks of queries."""
    monkeypatch.setitem(bench_step.SIZES, "test", (2, 80, 2, 2, 16, 65))

    from curriculum.model.presets import ModelConfig
    from curriculum.model.transformer import init_params, transformer
    from curriculum.train.optimizer import OptimConfig, make_optimizer
    from curriculum.train.step import init_state, make_train_step, read_window
    from phases.batches import Batch

    config = ModelConfig(
        vocab_size=65, n_layer=2, n_head=2, n_kv_head=2, d_model=16, d_ff=64, max_seq_len=80, pos_encoding="learned",
        mlp_type="gelu", norm_type="layernorm",
    )  # fmt: skip
    params, optimizer = init_params(config, 0), make_optimizer(OptimConfig())
    tokens = np.random.default_rng(0).integers(0, 65, (1, 2, 81), np.int32)
    inputs, targets, zeros_AB = tokens[..., :-1], tokens[..., 1:], np.zeros((1, 2), np.int32)
    batch = Batch(inputs, targets, np.ones_like(inputs, bool), np.zeros_like(inputs), zeros_AB)
    step = jax.jit(make_train_step(transformer(config), optimizer, 1, grad_clip=1.0))
    after = step(init_state(params, optimizer, 1), batch, np.float32(0.01))

    def as_plain(params):
        blocks = [
            {
                "attention_norm": block["attention_norm"]["scale"],
                "qkv": np.concatenate([block["attention"][name]["kernel"] for name in ("query", "key", "value")], 1),
                "out": block["attention"]["out"]["kernel"],
                "mlp_norm": block["mlp_norm"]["scale"],
                "up": block["mlp"]["up"]["kernel"],
                "down": block["mlp"]["down"]["kernel"],
            }
            for block in params["blocks"].values()
        ]
        embeddings = {name: params[of]["embedding"] for name, of in (("embed", "embed"), ("positions", "positions"))}
        return embeddings | {"blocks": blocks, "norm": params["norm"]["scale"]}

    plain, (_, *moments) = plain_jax.make_program(plain_jax.Size(2, 80, 2, 2, 16, 65))
    (moved, *_), loss = plain((as_plain(params), *moments), inputs[0], targets[0], np.float32(0.01))
    assert float(loss) == pytest.approx(read_window(after.window, ["only"])["loss"], rel=1e-5)
    leaves = list(zip(jax.tree.leaves(moved), jax.tree.leaves(as_plain(after.params)), strict=True))
    assert len(leaves) == 15
    for one, another in leaves:
        # Adam divides by the root of the square: where a gradient is next to nothing its rounding shows.
        np.testing.assert_allclose(one, another, atol=2e-4)


def test_a_table_is_as_wide_as_its_cells_and_empty_where_there_is_nothing(capsys):
    results.print_table([{"what": "a", "ms": 12.5}, {"what": "longer", "ms": None}])
    assert capsys.readouterr().out == "  what    ms\n     a  12.5\nlonger      \n"


def test_work_takes_turns_and_its_first_round_is_not_timed():
    turns = []
    burn = [sys.executable, "-c", "sum(range(10**6))"]
    work = {"a": lambda: turns.append("a"), "b": lambda: turns.append(subprocess.run(burn).returncode)}
    taken = results.in_turns(work, 2)
    assert turns == ["a", 0] * 3 and {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2}
    assert all(0 <= processor < 0.005 for _, processor in taken["a"])
    assert all(min(times) > 0.005 for times in taken["b"])  # of the process that was waited for


def test_what_was_measured_is_printed_and_written(tmp_path, capsys):
    results.report([{"what": "a", "ms": 12}], tmp_path / "told.json", "jax", bins=3, filled=0.5)
    of_machine, *table, last = capsys.readouterr().out.splitlines()
    assert of_machine.startswith("processor: ") and of_machine.endswith(f", jax: {jax.__version__}")
    assert table == ["what  ms", "   a  12"] and last == "bins: 3, filled: 0.5"
    written = json.loads((tmp_path / "told.json").read_text())
    assert written["results"] == [{"what": "a", "ms": 12}] and (written["bins"], written["filled"]) == (3, 0.5)
    assert written["machine"] == results.machine("jax") and list(tmp_path.iterdir()) == [tmp_path / "told.json"]
    results.report([{"what": "a"}], None)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_machine_is_named_without_its_name():
    said = results.machine("jax", "no_such_package")
    assert said["jax"] == jax.__version__ and said["cores"] >= 1 and "no_such_package" not in said
    assert said["processor"] == results.processor() and platform.node() not in said.values()
