"""The chat template of an exported tokenizer gives the ids that conversations had in training."""

import json

import pytest
from hf_folders import FAMILIES, SPECIAL_TEXT, TEXTS, corpus, write_folder
from test_chat import turns
from test_hf_writer import own_tokenizer
from tokenizers import Tokenizer as Library

from curriculum.data.chat import CHATML, ChatConfig, Template, render
from curriculum.data.encode import encode_beginning
from curriculum.data.prepare import prepare_documents
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
ENDS = "</s><|eot_id|><|endoftext|>"  # each special in some families, and text in the others
SPELLED = ChatConfig(
    system=f"{ENDS}{{content}}", user=f"{ENDS}User\n{{content}}{ENDS}\n", assistant=f"Model:\n{{content}}{ENDS}\n"
)
KINDS = ("byte", "char", "bpe", "tiktoken", *FAMILIES)
WITHOUT_BOS = {"llama2", "mistral", "unigram"}  # they put a blank before a document
CHATS = {"ChatML": CHATML, "OWN": OWN, "SPELLED": SPELLED}


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
        rendered = [s.text for chat in CHATS.values() for talk in TALKS for s in render(talk, Template(chat))]
        return char_tokenizer([*rendered, *TEXTS.values(), *corpus(), SPECIAL_TEXT])
    return own_tokenizer(kind)


def in_training(talk, template, tokenizer, *, generation_prompt):
    """(text, ids) as training has them: each stretch of its own, the prompt of an answer being one with what is before."""
    joined = render(talk, template)
    for stretch in template.around["assistant"][0] if generation_prompt else ():
        if joined[-1].special or stretch.special or joined[-1].scored:
            joined.append(stretch)
        else:
            joined[-1] = joined[-1]._replace(text=joined[-1].text + stretch.text)
    ids = encode_beginning(joined, tokenizer).tolist()
    return "".join(stretch.text for stretch in joined), [tokenizer.bos, *ids]


def as_transformers_renders(template, **variables):
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed: transformers and torch bring it")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(**variables)


def test_the_template_as_text():
    chat = ChatConfig(system="S{content}\n", user="«{content}»\t", assistant="A\\{content}")
    assert chat_template(Template(chat), byte_tokenizer()).splitlines() == [
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
    tokenizer = tokenizer_of(kind, tmp_path)
    chat = Template.of(CHATS[name], tokenizer.special_tokens)
    folder = tmp_path / "written"
    folder.mkdir()
    write_hf_tokenizer(tokenizer, folder, template=chat)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    bos = "" if kind in WITHOUT_BOS else config["bos_token"]
    assert opens_document(tokenizer) == bool(bos)
    spells = bool(chat.special)
    assert spells == (name == "SPELLED" and kind != "smollm3" or (name, kind) == ("ChatML", "qwen"))
    assert config["split_special_tokens"] is not (bool(bos) or spells)
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
    template = chat_template(Template(CHATML), byte_tokenizer())
    with pytest.raises(Exception, match="expected messages of role system, user, assistant"):
        as_transformers_renders(template, messages=turns(("tool", "x")), bos_token="<|endoftext|>")
    with_tools = chat_template(Template(OWN), byte_tokenizer())
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
    for folder, chat in ((kept, None), (replaced, Template(OWN))):
        folder.mkdir()
        write_hf_tokenizer(tokenizer, folder, template=chat)
    assert gguf_vocabulary(tokenizer, tokenizer.vocab_size)["chat_template"] == "{{ old }}"
    assert any("{{ old }}" in file.read_text() for file in kept.iterdir())
    assert not any("old }}" in file.read_text() for file in replaced.iterdir())
    expected = chat_template(Template(OWN), tokenizer)
    assert json.loads((replaced / "tokenizer_config.json").read_text())["chat_template"] == expected
    assert gguf_vocabulary(tokenizer, tokenizer.vocab_size, Template(OWN))["chat_template"] == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_bos_that_it_spells_first_is_written_once(kind, tmp_path):
    tokenizer = tokenizer_of(kind, tmp_path)
    bos = next(name for name, token in tokenizer.special_tokens.items() if token == tokenizer.bos)
    chat = ChatConfig(user=f"{bos}User {{content}}\n", assistant="Model\n{content}\n")
    template = Template.of(chat, tokenizer.special_tokens)
    (tmp_path / "written").mkdir()
    write_hf_tokenizer(tokenizer, tmp_path / "written", template=template)
    library = Library.from_file(str(tmp_path / "written/tokenizer.json"))
    talk = turns(("user", "Hi"), ("assistant", "Yo"), ("user", "x"))
    ids = [tokenizer.bos, *encode_beginning(render(talk, template), tokenizer).tolist()]
    assert [token == tokenizer.bos for token in ids].count(True) == 2 and tokenizer.bos not in ids[1:3]
    variables = {"messages": talk, "bos_token": bos, "add_generation_prompt": False}
    rendered = as_transformers_renders(chat_template(template, tokenizer), **variables)
    found = library.encode(rendered, add_special_tokens=False).ids
    assert found == (ids if opens_document(tokenizer) else ids[1:])
    store = prepare_documents([talk] * 2, tokenizer, tmp_path / "talks", chat=chat)
    own_bos = [tokenizer.bos] if tokenizer.has_own_bos else []
    assert store.stream[:].tolist() == [*own_bos, *ids[1:], tokenizer.eot] * 2
