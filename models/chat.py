"""Chats as text: the template of a model directory, and which part of a rendered chat is public.

A template is a program that somebody else wrote. `Template.render` runs it in jinja2's sandbox,
which keeps it from Python objects but does not limit its running time: a template of unknown origin
is rendered in a process that can be ended (`spu_llm.service.rendering`).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from models.files import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, read_file, read_json
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

MOST_CHARACTERS = 1 << 20  # of a template, and of what it renders

# In place of a message's secret words, to find where they stand.
_MARK = "\N{LEFT SQUARE BRACKET WITH QUILL}secret %d\N{RIGHT SQUARE BRACKET WITH QUILL}"
# Ends what an answer says before it answers, which templates leave out of later turns.
_THOUGHT = "</think>"


ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """A turn of a chat."""

    role: str
    content: str


Render = Callable[[Sequence[Message]], str]  # all of a chat, up to where an answer begins


@dataclass(frozen=True)
class Template:
    """A chat template as `transformers` defines it: Jinja source, and the texts of the special
    tokens that it may name.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    @staticmethod
    def load(directory: Path) -> Template:
        """Return the template of a model directory (`of_model`). InputError when there is none or
        it cannot be used.
        """
        if (template := Template.of_model(directory)) is None:
            raise InputError(
                f"{directory} has no chat template; complete text with generate, or put the "
                f"model's {TEMPLATE_FILE} there"
            )
        return template

    @staticmethod
    def of_model(directory: Path) -> Template | None:
        """Return the template of a model directory: `chat_template.jinja`, or else the one in
        `tokenizer_config.json`; None when there is none. InputError when it cannot be used.
        """
        config_path = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_path, "") if config_path.exists() else {}
        path = directory / TEMPLATE_FILE
        source = _text_of(path) if path.exists() else _stated(config_path, config)
        if source is None:
            return None
        if len(source) > MOST_CHARACTERS:
            raise InputError(f"{directory} has a chat template of more than 1 MB; copy it again")
        tokens = (_token(config, name) for name in ("bos_token", "eos_token"))
        return Template(source, *tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat, up to where the model's answer begins. InputError for a
        template that fails or refuses these messages.
        """
        # Only chats need it.
        import jinja2.ext
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _today}
        try:
            text = environment.from_string(self.source).render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template may raise anything
            said = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise InputError(f"the model's chat template refuses this chat: {said}") from None
        if len(text) > MOST_CHARACTERS:
            raise InputError("the model's chat template makes more than 1 MB of text of this chat")
        return text


def cut(render: Render, messages: Sequence[Message]) -> tuple[str, str]:
    """Split the rendered chat into its public head, which follows from the template and the roles
    alone, and the secret rest, which begins with the first word of `messages`.

    The provider wrote the template and learns the length of the rest. InputError therefore unless
    the rest consists of what the template adds for the roles and, in between, the messages' words
    as they are; the template may leave out blanks at their ends and an answer's thoughts.
    """
    marks = [_MARK % number for number in range(len(messages))]
    marked = render([Message(m.role, mark) for m, mark in zip(messages, marks, strict=True)])
    parts = re.split(f"({'|'.join(marks)})", marked)
    written = {mark: _written(m) for m, mark in zip(messages, marks, strict=True)}
    whole, ends = render(messages), {0}
    for part in parts:
        forms = written.get(part, {part})
        ends = {end + len(form) for end in ends for form in forms if whole.startswith(form, end)}
    if len(whole) not in ends:
        raise InputError(
            "the model's chat template does more with these words than write them, so what it adds "
            "would tell the provider of them; try again, or complete text with generate"
        )
    return parts[0], whole[len(parts[0]) :]


def _written(message: Message) -> set[str]:
    """Return the forms in which a template may write a message's words."""
    forms = {message.content}
    if message.role == "assistant":
        forms.add(message.content.rpartition(_THOUGHT)[2])
    return {kept for form in forms for kept in (form, form.strip(), form.lstrip(), form.rstrip())}


def going_on(before: str, answer: str, after: str) -> str | None:
    """Return the text that the rendered chat `after` adds to the rendered chat `before` and the
    model's `answer` to it. None where the template writes the earlier part differently.
    """
    so_far = before + answer
    return after[len(so_far) :] if after.startswith(so_far) else None


def _text_of(path: Path) -> str:
    try:
        return read_file(path, "").decode("utf-8")
    except ValueError:
        raise InputError(f"{path} is not UTF-8 text; copy it again") from None


def _stated(path: Path, config: Any) -> str | None:
    """Return the template in a `tokenizer_config.json`: of several, the one named "default"."""
    stated = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(stated, list):
        named = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}
        stated = named.get("default")
    if stated is not None and not isinstance(stated, str):
        raise InputError(f"{path} has chat_template {shown(stated)}; it must be text")
    return stated


def _token(config: Any, name: str) -> str:
    stated = config.get(name) if isinstance(config, dict) else None
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) else ""


def _to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON as `transformers` does for templates: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: object) -> NoReturn:
    raise InputError(str(message))


def _today(form: str) -> str:
    return datetime.datetime.now().strftime(form)
