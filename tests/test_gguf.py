"""GGUF files read back with the package that llama.cpp's authors publish: tensors, metadata, tokenizer."""

import json
from dataclasses import make_dataclass, replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from gguf_models import LLAMA3_SCALING, MODELS, config_of, params_of
from hf_folders import definition_of, write_folder
from test_hf_writer import own_tokenizer

from curriculum.data.tokenizers import hf_writer
from curriculum.data.tokenizers.gguf_vocabulary import gguf_vocabulary, reads_otherwise
from curriculum.data.tokenizers.hf_writer import merges_of, write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.errors import InputError
from curriculum.model.formats.gguf import gguf_architecture, write_gguf
from curriculum.model.model import by_name
from curriculum.model.presets import ModelConfig

VOCAB = 257  # byte's


def write(path, config, arrays, tokenizer=None, dtype="f32", **more):
    stayed = write_gguf(path, config, arrays, tokenizer or own_tokenizer("byte"), dtype=dtype, name="tiny", **more)
    return GGUFReader(path), stayed


def tensors_of(reader) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in reader.tensors}


def fields_of(reader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def turned(array, num_heads):
    """The rows of each head as llama.cpp turns them, neighbours together: row 2i is our i, 2i + 1 our i + K/2."""
    width = len(array) // num_heads
    order = [h * width + half * width // 2 + i for h in range(num_heads) for i in range(width // 2) for half in (0, 1)]
    return array[order]


def expected_tensors(config, arrays) -> dict[str, np.ndarray]:
    """Worked out name by name, without the table of the writer."""
    rows = config.num_ids or config.vocab_size
    found = {"token_embd.weight": arrays["embed.embedding"][:rows], "output_norm.weight": arrays["norm.scale"]}
    if "head.kernel" in arrays:
        found["output.weight"] = arrays["head.kernel"].T[:rows]
    if "positions.embedding" in arrays:
        found["position_embd.weight"] = arrays["positions.embedding"]
    if "norm.bias" in arrays:
        found["output_norm.bias"] = arrays["norm.bias"]
    turns = gguf_architecture(config) in ("llama", "smollm3")
    for layer in range(config.n_layer):
        ours, theirs = f"blocks.{layer:03}", f"blk.{layer}"
        for here, there in (("attention_norm", "attn_norm"), ("mlp_norm", "ffn_norm")):
            found[f"{theirs}.{there}.weight"] = arrays[f"{ours}.{here}.scale"]
            if f"{ours}.{here}.bias" in arrays:
                found[f"{theirs}.{there}.bias"] = arrays[f"{ours}.{here}.bias"]
        linear = {"attention.query": "attn_q", "attention.key": "attn_k", "attention.value": "attn_v"}
        linear |= {"attention.out": "attn_output", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}
        for here, there in linear.items():
            if f"{ours}.{here}.kernel" not in arrays:
                continue
            weight, bias = arrays[f"{ours}.{here}.kernel"].T, arrays.get(f"{ours}.{here}.bias")
            if turns and there in ("attn_q", "attn_k"):
                heads = config.n_head if there == "attn_q" else config.n_kv_head
                weight, bias = turned(weight, heads), None if bias is None else turned(bias, heads)
            found[f"{theirs}.{there}.weight"] = weight
            if bias is not None:
                found[f"{theirs}.{there}.bias"] = bias
        for name in ("query", "key"):
            if f"{ours}.attention.{name}_norm.scale" in arrays:
                found[f"{theirs}.attn_{name[0]}_norm.weight"] = arrays[f"{ours}.attention.{name}_norm.scale"]
        if config.pos_encoding == "learned":
            for leaf in ("weight", "bias"):
                three = [found.pop(f"{theirs}.attn_{part}.{leaf}") for part in "qkv"]
                found[f"{theirs}.attn_qkv.{leaf}"] = np.concatenate(three)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tensors_come_back(name, tmp_path):
    config = config_of(name, 300, num_ids=260)
    arrays = by_name(params_of(config))
    reader, stayed = write(tmp_path / "m.gguf", config, arrays)
    found, expected = tensors_of(reader), expected_tensors(config, arrays)
    factors = found.pop("rope_freqs.weight", None)
    assert (factors is not None) == (name == "llama stretched") and stayed == ()
    assert found.keys() == expected.keys() and len(found) > 4 * config.n_layer
    for tensor, array in expected.items():
        np.testing.assert_array_equal(found[tensor], array, err_msg=tensor)


def test_architectures():
    assert {name: gguf_architecture(config_of(name, VOCAB)) for name in MODELS} == {
        "llama": "llama",
        "llama with biases": "llama",
        "llama stretched": "llama",
        "llama stretched linearly": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "smollm3": "smollm3",
        "gpt2": "gpt2",
        "gpt2 with a head": "gpt2",
    }


def test_metadata_of_a_llama(tmp_path):
    config = config_of("llama with biases", VOCAB, rope_scaling=None)
    more = {"general.license": "mit", "general.description": "a test", "curriculum.step": 7}
    fields = fields_of(write(tmp_path / "m.gguf", config, by_name(params_of(config)), metadata=more)[0])
    wanted = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": 0,
        "llama.vocab_size": 257,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        **more,
    }
    assert {key: fields[key] for key in wanted} == wanted
    assert "llama.rope.scaling.type" not in fields and "general.quantization_version" not in fields


def test_metadata_of_a_gpt2_and_of_stretched_rope(tmp_path):
    config = config_of("gpt2", VOCAB)
    fields = fields_of(write(tmp_path / "g.gguf", config, by_name(params_of(config)))[0])
    assert fields["gpt2.attention.layer_norm_epsilon"] == float(np.float32(1e-5))
    assert not any("rope" in key or "head_count_kv" in key for key in fields)
    config = config_of("llama stretched linearly", VOCAB)
    fields = fields_of(write(tmp_path / "l.gguf", config, by_name(params_of(config)))[0])
    assert (fields["llama.rope.scaling.type"], fields["llama.rope.scaling.factor"]) == ("linear", 2.0)


def test_rope_factors_of_llama3(tmp_path):
    config = config_of("llama", VOCAB, rope_scaling=LLAMA3_SCALING, rope_theta=10000.0)
    factors = tensors_of(write(tmp_path / "m.gguf", config, by_name(params_of(config)))[0])["rope_freqs.weight"]
    # Heads 16 wide: wavelengths 2 pi 10000^(k/8) = 6.3, 19.9, 62.8, ...; with 32 positions before, those below 32 / 4
    # stay, those above 32 / 1 are stretched 8 times, and 19.9 in between: kept = (32 / 19.869 - 1) / 3 = 0.20353.
    between = 1 / (0.20353 + (1 - 0.20353) / 8)
    np.testing.assert_allclose(factors, [1, between, 8, 8, 8, 8, 8, 8], rtol=1e-4)


@pytest.mark.parametrize(("dtype", "file_type"), [("f16", 1), ("bf16", 32), ("q8_0", 7)])
def test_smaller_dtypes(dtype, file_type, tmp_path):
    config = config_of("gpt2 with a head", VOCAB)
    arrays = by_name(params_of(config))
    reader, stayed = write(tmp_path / "m.gguf", config, arrays, dtype=dtype)
    assert fields_of(reader)["general.file_type"] == file_type and stayed == ()
    assert fields_of(reader).get("general.quantization_version") == (2 if dtype == "q8_0" else None)
    found, expected = tensors_of(reader), expected_tensors(config, arrays)
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    for name, array in expected.items():
        if array.ndim == 1 or name == "position_embd.weight":
            assert types[name] == GGMLQuantizationType.F32
            np.testing.assert_array_equal(found[name], array)
            continue
        assert types[name] == GGMLQuantizationType[dtype.upper()]
        error = np.abs(found[name] - array)
        if dtype == "q8_0":
            # 127 steps to the largest of 32 numbers, rounded to the nearest; the step itself is kept as f16.
            step = np.abs(array.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
            assert (error.reshape(-1, 32) <= step * (0.5 + 127 * 2.0**-11) + 1e-7).all()
            assert error.max() > 1e-4
        else:
            assert (error <= np.abs(array) * 2.0 ** (-11 if dtype == "f16" else -8) + 1e-7).all()
            assert error.max() > 1e-5


def test_rows_that_no_block_fits_stay_f16(tmp_path):
    config = config_of("llama", VOCAB, d_ff=80)
    arrays = by_name(params_of(config))
    reader, stayed = write(tmp_path / "m.gguf", config, arrays, dtype="q8_0")
    assert stayed == tuple(f"blk.{layer}.ffn_down.weight" for layer in range(2))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"
    np.testing.assert_allclose(tensors_of(reader)["blk.1.ffn_down.weight"], arrays["blocks.001.mlp.down.kernel"].T, rtol=1e-3, atol=1e-7)  # fmt: skip


@pytest.mark.parametrize(("dtype", "largest"), [("f16", 7e4), ("bf16", 3.4e38), ("q8_0", 1e7)])
def test_values_too_large_are_refused(dtype, largest, tmp_path):
    config = config_of("llama", VOCAB)
    arrays = by_name(params_of(config))
    arrays["blocks.001.mlp.up.kernel"][3, 5] = largest
    with pytest.raises(InputError, match=rf"--dtype {dtype}: \d+ of 6144 values of blk.1.ffn_up.weight are too large"):
        write(tmp_path / "m.gguf", config, arrays, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"mlp_type": "gelu", "norm_type": "layernorm"}, ['model.mlp_type: got "gelu", expected', 'model.norm_type: got "layernorm", expected']),
        ("llama", {"sliding_window": 63}, ["model.sliding_window: got 63, expected"]),
        ("gpt2", {"bias": False}, ["model.bias: got false, expected true for gpt2, llama.cpp's closest architecture"]),
        ("gpt2", {"n_kv_head": 2}, ["model.n_kv_head: got 2, expected"]),
        ("gpt2", {"d_head": 32}, ["model.d_head: got 32, expected"]),
        ("gpt2", {"mlp_type": "swiglu", "norm_type": "rmsnorm"}, ['model.mlp_type: got "swiglu"', 'model.norm_type: got "rmsnorm"']),
        ("qwen2", {"d_head": 32}, ["model.d_head: got 32, expected"]),
        ("qwen2", {"rope_scaling": LLAMA3_SCALING}, ["model.rope_scaling: got kind llama3, which llama.cpp's qwen2 does not have"]),
        ("qwen3", {"qkv_bias": True, "no_rope_every": 4}, ["model.qkv_bias: got true, expected", "model.no_rope_every: got 4, expected"]),
        ("smollm3", {"no_rope_every": 3}, ["model.no_rope_every: got 3, expected 4 for smollm3, llama.cpp's closest architecture"]),
        ("smollm3", {"bias": True}, ["model.bias: got true, expected"]),
    ],
)  # fmt: skip
def test_what_llama_cpp_has_not_is_refused_by_field(name, changes, expected):
    with pytest.raises(InputError) as error:
        gguf_architecture(config_of(name, VOCAB, **changes))
    problems = str(error.value).splitlines()
    assert len(problems) == len(expected)
    for problem, beginning in zip(problems, expected, strict=True):
        assert problem.startswith(beginning) and problem.endswith("; export it in another format")


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_no_architecture_knows_is_refused_away_from_its_default(name):
    wider = make_dataclass("Wider", [("logit_cap", float | None, None)], bases=(ModelConfig,), frozen=True)
    config = wider(**vars(config_of(name, VOCAB)))
    architecture = gguf_architecture(config_of(name, VOCAB))
    assert gguf_architecture(config) == architecture
    with pytest.raises(InputError) as told:
        gguf_architecture(replace(config, logit_cap=30.0))
    expected = f"model.logit_cap: got 30.0, expected null for {architecture}, llama.cpp's closest architecture"
    assert told.value.problems == (f"{expected}; export it in another format",)


def test_a_window_that_cuts_nothing_and_a_head_width_that_is_the_default_are_no_matter():
    assert gguf_architecture(config_of("llama", VOCAB, sliding_window=64)) == "llama"
    assert gguf_architecture(config_of("qwen2", VOCAB, d_head=16)) == "qwen2"


# --- the tokenizer ------------------------------------------------------------------------------------------


def vocabulary_of(tokenizer, tmp_path, vocab_size=None, **more):
    config = config_of("llama", vocab_size or tokenizer.vocab_size, n_layer=1, **more)
    fields = fields_of(write(tmp_path / "m.gguf", config, by_name(params_of(config)), tokenizer)[0])
    return {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if key.startswith("tokenizer")}


def test_vocabulary_of_byte_pairs(tmp_path):
    bpe = own_tokenizer("bpe")
    found = vocabulary_of(bpe, tmp_path, vocab_size=720, num_ids=710)
    assert (found["model"], found["pre"], found["bos_token_id"], found["eos_token_id"]) == ("gpt2", "gpt-2", 699, 699)
    assert (found["add_bos_token"], found["add_eos_token"], found["add_space_prefix"]) == (True, False, False)
    assert found["tokens"][699:] == ["<|endoftext|>"] + [f"[PAD{token}]" for token in range(700, 710)]
    assert found["token_type"] == [1] * 699 + [3] + [5] * 10
    assert found["tokens"][bpe.tokens.index(b" ")] == "\u0120"
    write_hf_tokenizer(bpe, tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges] and len(merges) == 700 - 257
    assert "scores" not in found and "unknown_token_id" not in found and "tokenizer.chat_template" not in found


def test_vocabulary_of_bytes_has_a_merge_that_no_text_meets(tmp_path):
    found = vocabulary_of(own_tokenizer("byte"), tmp_path)
    assert (found["model"], found["pre"], found["merges"]) == ("gpt2", "gpt-2", ["\u00ff \u00fe"])
    assert found["tokens"][10] == "\u010a" and found["token_type"][256] == 3


@pytest.mark.parametrize(
    ("family", "pre", "add_bos"),
    [("gpt2", "gpt-2", False), ("llama3", "llama-bpe", True), ("qwen", "qwen2", False), ("smollm", "smollm", False)],
)
def test_names_of_patterns(family, pre, add_bos, tmp_path):
    source = write_folder(family, tmp_path / family)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(source)
    found = vocabulary_of(tokenizer, tmp_path)
    assert (found["model"], found["pre"], found["add_bos_token"]) == ("gpt2", pre, add_bos)
    assert (found["bos_token_id"], found["eos_token_id"]) == (tokenizer.bos, tokenizer.eot)
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    control = {token for token, kind in enumerate(found["token_type"]) if kind == 3}
    assert control == set(tokenizer.special_tokens.values())
    if family == "qwen":
        assert (found["tokens"][-1], found["token_type"][-1]) == ("<tool_call>", 4)


def test_llama3_without_its_whole_words_has_another_name(tmp_path):
    source = write_folder("llama3", tmp_path / "s")
    change(source, lambda d: d["model"].update(ignore_merges=False))
    assert vocabulary_of(load_tokenizer(source), tmp_path)["pre"] == "smaug-bpe"


@pytest.mark.parametrize("family", ["llama2", "mistral"])
def test_vocabulary_of_sentencepiece(family, tmp_path):
    tokenizer = load_tokenizer(write_folder(family, tmp_path / family))
    found = vocabulary_of(tokenizer, tmp_path)
    assert (found["model"], found["unknown_token_id"], found["bos_token_id"], found["eos_token_id"]) == (
        "llama",
        0,
        1,
        2,
    )
    assert (found["add_bos_token"], found["add_space_prefix"]) == (True, True)
    assert found["token_type"][:3] == [2, 3, 3] and found["token_type"][3:259] == [6] * 256
    assert found["tokens"][3 + 10] == "<0x0A>" and set(found["token_type"][259:]) == {1}
    definition, _ = definition_of(family)
    made = ["".join(pair) for pair in definition["model"]["merges"]]
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert [scores[token] for token in made] == [-float(made.index(token)) for token in made]
    assert scores["a"] == scores["<0x0A>"] == 0 and "merges" not in found


def test_chat_template_of_the_config(tmp_path):
    source = write_folder("gpt2", tmp_path / "s")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "{{ x }}", "add_bos_token": True})
    )
    found = vocabulary_of(load_tokenizer(source), tmp_path)
    assert (found["tokenizer.chat_template"], found["add_bos_token"]) == ("{{ x }}", True)


def change(folder, change_definition):
    definition = json.loads((folder / "tokenizer.json").read_text())
    change_definition(definition)
    (folder / "tokenizer.json").write_text(json.dumps(definition))


SPLIT = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("family", "change_definition", "expected"),
    [
        ("gpt2", lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "it puts a space before a text"),
        ("gpt2", lambda d: d.update(normalizer={"type": "Lowercase"}), "llama.cpp does not have its normalizer Lowercase"),
        ("llama3", lambda d: d["pre_tokenizer"]["pretokenizers"].__setitem__(0, SPLIT), r"no name for the pattern that splits text \(x\+ and bytes\)"),
        ("llama3", lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"), r"no name for the pattern that splits text \(Split and bytes\)"),
        ("smollm", lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False), r"no name for the pattern that splits text \(runs of digits and gpt2\)"),
        ("unigram", lambda d: None, "its model is Unigram"),
        ("llama2", lambda d: d["model"].update(byte_fallback=False), "it has no byte fallback"),
        ("llama2", lambda d: d.update(normalizer={"type": "NFKC"}), "llama.cpp does not have its normalizer NFKC"),
        ("mistral", lambda d: d["pre_tokenizer"].update(type="Digits", individual_digits=True), "llama.cpp does not have its pre_tokenizer Digits"),
        ("llama2", lambda d: d["model"]["merges"].pop(), r"no merge produces 1 tokens \(such as '.+'\), but llama.cpp would produce them"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(family, change_definition, expected, tmp_path):
    source = write_folder(family, tmp_path / family)
    change(source, change_definition)
    with pytest.raises(InputError, match=f"tokenizer: .*{expected}.*; export with --format hf"):
        vocabulary_of(load_tokenizer(source), tmp_path)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("processor", [["x"], {"type": "TemplateProcessing", "single": ["x"]}, {"processors": 1}])
def test_a_post_processor_that_is_none_is_told(processor, tmp_path):
    source = write_folder("gpt2", tmp_path / "source")
    change(source, lambda definition: definition.update(post_processor=processor))
    with pytest.raises(InputError, match="tokenizer.json: post_processor: invalid .*; restore it"):
        vocabulary_of(load_tokenizer(source), tmp_path)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gpt2", []),
        ("llama3", []),
        ("qwen", ["normalises text to NFC"]),
        ("llama2", ["behind added tokens, transformers"]),
        ("mistral", ["llama.cpp puts a blank also before a text that begins with one"]),
    ],
)
def test_what_gguf_has_no_place_for_is_told(family, told, tmp_path):
    tokenizer = load_tokenizer(write_folder(family, tmp_path / "source"))
    found = list(reads_otherwise(tokenizer))
    assert len(found) == len(told) and all(part in line for part, line in zip(told, found, strict=True))


def test_added_tokens_that_are_words_of_their_own_are_told(tmp_path):
    definition, _ = definition_of("qwen")
    added = next(token for token in definition["added_tokens"] if token["content"] == "<tool_call>")
    added["single_word"] = True
    file = write_folder("qwen", tmp_path / "source") / "tokenizer.json"
    file.write_text(json.dumps(definition))
    tokenizer = load_tokenizer(file.parent)
    alone, inside = (tokenizer.encode(text).tolist() for text in ("a <tool_call> b", "a<tool_call>b"))
    assert added["id"] in alone and added["id"] not in inside
    _, told = reads_otherwise(tokenizer)
    assert told == ("'<tool_call>' is a token only as a word of its own, but for what reads the GGUF file in words too")


def test_the_merges_of_a_tokenizer_are_found_once_for_an_export(monkeypatch):
    """Those of 128,000 ids take seconds, and an export looked for them four times."""
    found = []

    def counted(tokens):
        found.append(len(tokens))
        return merges_of(tokens)

    monkeypatch.setattr(hf_writer, "merges_of", counted)
    for tokenizer in (own_tokenizer("bpe"), own_tokenizer("bpe")):
        assert len(gguf_vocabulary(tokenizer, tokenizer.vocab_size)["token_merges"]) > 1
        assert gguf_vocabulary(tokenizer, tokenizer.vocab_size) and not [*reads_otherwise(tokenizer)]
    assert found == [tokenizer.vocab_size] * 2


def test_kinds_made_here_that_llama_cpp_has_not_are_refused(tmp_path):
    with pytest.raises(InputError, match="tokenizer.kind: char cannot be written as GGUF"):
        vocabulary_of(own_tokenizer("char"), tmp_path)
    with pytest.raises(InputError, match="tokenizer: llama.cpp has no name for the pattern that splits text"):
        vocabulary_of(own_tokenizer("tiktoken"), tmp_path)
