"""Scripts of the texts that a private model is asked on: public text, chats, and what it writes of
itself. None of them is a user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.alignment.writing import Drawn, Given, Script, Source
from models.chat import Message, Template
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError

LONGEST_QUESTION = 96  # tokens of one that the model writes
_MARK = "\N{LEFT SQUARE BRACKET WITH QUILL}question\N{RIGHT SQUARE BRACKET WITH QUILL}"


def of_text(tokens: Sequence[int], length: int) -> list[Script]:
    """Return a script for each part of so many tokens, after which the model writes as many at
    most: all of it counts.
    """
    starts = range(0, len(tokens), length)
    return [(Given(tokens[at : at + length], counts=True), Drawn(length)) for at in starts]


def of_sources(tokens: Sequence[int], length: int, after: Sequence[int]) -> list[Script]:
    """Return a script for each part of so many tokens, for a model with an encoder, which reads the
    part and writes as many tokens at most. `after`: tokens between a prompt and the text, of which
    the text begins with the last one. Tokens that fill no part are left out. InputError where there
    is no part.
    """
    *ending, start = after
    if len(tokens) < length:
        raise InputError(
            f"the text has {len(tokens)} tokens, fewer than a part of {length} tokens; give more "
            "text, or a smaller --length"
        )
    starts = range(0, len(tokens) - length + 1, length)
    return [
        (Source([*tokens[at : at + length], *ending]), Given([start]), Drawn(length))
        for at in starts
    ]


def of_chat(
    template: Template, tokenizer: Tokenizer, messages: Sequence[Message], most: int
) -> Script:
    """Return the script of a chat whose next answer the model writes, up to so many tokens. An
    answer that stands last is left out.
    """
    asked = messages[:-1] if messages[-1].role == "assistant" else messages
    if not asked:
        raise InputError("a chat has an answer alone; give its question, too")
    return Given(tokenizer.encode(template.render(asked))), Drawn(most)


def own(template: Template | None, tokenizer: Tokenizer, most: int) -> Script:
    """Return the script of a text that the model writes from its beginning: of a chat model, a
    question in a user's place, and its answer, which counts.
    """
    if template is None:
        start = tokenizer.beginning or sorted(tokenizer.eos_ids)[:1]
        return Given(start), Drawn(most)
    head, _, rest = template.render([Message("user", _MARK)]).partition(_MARK)
    return (
        Given(tokenizer.encode(head)),
        Drawn(LONGEST_QUESTION, counts=False),
        Given(tokenizer.encode(rest, goes_on=True)),
        Drawn(most),
    )
