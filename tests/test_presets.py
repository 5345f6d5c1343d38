import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from curriculum.errors import InputError
from curriculum.model.counts import num_parameters
from curriculum.model.model import abstract_params
from curriculum.model.presets import PRESETS, ModelConfig, ModelSection, model_problems, resolve_model
from curriculum.model.transformer import init_params, transformer


def shapes_of(config):
    return [array.shape for array in jax.tree.leaves(abstract_params(transformer(config)))]


# Sums of the layer shapes in the published config.json files, written out by hand.
PUBLISHED = {
    "tiny": 4096 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128) + 128,
    "gpt2-124m": 124_439_808,
    "llama-360m": 361_821_120,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets(name):
    config = PRESETS[name]
    shapes = shapes_of(config)
    assert len(shapes) > config.n_layer
    assert sum(int(np.prod(shape)) for shape in shapes) == PUBLISHED[name]
    assert num_parameters(config) == PUBLISHED[name]


def test_what_a_count_does_not_tell_of_a_preset():
    three, seven = PRESETS["llama-3b"], PRESETS["llama-7b"]
    assert (three.n_head, three.n_kv_head, three.head_width, three.rope_theta) == (24, 8, 128, 500_000.0)
    assert (seven.n_head, seven.head_width, seven.rope_theta, seven.norm_eps) == (32, 128, 10_000.0, 1e-5)
    assert (seven.max_seq_len, seven.tie_embeddings, three.tie_embeddings) == (4096, False, True)


def test_every_preset_is_named_where_the_config_is_described():
    schema = json.loads((Path(__file__).parents[1] / "configs/schema.json").read_text())
    told = schema["$defs"]["ModelSection"]["properties"]["preset"]["description"]
    assert told == f"A named shape: {', '.join(PRESETS)}.", "mend ModelSection.preset"


@pytest.mark.parametrize("pos_encoding", ["rope", "learned"])
@pytest.mark.parametrize("mlp_type", ["swiglu", "gelu"])
@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_closed_form_counts_the_arrays(pos_encoding, mlp_type, norm_type, bias, tie_embeddings):
    config = ModelConfig(
        vocab_size=11,
        n_layer=2,
        n_head=4,
        n_kv_head=2,
        d_model=8,
        d_ff=12,
        max_seq_len=5,
        pos_encoding=pos_encoding,
        mlp_type=mlp_type,
        norm_type=norm_type,
        bias=bias,
        tie_embeddings=tie_embeddings,
    )
    assert num_parameters(config) == sum(array.size for array in jax.tree.leaves(init_params(config, seed=0)))


def test_a_preset_takes_the_tokenizers_vocabulary_and_single_fields():
    config = resolve_model(ModelSection(preset="tiny", n_layer=2, bias=True, tie_embeddings=False), vocab_size=65)
    assert (config.vocab_size, config.n_layer, config.bias, config.tie_embeddings) == (65, 2, True, False)
    assert (config.d_model, config.n_kv_head) == (PRESETS["tiny"].d_model, PRESETS["tiny"].n_kv_head)


def test_key_value_heads_follow_the_query_heads_unless_they_are_grouped_or_given():
    assert resolve_model(ModelSection(preset="gpt2-124m", n_head=6), 10).n_kv_head == 6
    assert resolve_model(ModelSection(preset="gpt2-124m", n_head=6, n_kv_head=3), 10).n_kv_head == 3
    assert resolve_model(ModelSection(preset="llama-1b", n_head=16), 10).n_kv_head == 8


def test_without_a_preset_the_sizes_are_enough():
    section = ModelSection(n_layer=1, n_head=2, d_model=8, d_ff=16, max_seq_len=4)
    expected = ModelConfig(
        vocab_size=7, n_layer=1, n_head=2, n_kv_head=2, d_model=8, d_ff=16, max_seq_len=4, rope_theta=10_000.0
    )
    assert resolve_model(section, 7) == expected


def test_a_vocabulary_may_be_padded_and_not_cut():
    assert resolve_model(ModelSection(preset="tiny", vocab_size=128), 65).vocab_size == 128
    with pytest.raises(InputError, match=r"model\.vocab_size: got 64, expected at least the tokenizer's 65"):
        resolve_model(ModelSection(preset="tiny", vocab_size=64), 65)
    assert model_problems(ModelSection(preset="tiny", vocab_size=64)) == []  # no tokenizer is known yet


SIZES = {"n_layer": 1, "n_head": 2, "d_model": 8, "d_ff": 16, "max_seq_len": 4}


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            ModelSection(preset="tinny"),
            "model.preset: no such preset: 'tinny'; did you mean 'tiny'? (presets: tiny,",
        ),
        (ModelSection(preset="x"), "model.preset: no such preset: 'x' (presets: tiny, gpt2-124m,"),
        (ModelSection(preset="tiny", d_ff=0), "model.d_ff: got 0, expected a positive integer"),
        (ModelSection(preset="tiny", n_kv_head=-2), "model.n_kv_head: got -2, expected a positive integer"),
        (
            ModelSection(preset="tiny", rope_theta=0.0),
            "model.rope_theta: got 0.0, expected a positive finite number",
        ),
        (ModelSection(preset="tiny", norm_eps=float("nan")), "model.norm_eps: got nan, expected a positive"),
        (
            ModelSection(preset="tiny", n_head=6, n_kv_head=2),
            "model.n_head: got 6, expected a divisor of d_model 128",
        ),
        (ModelSection(preset="tiny", n_kv_head=3), "model.n_kv_head: got 3, expected a divisor of n_head 4"),
        (
            ModelSection(**(SIZES | {"d_model": 6})),
            "model.n_head: got 2 for d_model 6, a head width of 3; rope",
        ),
    ],
)
def test_a_problem_names_its_field(section, problem):
    with pytest.raises(InputError) as caught:
        resolve_model(section, vocab_size=65)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def test_an_odd_head_width_is_fine_without_rope():
    assert resolve_model(ModelSection(**(SIZES | {"d_model": 6}), pos_encoding="learned"), 5).head_width == 3


def test_all_problems_are_told_at_once():
    problems = model_problems(ModelSection(n_head=0, d_ff=-1, d_model=8))
    assert [name for name, _ in problems] == ["n_layer", "max_seq_len", "n_head", "d_ff"]


def test_presets_need_no_jax():
    program = "import sys, curriculum.model.presets; print([m for m in ('jax', 'flax', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
