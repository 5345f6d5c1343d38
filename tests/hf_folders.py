"""Tokenizer folders as Hugging Face has them, small ones of every family, and texts to encode."""

import json
import string
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LATIN = """Der Wille zur Wahrheit, der uns noch zu manchem Wagnisse verführen wird, jene berühmte Wahrhaftigkeit, von der
alle Philosophen bisher mit Ehrerbietung geredet haben: was für Fragen hat dieser Wille zur Wahrheit uns schon vorgelegt!
Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite que je
n'avais pas le temps de me dire: «Je m'endors.» En un lugar de la Mancha, de cuyo nombre no quiero acordarme."""
OTHER = """Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.
道可道，非常道。名可名，非常名。 吾輩は猫である。名前はまだ無い。 나라의 말이 중국과 달라
كان يا ما كان في قديم الزمان नमस्ते दुनिया Το πάθος χαλάει"""
CODE = '''def encode(self, text: str, opens_document: bool = True) -> list[int]:
    """Don't   worry, we'll/they've it's I'M 12345678 3.14159\t\tx ** 2"""
    if  not text:\n\n\n        return [ ]  # nothing...\r\n    return {"a": 0x1F, 'b': -1e-9}\n'''
TEXTS = {
    "latin": LATIN,
    "other scripts": OTHER,
    "code": CODE,
    "blanks": "   \n\n  two  blanks\t\n \n  trailing   ",
    "emoji": "👩‍👩‍👧 👍🏽 ☃️ \U0001f1e9\U0001f1ea \U0010ffff\u2028 ",
    "marks of composition": "na\u00efve nai\u0308ve e\u0301 \u212b \uac00 \u1100\u1161",
    "a blank": " ",
    "a word": "Hello",
    "a word behind a blank": " Hello",
    "its blank": "\u2581Hello \u2581\u2581",
}
SPECIAL_TEXT = "<|endoftext|> in text, <s>twice</s> <unk><|im_end|>"
CORPUS = [LATIN, OTHER, CODE, *(Path(json.__file__).parent / name for name in ("decoder.py", "encoder.py"))]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
FAMILIES = ("gpt2", "llama3", "qwen", "smollm", "llama2", "mistral", "unigram")


def corpus() -> list[str]:
    """Real text to train on."""
    return [part if isinstance(part, str) else part.read_text(encoding="utf-8") for part in CORPUS]


def write_folder(family: str, folder: Path) -> Path:
    """The tokenizer.json and tokenizer_config.json of a small tokenizer built as the family's is."""
    folder.mkdir(parents=True)
    definition, config = definition_of(family)
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def definition_of(family: str) -> tuple[dict, dict]:
    """(tokenizer.json, tokenizer_config.json) of a family, to change as one likes."""
    definition, config = _definition_of(family)
    return json.loads(definition), dict(config)


@cache
def _definition_of(family: str) -> tuple[str, dict]:
    byte_level = {"gpt2": _gpt2, "llama3": _llama3, "qwen": _qwen, "smollm": _smollm}
    library, config = byte_level[family]() if family in byte_level else _sentencepiece(family)
    return library.to_str(), config


def _byte_level(pre_tokenizer, special: list[str], vocab_size: int = 600) -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens(special)
    return library


def _split(pattern: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2():
    library = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    return library, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def _llama3():
    library = _byte_level(_split(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    definition = json.loads(library.to_str())
    definition["model"]["ignore_merges"] = True
    library = Tokenizer.from_str(json.dumps(definition))
    begin = ("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))
    library.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return library, {"bos_token": begin[0], "eos_token": "<|end_of_text|>"}


def _qwen():
    library = _byte_level(_split(QWEN), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.normalizer = normalizers.NFC()
    library.add_tokens(["<tool_call>"])  # ordinary, and never cut
    return library, {"bos_token": None, "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}


def _smollm():
    digits = pre_tokenizers.Digits(individual_digits=True)
    pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return _byte_level(pre_tokenizer, ["<|endoftext|>"]), {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }


def _sentencepiece(family: str):
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({*string.printable, "\u2581", *"äöüéèà"})
    library = Tokenizer(models.Unigram() if family == "unigram" else models.BPE(unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=family == "unigram")
    options = {"special_tokens": pieces, "initial_alphabet": letters, "vocab_size": 700, "show_progress": False}
    if family == "unigram":
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        trainer = trainers.BpeTrainer(limit_alphabet=len(letters), max_token_length=16, **options)
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.train_from_iterator(corpus()[:1] + corpus()[2:], trainer)
    definition = json.loads(library.to_str())
    definition["added_tokens"] = definition["added_tokens"][: len(special)]
    definition["model"]["byte_fallback"] = True
    library = Tokenizer.from_str(json.dumps(definition))
    if family == "llama2":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        library.pre_tokenizer = None
    elif family == "mistral":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        library.normalizer = normalizers.NFKC()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
