"""Prompts and chats as tokens: what of them is public, and what goes on shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models.chat import ROLES, Message, cut
from models.stops import check_text
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.service.first_contact import KeptFormat
from spu_llm.service.rendering import render_apart


def check_texts(prefix: str, prompt: str) -> None:
    """Raise InputError when a public prefix, "" for none, or a prompt cannot be used."""
    check_text(prompt, "the prompt")
    if prefix:
        check_text(prefix, "the public prefix")


def encoded(prefix: str, prompt: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of a public prefix, with those that the tokenizer puts before any text, and
    of the prompt after it. InputError as of `check_texts`.
    """
    check_texts(prefix, prompt)
    public = tokenizer.encode(prefix) if prefix else tokenizer.beginning
    return public, tokenizer.encode(prompt, goes_on=True)


def tokens_of_prompt(prefix: str, prompt: str, text: TextFormat) -> tuple[list[int], list[int]]:
    """Return the tokens of a public prefix, and of the prompt with what a model of this text format
    wants after it. InputError as of `encoded`, or for a prefix that an encoder is to read.
    """
    if text.after_prompt and prefix:
        raise InputError(
            "the provider's model reads all of a prompt at once, so none of it is computed before; "
            "leave --public-prefix out"
        )
    public, tokens = encoded(prefix, prompt, text.tokenizer)
    return ([], [*public, *tokens, *text.after_prompt]) if text.after_prompt else (public, tokens)


def messages_of(system: str | None, prompt: str) -> list[Message]:
    """Return a chat of the system message, if there is one, and the user's first turn. InputError
    for texts that cannot be used.
    """
    check_text(prompt, "the prompt")
    if system is None:
        return [Message("user", prompt)]
    check_text(system, "--system")
    return [Message("system", system), Message("user", prompt)]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError for what is no chat. A template may write a role in the clear, so it is one
    of three.
    """
    if not messages:
        raise InputError("the chat is empty; give at least one message")
    for message in messages:
        if message.role not in ROLES:
            raise InputError(f"a role is {', '.join(ROLES)}; found {message.role[:80]!a}")
        # A model may have ended its answer at once.
        if message.content or message.role != "assistant":
            check_text(message.content, f"a message of the {message.role}")


def chat_encoded(text: KeptFormat, head: str, rest: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a rendered chat: of its public head, and of what goes on shares."""
    encode = text.text.tokenizer.encode
    return encode(head, goes_on=True) if head else [], encode(rest, goes_on=True)


def chat_tokens(text: KeptFormat, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat: of its public head, and of what goes on shares. InputError for a
    model that has no chats.
    """
    return chat_encoded(text, *cut(renderer(text), messages))


def renderer(text: KeptFormat) -> Callable[[Sequence[Message]], str]:
    """Return what renders chats by the model's template, in a process apart. InputError for a model
    that has none.
    """
    if (template := text.text.template) is None or text.text.after_prompt:
        raise InputError("the provider's model has no chat template; complete text with generate")
    return lambda messages: render_apart(template, messages)
