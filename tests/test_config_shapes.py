"""Phases of other shapes as a config has them: what must agree, and what a run is told by."""

import pytest
from tiny_run import tiny_data, write_corpus

from curriculum.config import build_config, config_from_json, load_config
from curriculum.errors import InputError
from curriculum.model.formulation import attention_of
from curriculum.schema.adaptation import resolved_model
from curriculum.schema.shapes import row_problems

A = {"name": "a", "until": 6, "mixture": {"web": 1.0}}
B = {"name": "b", "until": "end", "mixture": {"law": 1.0}}


def config(place, a=None, b=None, **sections):
    """The tiny run, its two phases with more fields."""
    return build_config(tiny_data(write_corpus(place), phases=[A | (a or {}), B | (b or {})], **sections))


def test_the_longest_sequence_and_the_micro_steps_of_each_phase(tmp_path):
    train = {"steps": 12, "batch_size": 4, "grad_accum": 2, "seq_len": 32}
    of_phases = config(tmp_path, {"seq_len": 64, "batch_size": 6}, {"grad_accum": 4, "rope_theta": 5e5}, train=train)
    assert of_phases.longest_seq_len == of_phases.eval_seq_len == 64
    assert [of_phases.grad_accum_of(name) for name in ("a", "b", "gone")] == [2, 4, 2]
    plain = config(tmp_path, {"seq_len": 16}, train=train, evalsets={"seq_len": 48, "primary": {"held_out_of": "web"}})
    assert (plain.longest_seq_len, plain.eval_seq_len) == (32, 48)


def test_the_default_length_counts_only_where_a_phase_takes_it(tmp_path):
    train = {"steps": 12, "batch_size": 4}
    of_phases = config(tmp_path, {"seq_len": 48}, {"seq_len": 96}, train=train)
    assert of_phases.train.seq_len == of_phases.longest_seq_len == of_phases.eval_seq_len == 96
    assert build_config(of_phases.to_json()) == of_phases
    assert config(tmp_path, {"seq_len": 64}, train=train).longest_seq_len == 256
    assert config(tmp_path, {"seq_len": 64}, {"seq_len": 64}, train=train | {"seq_len": 128}).longest_seq_len == 128
    with pytest.raises(InputError) as error:  # a length of a phase that is wrong is told as its own
        config(tmp_path, {"seq_len": 64}, {"seq_len": 0}, train=train)
    assert error.value.problems == ("config: phases[1].seq_len: got 0, expected 2 to 16777216",)


@pytest.mark.parametrize(
    "a, b, sections, told",
    [
        ({"seq_len": 24}, {}, {}, "phases[0].seq_len: got 24, expected a divisor of the longest sequence, train.seq_len (32)"),
        ({"seq_len": 48}, {}, {}, "train.seq_len: got 32, expected a divisor of the longest sequence, phases[0].seq_len (48)"),
        ({"seq_len": 2048}, {}, {}, "phases[0].seq_len: got 2048, expected at most the model's max_seq_len (1024)"),
        ({"batch_size": 9}, {}, {"grad_accum": 2}, "phases[0].batch_size: got 9, expected a multiple of train.grad_accum (2), or a grad_accum of the phase's own"),
        ({}, {"grad_accum": 3}, {}, "phases[1].grad_accum: got 3, expected a divisor of train.batch_size (4)"),
        ({"batch_size": 9, "grad_accum": 2}, {}, {}, "phases[0].grad_accum: got 2, expected a divisor of phases[0].batch_size (9)"),
        ({"grad_accum": 0}, {}, {}, "phases[0].grad_accum: got 0, expected 1 to 1000000000"),
        ({"batch_size": 0}, {}, {}, "phases[0].batch_size: got 0, expected 1 to 1048576"),
        ({"batch_size": 6}, {}, {"mesh": {"data": 4}}, "phases[0].batch_size: got 6 in 1 micro-steps of 6 rows, expected rows that the mesh's data x fsdp (4) divides"),
        ({"grad_accum": 2}, {}, {"mesh": {"data": 4}}, "phases[0].grad_accum: got 4 in 2 micro-steps of 2 rows, expected rows that the mesh's data x fsdp (4) divides"),
        ({"batch_size": 6, "grad_accum": 2}, {}, {"mesh": {"data": 4}}, "phases[0].batch_size: got 6 in 2 micro-steps of 3 rows, expected rows that the mesh's data x fsdp (4) divides"),
        ({}, {"rope_theta": 1e6}, {"model": None}, "phases[1].rope_theta: a custom model (model: null) does not receive it"),
        ({}, {"rope_theta": 1e6}, {"pos_encoding": "learned"}, "phases[1].rope_theta: the model's positions are learned (model.pos_encoding), not rotary: it has no theta"),
        ({}, {"rope_theta": 1e6}, {"rope_scaling": {"kind": "linear", "factor": 2}}, "phases[1].rope_theta: the model's wavelengths are already scaled (model.rope_scaling)"),
    ],
)  # fmt: skip
def test_what_must_agree(tmp_path, a, b, sections, told):
    sections = dict(sections)
    data = tiny_data(tmp_path)
    data["train"]["grad_accum"] = sections.pop("grad_accum", 1)
    of_model = {key: sections.pop(key) for key in ("pos_encoding", "rope_scaling") if key in sections}
    with pytest.raises(InputError) as error:
        config(tmp_path, a, b, **{"train": data["train"], "model": data["model"] | of_model} | sections)
    assert len(error.value.problems) == 1 and told in error.value.problems[0]


def test_a_length_that_the_model_lacks_is_told_where_it_was_given(tmp_path):
    def wrong(b, **train):
        with pytest.raises(InputError) as error:
            config(tmp_path, {"seq_len": 2048}, b, train={"steps": 12, "batch_size": 4, **train})
        return [problem.split(": ")[1] for problem in error.value.problems]

    assert wrong({"seq_len": 1024}) == ["phases[0].seq_len"]  # train's is made of theirs
    assert wrong({}, seq_len=2048) == ["train.seq_len", "phases[0].seq_len"]
    assert wrong({"seq_len": 1024}, seq_len=4096) == ["train.seq_len", "phases[0].seq_len"]


def test_the_config_of_a_run_that_went_on_on_another_mesh_is_read(tmp_path):
    """Of a run that goes on only the phases ahead have to fit the mesh; eval, generate and branch read its config."""
    data = config(tmp_path, {"batch_size": 6}, {"batch_size": 8}).to_json() | {"mesh": {"data": 4}}
    assert config_from_json(data).mesh.data == 4


def test_cudnn_trains_on_an_even_number_of_positions(tmp_path):
    model = {"preset": "tiny", "compute_dtype": "bfloat16", "attention": "cudnn"}
    train = {"steps": 12, "batch_size": 4, "seq_len": 33}
    evals = {"seq_len": 31, "primary": {"held_out_of": "web"}}
    with pytest.raises(InputError) as error:
        config(tmp_path, model=model, train=train, evalsets=evals)
    assert error.value.problems == (
        "config: train.seq_len: got 33, expected a multiple of 2 with model.attention cudnn; change it, or leave "
        "attention out for auto",
    )
    assert config(tmp_path, model=model, train=train | {"seq_len": 34}, evalsets=evals).train.seq_len == 34


def test_with_deterministic_kernels_attention_is_not_cudnns(tmp_path):
    model = {"preset": "tiny", "compute_dtype": "bfloat16"}
    rest = {"train": {"steps": 12, "batch_size": 4, "seq_len": 34, "deterministic": True}}
    resolved = resolved_model(config(tmp_path, model=model, **rest), 257)
    found = [attention_of(resolved, "gpu", seq_len=34, heads_split=split) for split in (False, True)]
    assert found == ["plain", "xla"]
    with pytest.raises(InputError) as error:
        config(tmp_path, model=model | {"attention": "cudnn"}, **rest)
    assert error.value.problems == (
        "config: model.attention: got cudnn, expected auto, plain or xla with train.deterministic (docs/gpu.md says "
        "why); leave it out for auto",
    )
    rest["train"] |= {"deterministic": None}
    assert attention_of(resolved_model(config(tmp_path, model=model, **rest), 257), "gpu", seq_len=34) == "cudnn"


def test_every_problem_at_once_with_its_place_in_the_file(tmp_path):
    write_corpus(tmp_path)
    text = f"""sources: {{web: {{path: {tmp_path / "web.jsonl"}, held_out: 20%}}}}
phases:
  - {{name: a, until: 50%, mixture: {{web: 1}}, seq_len: 100}}
  - {{name: b, until: end, mixture: {{web: 1}}, batch_size: 7}}
evalsets: {{primary: {{held_out_of: web}}}}
train: {{steps: 10, batch_size: 8, grad_accum: 4, seq_len: 256}}
model: {{preset: gpt2-124m, n_layer: 1}}
"""
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("batch_size: 7", "batch_size: 7, rope_theta: 1000"))
    with pytest.raises(InputError) as error:
        load_config(path)
    places = [problem.removeprefix(f"{path}:").split(": ")[:2] for problem in error.value.problems]
    assert places == [
        ["3:46", "phases[0].seq_len"],
        ["4:46", "phases[1].batch_size"],
        ["4:61", "phases[1].rope_theta"],
    ]


def test_a_cut_that_no_phase_makes_need_not_fit(tmp_path):
    train = {"steps": 12, "batch_size": 4, "grad_accum": 3, "seq_len": 32}
    own = {"batch_size": 6}
    assert config(tmp_path, own, own | {"grad_accum": 2}, train=train)
    problems = list(row_problems(config(tmp_path, own, own, train=train).train, [], 2))
    assert problems == []  # of 4 rows in 3 micro-steps: told as such, not as rows over the mesh
