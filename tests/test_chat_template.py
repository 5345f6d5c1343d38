"""The chat template of an exported tokenizer gives the ids that conversations had in training."""

import json

import pytest
from hf_folders import FAMILIES, SPECIAL_TEXT, TEXTS, corpus, write_folder
from test_chat import turns
from test_hf_writer import own_tokenizer
from tokenizers import Tokenizer as Library

from curriculum.data.chat import CHATML, ChatConfig, render
from curriculum.data.tokenizers.chat_template import chat_template, opens_document
from curriculum.data.tokenizers.gguf_vocabulary import gguf_vocabulary
from curriculum.data.tokenizers.hf_writer import write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.data.tokenizers.vocabulary import char_tokenizer

OWN = ChatConfig(
    system='Règles "{content}"\\\n',
    user="### User\n{content}\n",
    assistant="### Model\n{content}\n---\n",
    tool="{{ {content} }} {% %} {# -}}\n",
)
KINDS = ("byte", "char", "bpe", "tiktoken", *FAMILIES)
# Families whose special tokens ChatML spells, and those that put a blank before a document.
WITHOUT_BOS = {"ChatML": {"qwen", "llama2", "mistral", "unigram"}, "OWN": {"llama2", "mistral", "unigram"}}
CHATS = {"ChatML": CHATML, "OWN": OWN}


TALKS = [
    turns(("user", "Hi")),
    turns(
        ("system", "Be brief."), ("user", "f, 12345?"), ("assistant", "Yes: 1."), ("user", "x"), ("assistant", "'y'")
    ),
    turns(("user", TEXTS["latin"]), ("assistant", TEXTS["code"]), ("user", "q"), ("assistant", TEXTS["other scripts"])),
]


def tokenizer_of(kind, folder):
    if kind in FAMILIES:
        return load_tokenizer(write_folder(kind, folder / "source"))
    if kind == "char":
        rendered = [text for chat in CHATS.values() for talk in TALKS for text, _ in render(talk, chat)]
        return char_tokenizer([*rendered, *TEXTS.values(), *corpus(), SPECIAL_TEXT])
    return own_tokenizer(kind)


def in_training(talk, chat, tokenizer, *, generation_prompt):
    """(text, ids) as training has them: each stretch of its own, the prompt of an answer being one with what is before."""
    stretches = [*render(talk, chat), (chat.around("assistant")[0], False)] if generation_prompt else render(talk, chat)
    joined = []
    for text, scored in stretches:
        if joined and joined[-1][1] == scored:
            joined[-1] = (joined[-1][0] + text, scored)
        else:
            joined.append((text, scored))
    ids = [tokenizer.encode(text, opens_document=number == 0).tolist() for number, (text, _) in enumerate(joined)]
    return "".join(text for text, _ in joined), [tokenizer.bos, *sum(ids, [])]


def as_transformers_renders(template, **variables):
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed: transformers and torch bring it")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(**variables)


def test_the_template_as_text():
    chat = ChatConfig(system="S{content}\n", user="«{content}»\t", assistant="A\\{content}")
    assert chat_template(chat, byte_tokenizer()).splitlines() == [
        "{{- bos_token }}",
        "{%- for message in messages %}",
        "{%- if message['role'] == 'system' %}",
        """{{- "S" + message['content'] + "\\n" }}""",
        "{%- elif message['role'] == 'user' %}",
        """{{- "«" + message['content'] + "»\\t" }}""",
        "{%- elif message['role'] == 'assistant' %}",
        """{{- "A\\\\" + message['content'] + "" }}""",
        "{%- else %}",
        '{{- raise_exception("expected messages of role system, user, assistant") }}',
        "{%- endif %}",
        "{%- endfor %}",
        "{%- if add_generation_prompt %}",
        '{{- "A\\\\" }}',
        "{%- endif %}",
    ]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_renders_has_the_ids_of_training(kind, name, tmp_path):
    """By jinja2 and the `tokenizers` library; tests/test_parity_tokenizer.py has transformers itself."""
    tokenizer, chat = tokenizer_of(kind, tmp_path), CHATS[name]
    folder = tmp_path / "written"
    folder.mkdir()
    write_hf_tokenizer(tokenizer, folder, chat=chat)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    bos = "" if kind in WITHOUT_BOS[name] else config["bos_token"]
    assert opens_document(chat, tokenizer) == bool(bos) and config["split_special_tokens"] is not bool(bos)
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = config["split_special_tokens"]
    for talk in TALKS:
        for generation_prompt in (False, True):
            text, ids = in_training(talk, chat, tokenizer, generation_prompt=generation_prompt)
            variables = {"messages": talk, "bos_token": config["bos_token"], "add_generation_prompt": generation_prompt}
            rendered = as_transformers_renders(config["chat_template"], **variables)
            assert rendered == bos + text
            found = library.encode(rendered, add_special_tokens=False).ids
            assert found == (ids if bos else ids[1:]) and len(found) > 3


def test_a_role_that_the_template_lacks_is_an_error():
    template = chat_template(CHATML, byte_tokenizer())
    with pytest.raises(Exception, match="expected messages of role system, user, assistant"):
        as_transformers_renders(template, messages=turns(("tool", "x")), bos_token="<|endoftext|>")
    with_tools = chat_template(OWN, byte_tokenizer())
    assert (
        as_transformers_renders(with_tools, messages=turns(("tool", "x")), bos_token="!") == "!{{ x }} {% %} {# -}}\n"
    )


@pytest.mark.parametrize("in_a_file", [False, True])
def test_it_takes_the_place_of_one_that_came_with_the_tokenizer(in_a_file, tmp_path):
    source = write_folder("gpt2", tmp_path / "source")
    path = source / "tokenizer_config.json"
    if in_a_file:
        (source / "chat_template.jinja").write_text("{{ old }}")
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ old }}"}))
    tokenizer = load_tokenizer(source)
    kept, replaced = tmp_path / "kept", tmp_path / "replaced"
    for folder, chat in ((kept, None), (replaced, OWN)):
        folder.mkdir()
        write_hf_tokenizer(tokenizer, folder, chat=chat)
    assert gguf_vocabulary(tokenizer, tokenizer.vocab_size)["chat_template"] == "{{ old }}"
    assert any("{{ old }}" in file.read_text() for file in kept.iterdir())
    assert not any("old }}" in file.read_text() for file in replaced.iterdir())
    expected = chat_template(OWN, tokenizer)
    assert json.loads((replaced / "tokenizer_config.json").read_text())["chat_template"] == expected
    assert gguf_vocabulary(tokenizer, tokenizer.vocab_size, OWN)["chat_template"] == expected
