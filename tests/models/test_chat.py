"""Chat templates: what they render, what is public of it, and hostile ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from models import chat
from models.chat import Message, Template, cut, going_on
from spu_llm.core.errors import InputError
from spu_llm.service import rendering
from spu_llm.service.rendering import render_apart

# As small chat models have it: a system message of its own where there is none.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = Message("user", "Hello, é")
HEAD = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n"
REST = "Hello, é<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_is_rendered_here_as_apart() -> None:
    template = Template(CHATML)
    assert template.render([HELLO]) == HEAD + REST == render_apart(template, [HELLO])


def test_as_transformers_renders() -> None:
    chat_of = [Message("system", "Only JSON"), HELLO, Message("assistant", "Hi"), HELLO]
    source = CHATML + "{{ messages | tojson }}{{ bos_token }}{% if messages %} {%- endif %}\n {# #}"
    compiled = chat_template_utils._compile_jinja_template(source)
    messages = [{"role": m.role, "content": m.content} for m in chat_of]
    expected = compiled.render(messages=messages, bos_token="<s>", add_generation_prompt=True)
    assert Template(source, bos_token="<s>").render(chat_of) == expected


def test_the_head_is_public_up_to_the_first_word_of_the_client() -> None:
    render = Template(CHATML).render
    assert cut(render, [HELLO]) == (HEAD, REST)
    head, rest = cut(render, [Message("system", "My secret"), HELLO])
    assert head == "<|im_start|>system\n" and rest.startswith("My secret<|im_end|>")


ONE, TWO = "{{ messages[0]['content']", "{{ messages[1]['content']"


@pytest.mark.parametrize(
    "source",
    [
        "{% if 'Hello' in messages[0]['content'] %}greeting {% endif %}" + ONE + "}}",
        ONE + "}}{{ ' x' * messages[0]['content'] | length }}",
        ONE + " | length }}",
        ONE + " | upper }}",
        ONE + "[1:] }}",
        ONE + " | replace('H', 'hh') }}",
        ONE + " | list | join(' ') }}",
        "{% if 'secret' not in messages[0]['content'] %}a{% endif %}" + ONE + "}}",
        ONE + "}}" + TWO + "[:3] }}",
        "{% for m in messages | sort(attribute='content') %}{{ m['content'] }}{% endfor %}",
    ],
)
def test_a_template_may_only_write_secret_words(source: str) -> None:
    """Else the length of the prompt, or what is public of it, tells of them what it likes."""
    with pytest.raises(InputError, match="does more with these words than write them"):
        cut(Template(source).render, [HELLO, Message("assistant", "By all means")])


@pytest.mark.parametrize(
    ("source", "head", "rest"),
    [
        (">" + TWO + "}}|" + ONE + "}}|" + ONE + "}}", ">", " So</think>\nHi | Bye | Bye "),
        (
            ">" + ONE + " | trim }}|{{ (messages[1]['content'] ~ ' ') | trim }}",
            ">",
            "Bye|So</think>\nHi",
        ),
        (ONE + "}}" + TWO + ".split('</think>')[-1].lstrip('\n') }}<", "", " Bye Hi <"),
    ],
)
def test_templates_order_trim_and_leave_thoughts_out(source: str, head: str, rest: str) -> None:
    messages = [Message("user", " Bye "), Message("assistant", " So</think>\nHi ")]
    assert cut(Template(source).render, messages) == (head, rest)


def test_a_template_that_writes_two_messages_into_one_turn() -> None:
    """As LLaMA 2's: what it trims is both together."""
    source = (
        "{{ '[INST] ' + ('<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' + "
        "messages[1]['content']).strip() + ' [/INST]' }}"
    )
    messages = [Message("system", " Be brief \n"), Message("user", " Hello \n")]
    expected = "[INST] <<SYS>>\n", " Be brief \n\n<</SYS>>\n\n Hello [/INST]"
    assert cut(Template(source).render, messages) == expected


def test_a_later_turn_adds_to_what_is_there() -> None:
    render = Template(CHATML).render
    before, answered = render([HELLO]), [HELLO, Message("assistant", "Hi"), Message("user", "Bye")]
    added = "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    assert going_on(before, "Hi", render(answered)) == added
    forgetful = Template("{{ messages[-1]['content'] }}").render
    assert going_on(forgetful([HELLO]), "Hi", forgetful(answered)) is None


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"tokenizer_config.json": {"chat_template": "A", "bos_token": {"content": "<s>"}}}, "A"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool", "template": "T"},
                        {"name": "default", "template": "A"},
                    ]
                }
            },
            "A",
        ),
        ({"tokenizer_config.json": {"chat_template": "B"}, "chat_template.jinja": "A"}, "A"),
    ],
)
def test_where_a_template_lies(tmp_path: Path, files: dict[str, object], source: str) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    assert Template.load(tmp_path).source == source


def test_directories_without_one_that_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no chat template"):
        Template.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(InputError, match="chat_template 3; it must be text"):
        Template.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        Template.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (chat.MOST_CHARACTERS + 1))
    with pytest.raises(InputError, match="more than 1 MB"):
        Template.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ open('/etc/passwd').read() }}", "'open' is undefined"),
        ("{% for x", "unexpected end"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ 'a' * 10 ** 7 }}", "more than 1 MB"),
        ("{{ 'a' * 10 ** 11 }}", "refuses this chat"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_hostile_templates_end_in_one_line(source: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        render_apart(Template(source), [HELLO])
    assert "\n" not in str(refused.value)


def test_a_template_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 1.0)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(InputError, match="was not done within 1 s"):
        render_apart(Template(endless), [HELLO])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("way", "refusal"),
    [
        ("open('/etc/hostname').read()", "Too many open files"),
        (
            "str(__import__('socket').create_connection(('127.0.0.1', {port}), 9))",
            "Too many open files",
        ),
        ("str((__import__('os').close(0), __import__('socket').socket()))", "Too many open files"),
        ("str(__import__('os').mkdir('{folder}/made'))", "PermissionError"),
        ("str(__import__('os').fork())", "PermissionError"),
    ],
)
def test_a_template_has_no_way_out(tmp_path: Path, way: str, refusal: str) -> None:
    """Even if it got out of the sandbox: here it is let out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = way.format(port=listener.getsockname()[1], folder=tmp_path)
        escape = (
            "import models.chat, socket; models.chat.Template.render = lambda self, messages: "
            f"messages and {out}; import spu_llm.service.rendering as r; r.main()"
        )
        messages = [{"role": "user", "content": "Hello"}]
        given = json.dumps({"template": {"source": ""}, "messages": messages})
        done = subprocess.run(
            [sys.executable, "-c", escape], input=given, capture_output=True, text=True, timeout=60
        )
    assert refusal in done.stderr and not done.stdout
