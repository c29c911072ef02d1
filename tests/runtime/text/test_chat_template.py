"""Chat templates: Hugging Face's conventions, the user's text kept apart, limits, refusals."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ortolan.errors import TemplateError
from ortolan.runtime.text import sandbox
from ortolan.runtime.text.chat_template import ChatTemplate
from ortolan.runtime.text.tokenizer import Tokenizer

ROLES = """\
{%- for message in messages %}
<|role|>{{ message.role }}
{{ message.content | trim }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}
<|role|>assistant
{% endif %}
"""
USER = [{"role": "user", "content": "hi"}]
END = 1


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rendered(source: str, tokenizer: Tokenizer, **variables: Any) -> str:
    return ChatTemplate(source, tokenizer).render(USER, **variables).text


# The conventions


def test_white_space_around_blocks_goes(byte_level: Tokenizer) -> None:
    """Templates are written for trim_blocks and lstrip_blocks; a stray line break is a token."""
    assert ChatTemplate(ROLES, byte_level).render(USER).text == (
        "<|role|>user\nhi<|end|><|role|>assistant\n"
    )
    assert ChatTemplate(ROLES, byte_level).render(USER, add_generation_prompt=False).text == (
        "<|role|>user\nhi<|end|>"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }},{{ eos_token }},{{ pad_token }}", "<|begin|>,<|end|>,<|end|>"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ tools is none }}{{ documents is none }}{{ unheard_of is defined }}", "TrueTrueFalse"),
        ("{{ unheard_of }}", ""),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
         "1/2False 2/2True "),
    ],
)  # fmt: skip
def test_convention(byte_level: Tokenizer, source: str, text: str) -> None:
    """Published templates lean on each of these."""
    assert rendered(source, byte_level) == text


def test_today_is_known_to_templates(byte_level: Tokenizer) -> None:
    assert rendered("{{ strftime_now('%Y') }}", byte_level) == str(datetime.now().year)


def test_variables_reach_the_template(byte_level: Tokenizer) -> None:
    source = "{% if enable_thinking %}<think>{% endif %}{{ tools[0].name }}"
    assert rendered(source, byte_level, enable_thinking=True, tools=[{"name": "f"}]) == "<think>f"


# Content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_content_in_its_other_forms(byte_level: Tokenizer, content: object, text: str) -> None:
    """Clients send null beside tool calls, and lists of parts (llama.cpp#13471)."""
    chat = ChatTemplate("[{{ '' + messages[0].content }}]", byte_level)
    assert chat.render(user(content)).text == f"[{text}]"
    assert (
        ChatTemplate("{{ messages[0].content }}", byte_level).render([{"role": "tool"}]).text == ""
    )


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], r"messages\[0\]"),
        ([{"content": "hi"}], r"messages\[0\]"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\]"),
        (user(1), r"messages\[0\]\.content"),
        (user(["hi"]), r"messages\[0\]\.content\[0\]"),
        (user([{"type": "image_url"}]), r"messages\[0\]\.content\[0\]"),
        (user([{"type": "text", "text": None}]), r"messages\[0\]\.content\[0\]"),
    ],
)
def test_malformed_messages_are_the_callers_error(
    byte_level: Tokenizer, messages: Any, where: str
) -> None:
    """The message says which one, not only that something is wrong."""
    with pytest.raises(TemplateError, match=where):
        ChatTemplate(ROLES, byte_level).render(messages)


def test_deeply_nested_tools_are_the_callers_error(byte_level: Tokenizer) -> None:
    """Python gives up long before memory does, and must not take the request's error with it."""
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate(ROLES, byte_level).render(USER, tools=nested)


# The user's text kept apart


def test_ordinary_chat_has_no_cuts(byte_level: Tokenizer) -> None:
    """Nothing is paid for what nobody does."""
    assert ChatTemplate(ROLES, byte_level).render(user("a < b, c > d | e")).cuts == ()


@pytest.mark.parametrize("text", ["<|end|>", "a<|role|>b", "<think>", "<<|end|>", "MASK"])
def test_marker_in_a_message_is_text(byte_level: Tokenizer, text: str) -> None:
    """Otherwise a user ends their own turn and writes the assistant's (vllm#31735)."""
    chat = ChatTemplate(ROLES, byte_level).render(user(text))
    assert text in chat.text
    ids = byte_level.encode_chat(chat)
    assert [index for index in ids if byte_level.is_special(index)] == [2, END, 2]
    assert all(byte_level.token(index) != "<think>" for index in ids)


@pytest.mark.parametrize(
    ("first", "second"), [("<|en", "d|>"), ("<", "|end|>"), ("<|end|", ">"), ("<|e ", " nd|>")]
)
def test_two_messages_do_not_make_a_marker(byte_level: Tokenizer, first: str, second: str) -> None:
    """A template may put messages side by side, trimmed."""
    chat = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", byte_level)
    made = chat.render([*user(first), *user(second)])
    assert made.text == "<|end|>"
    assert END not in byte_level.encode_chat(made)


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].content }}|>", "<|end"), ("<|{{ messages[0].content }}", "end|>")],
)
def test_message_does_not_complete_a_marker(
    byte_level: Tokenizer, source: str, content: str
) -> None:
    """Half of the characters are the user's, so the whole is no marker of the template's."""
    made = ChatTemplate(source, byte_level).render(user(content))
    assert made.text == "<|end|>"
    assert END not in byte_level.encode_chat(made)


def test_marker_in_a_role_or_a_tool_is_text(byte_level: Tokenizer) -> None:
    """Everything in a request is the client's, not only the content."""
    chat = ChatTemplate("{{ tools | tojson }}{{ messages[0].role }}<|end|>", byte_level)
    made = chat.render(
        [{"role": "<|end|>", "content": ""}], tools=[{"description": "<|end|>", "<|end|>": 1}]
    )
    assert made.text.count("<|end|>") == 4
    assert byte_level.encode_chat(made).count(END) == 1


def test_thinking_tag_of_the_assistant_keeps_its_meaning(byte_level: Tokenizer) -> None:
    """Templates cut earlier reasoning away by looking for it; control tokens stay text."""
    chat = ChatTemplate("{{ messages[0].content.split('</think>')[-1] }}", byte_level)
    made = chat.render([{"role": "assistant", "content": "<think>hm</think>ok<|end|>"}])
    assert made.text == "ok<|end|>"
    assert END not in byte_level.encode_chat(made)


def test_trimming_reaches_the_user_text(byte_level: Tokenizer) -> None:
    """A guard must not shield white space from the template."""
    chat = ChatTemplate(ROLES, byte_level)
    assert "user\n<|end|><|end|>" in chat.render(user(" \n<|end|> ")).text


def test_private_use_characters_in_a_message_survive(byte_level: Tokenizer) -> None:
    """They are someone's logo, or an attempt to look like a guard."""
    content = "\ue000<|end|>\ue001\ue000"
    made = ChatTemplate(ROLES, byte_level).render(user(content))
    assert content in made.text
    ids = byte_level.encode_chat(made)
    assert ids.count(END) == 1
    assert content in byte_level.decode(ids)


# Refusals and limits


def test_template_refusal_keeps_its_words(byte_level: Tokenizer) -> None:
    """Only the template knows what it wants: its words go to the caller (jan#6254)."""
    source = "{{ raise_exception('Roles must alternate user/' ~ messages[0].role) }}"
    with pytest.raises(TemplateError, match="refused the messages: Roles must alternate user/user"):
        rendered(source, byte_level)


def test_refusal_does_not_echo_a_long_message(byte_level: Tokenizer) -> None:
    """Errors are bounded, also where a template puts the input into its words (vllm#49239)."""
    chat = ChatTemplate("{{ raise_exception(messages[0].content) }}", byte_level)
    with pytest.raises(TemplateError) as error:
        chat.render(user("x" * 100_000))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% for i in none %}{% endfor %}", "not iterable"),
    ],
)
def test_failure_in_a_template_is_one_clear_error(
    byte_level: Tokenizer, source: str, words: str
) -> None:
    """Whatever goes wrong in a template must not look like a fault of ours."""
    with pytest.raises(TemplateError, match=words):
        rendered(source, byte_level)


def test_invalid_template_names_its_line(byte_level: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}", byte_level)


def test_loops_are_bounded_together(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested ranges would hold a worker for hours without writing a character."""
    monkeypatch.setattr(sandbox, "MAX_LOOP_STEPS", 500)
    nested = "{% for i in range(N) %}{% for j in range(N) %}{% endfor %}{% endfor %}"
    assert rendered(nested.replace("N", "20"), byte_level) == ""
    with pytest.raises(TemplateError, match="more than 500 steps"):
        rendered(nested.replace("N", "30"), byte_level)
    in_macro = (
        "{% macro m() %}{% for i in range(300) %}{% endfor %}{% endmacro %}{{ m() }}{{ m() }}"
    )
    with pytest.raises(TemplateError, match="more than 500 steps"):
        rendered(in_macro, byte_level)


def test_each_rendering_has_the_whole_bound(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long-lived server must not run out of steps."""
    monkeypatch.setattr(sandbox, "MAX_LOOP_STEPS", 10)
    chat = ChatTemplate("{% for i in range(8) %}{{ i }}{% endfor %}", byte_level)
    assert chat.render(USER) == chat.render(USER)


def test_output_is_bounded(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(TemplateError, match="more than 100 characters"):
        rendered("{% for i in range(99) %}{{ 'xx' }}{% endfor %}", byte_level)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(40) }}",
        "{{ ('a ' * 5000000) | urlize }}",
        "{{ ('a ' * 5000000) | wordwrap(1) }}",
        "{{ 7 ** (10 ** 7) }}",
        "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% endfor %}{{ n.x | tojson }}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
        "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
        "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}",
        "{{ (['a' * 9999999] * 9999999) | join }}",
        "{{ ''.join(['a' * 9999999] * 9999999) }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'a\\nb' | indent(9999999999) }}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{{ lipsum(n=99999999) }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * 1000000,
    ],
    ids=lambda source: source[:40],
)
def test_template_cannot_take_the_machine(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A bundle from anywhere must not hold a worker, or its memory, for hours."""
    monkeypatch.setattr(sandbox, "MAX_LOOP_STEPS", 100_000)
    began_s = time.perf_counter()
    with pytest.raises(TemplateError) as error:
        rendered(source, byte_level)
    assert time.perf_counter() - began_s < 10
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "filtered",
    [
        "('a' * 200000) | wordwrap(1)",
        "('a ' * 2000000) | wordwrap",
        "('a' * 9999) | wordwrap(9, wrapstring='b' * 10000)",
        "'a' | center(99999999)",
        "[1] | batch(9999999, 0)",
        "[1] | slice(9999999)",
        "('é' * 9999999) | urlencode",
        "[['é' * 9999999, 1]] | urlencode",
        "('<' * 9999999) | forceescape",
    ],
)
def test_filters_ask_before_they_make_a_large_value(byte_level: Tokenizer, filtered: str) -> None:
    """Refused when its result is printed would be too late: the memory is taken by then."""
    with pytest.raises(TemplateError, match="it built more text than a prompt can hold"):
        rendered(f"{{% set x = ({filtered}) | first %}}", byte_level)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] * 2 }} {{ 'a' ~ 1 ~ none }}",
            "1024 ababab [1, 1] a1None",
        ),
        ("{{ '%s: %5d' % ('a', 7) }} {{ '%s' | format('b') }}", "a:     7 b"),
        ("{{ '{}-{:>4}'.format(1, 'x') }} {{ ', '.join(['a', 'b']) }}", "1-   x a, b"),
        ("{{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }}", "1+2"),
        ("{{ 'aaa' | replace('a', 'b', 2) }} {{ 'aaa'.replace('a', 'b', 1) }}", "bba baa"),
        ("{{ 'a\nb' | indent(2) }} {{ undefined_name ~ 'x' }}", "a\n  b x"),
        ("{{ 'ab' | center(6) }}|{{ 'two words-here' | wordwrap(7) }}", "  ab  |two\nwords-\nhere"),
        ("{{ 'abcdef' | wordwrap(4, wrapstring='/') }}", "abcd/ef"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3, 0]]"),
        ("{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]]"),
        (
            "{{ 1500 | filesizeformat }} {{ 'a é' | urlencode }} {{ {'a': '&'} | urlencode }}",
            "1.5 kB a%20%C3%A9 a=%26",
        ),
        ("{{ '<' | forceescape }}", "&lt;"),
    ],
)
def test_bounded_operations_keep_their_meaning(
    byte_level: Tokenizer, source: str, text: str
) -> None:
    """The limits must not change what an honest template says."""
    assert rendered(source, byte_level) == text


def test_bundle_without_a_template_says_what_to_do(tmp_path: Path, byte_level: Tokenizer) -> None:
    """A base model has none; it can still complete a plain prompt."""
    with pytest.raises(TemplateError, match="use a plain prompt"):
        ChatTemplate.open(tmp_path / "absent", byte_level)


def test_template_is_read_from_the_bundle(
    write_bundle: Any, byte_level_document: dict[str, Any], byte_level: Tokenizer
) -> None:
    folder = write_bundle(byte_level_document, template="é {{ messages[0].content }}")
    assert ChatTemplate.open(folder, byte_level).render(USER).text == "é hi"
