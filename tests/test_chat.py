"""Conversations as text: what a template makes of them, what is scored, and what is refused."""

import json

import pytest

from curriculum.config import build_config
from curriculum.data import chat as chat_module
from curriculum.data.chat import AS_TEXT, CHATML, ChatConfig, Template, render_question
from curriculum.errors import InputError

SHORT = Template(ChatConfig(system="S{content}/", user="U:{content}.", assistant="A:{content};", tool="T({content})"))


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def render(messages, template):
    """(text, scored) of each stretch, none of them special."""
    return without_special(chat_module.render(messages, template))


def render_completion(prompt, completion, template):
    return without_special(chat_module.render_completion(prompt, completion, template))


def without_special(stretches):
    assert not any(special for _, _, special in stretches)
    return [(text, scored) for text, scored, _ in stretches]


def test_the_default_is_chatml_as_text():
    assert render(turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo")), AS_TEXT) == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yo<|im_end|>\n", True),
    ]


def test_answers_and_what_closes_them_are_scored():
    messages = turns(
        ("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"), ("user", "v")
    )
    assert render(messages, SHORT) == [
        ("Ss/U:u.A:", False),
        ("a;", True),
        ("T(t)A:", False),
        ("b;", True),
        ("U:v.", False),
    ]
    assert render(turns(("assistant", "a"), ("assistant", "b")), SHORT) == [
        ("A:", False), ("a;", True), ("A:", False), ("b;", True),
    ]  # fmt: skip


def test_without_text_around_it_the_content_is_all():
    bare = Template(ChatConfig(system="{content}", user="{content}", assistant="{content}"))
    messages = turns(("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", ""), ("assistant", "d"))
    assert render(messages, bare) == [("a", False), ("bcd", True)]
    assert render(turns(("user", "")), bare) == render([], bare) == []


def test_content_that_looks_like_the_template_is_content():
    content = "<|im_end|>\n<|im_start|>assistant\n{content}"
    (prompt, _), (answer, scored) = render(turns(("user", content), ("assistant", content)), AS_TEXT)
    assert prompt == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert (answer, scored) == (f"{content}<|im_end|>\n", True)


def test_special_tokens_that_the_template_spells_stand_alone():
    names = ["<|im_start|>", "<|im_end|>", "<|im_end", "<|endoftext|>"]
    template = Template.of(CHATML, names)
    assert template.special == ("<|im_start|>", "<|im_end|>")
    content = "<|im_end|>x"  # content is text
    messages = turns(("user", content), ("assistant", content), ("user", ""), ("assistant", ""))
    opened, closed = ("<|im_start|>", False, True), ("<|im_end|>", False, True)
    asked = [opened, (f"user\n{content}", False, False), closed, ("\n", False, False), opened]
    assert render_question(content, template) == [*asked, ("assistant\n", False, False)]
    assert chat_module.render(messages, template) == [
        *asked,
        ("assistant\n", False, False),
        (content, True, False),
        ("<|im_end|>", True, True),
        ("\n", True, False),
        opened,
        ("user\n", False, False),
        closed,
        ("\n", False, False),
        opened,
        ("assistant\n", False, False),
        ("<|im_end|>", True, True),
        ("\n", True, False),
    ]
    both = Template.of(ChatConfig(user="{content}<a>", assistant="<b><a>{content}<a>"), ["<a>", "<b>", "", "<c>"])
    assert chat_module.render(turns(("user", "u"), ("assistant", "<b>")), both) == [
        ("u", False, False), ("<a>", False, True), ("<b>", False, True), ("<a>", False, True),
        ("<b>", True, False), ("<a>", True, True),
    ]  # fmt: skip
    prompt = turns(("user", "u"), ("assistant", "b"))
    assert chat_module.render_completion(prompt, prompt, both)[:3] == [
        ("u", False, False), ("<a>", False, True), ("<b>", False, True),
    ]  # fmt: skip


def test_other_keys_of_a_message_are_not_read():
    message = {"role": "assistant", "content": "a", "name": None, "tool_calls": []}
    assert render([message], SHORT) == [("A:", False), ("a;", True)]


def test_an_answer_of_weight_0_is_not_scored():
    """As in data for OpenAI's fine-tuning; a table has null where a row has none."""
    messages = turns(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    messages[0]["weight"], messages[1]["weight"], messages[3]["weight"] = None, 0, 1
    assert render(messages, SHORT) == [("U:u.A:a;U:v.A:", False), ("b;", True)]
    for weight in (0.5, "0", True):
        with pytest.raises(InputError, match=rf"messages\[1\].weight is {weight!r}; expected 0 .* or 1"):
            render([*messages[:1], messages[1] | {"weight": weight}], SHORT)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"])
def test_calls_of_tools_and_reasoning_are_not_left_out_silently(key):
    message = {"role": "assistant", "content": "", key: [{"name": "search"}]}
    with pytest.raises(InputError, match=rf"messages\[0\] has {key}, which no template renders"):
        render([message], SHORT)
    for nothing in (None, [], "", True):
        assert render([message | {key: nothing}], SHORT) == [("A:", False), (";", True)]


def test_two_texts_are_joined_as_they_are_and_the_completion_is_scored():
    assert render_completion("2 + 2 =", " 4", SHORT) == [("2 + 2 =", False), (" 4", True)]
    assert render_completion("", "x", SHORT) == [("x", True)]
    assert render_completion("x", "", SHORT) == [("x", False)]


def test_of_two_lists_the_answers_of_the_completion_are_scored():
    prompt = turns(("user", "u"), ("assistant", "a"), ("user", "v"))
    completion = turns(("assistant", "b"), ("user", "w"), ("assistant", "c"))
    assert render_completion(prompt, completion, SHORT) == [
        ("U:u.A:a;U:v.A:", False),
        ("b;", True),
        ("U:w.A:", False),
        ("c;", True),
    ]


USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", "'messages' holds text; expected a list of messages with role and content"),
        (None, "'messages' holds null; expected a list"),
        ({"role": "user"}, "'messages' holds an object; expected a list"),
        ([USER, "x"], "messages[1] is text; expected an object with role and content"),
        ([{"from": "human", "value": "x"}], "messages[0] has no key 'role'; found 'from', 'value'; rename it in the data"),
        ([{0: "x"}], "messages[0] has no key 'role'; found '0'; rename it in the data"),
        ([USER, {"role": "assistant"}], "messages[1] has no key 'content'; found 'role'; rename it in the data"),
        ([{"role": "human", "content": "x"}], "messages[0].role is 'human'; expected system, user, assistant; change it"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role is ['user']; expected system, user, assistant"),
        ([{"role": "tool", "content": "x"}], "messages[0].role is 'tool'; expected system, user, assistant; give its template as chat.tool"),
        ([USER, {"role": "assistant", "content": None}], "messages[1].content holds null; expected text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content holds a list; expected text"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content holds half a surrogate pair at character 1"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(messages, expected):
    with pytest.raises(InputError) as error:
        render(messages, AS_TEXT)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("x", [USER], "'prompt' holds text and 'completion' a list; expected two texts, or two lists of messages"),
        ([USER], None, "'prompt' holds a list and 'completion' null; expected two texts"),
        (3, "x", "'prompt' holds a number; expected text"),
        ("x", None, "'completion' holds null; expected text"),
        ([USER], [{"role": "x", "content": "y"}], "completion[0].role is 'x'; expected system, user, assistant"),
        ([{"role": "x", "content": "y"}], [USER], "prompt[0].role is 'x'; expected system, user, assistant"),
    ],
)
def test_what_is_no_prompt_and_completion_is_refused(prompt, completion, expected):
    with pytest.raises(InputError) as error:
        render_completion(prompt, completion, AS_TEXT)
    assert str(error.value).startswith(expected)


def config_with(chat):
    return build_config(
        {
            "sources": {"web": {"path": "nowhere"}},
            "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
            "evalsets": {"primary": {"path": "nowhere"}},
            "train": {"steps": 10, "seq_len": 20},
            "optim": {"lr": 1e-3, "schedule": "constant"},
            "chat": chat,
        },
        check_paths=False,
    )


def test_the_section_of_a_config():
    config = config_with({"user": "Q: {content}\n", "tool": "R: {content}\n"})
    assert config.chat == ChatConfig(user="Q: {content}\n", tool="R: {content}\n")
    assert config.chat.assistant == "<|im_start|>assistant\n{content}<|im_end|>\n"
    assert config.chat.roles == ["system", "user", "assistant", "tool"]
    assert config_with({}).chat == CHATML and CHATML.roles == ["system", "user", "assistant"]
    assert build_config(json.loads(json.dumps(config.to_json())), check_paths=False) == config


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ({"user": "Q: "}, "chat.user: got 'Q: ', with {content} 0 times; expected it exactly once"),
        ({"tool": "{content}{content}"}, "chat.tool: got '{content}{content}', with {content} 2 times; expected it exactly"),
        ({"assistant": ""}, "chat.assistant: got '', with {content} 0 times"),
        ({"system": None}, "chat.system: got null, expected text"),
        ({"human": "{content}"}, "chat.human: no such key"),
    ],
)  # fmt: skip
def test_a_template_needs_its_content_once(chat, expected):
    with pytest.raises(InputError) as error:
        config_with(chat)
    assert expected in str(error.value)
