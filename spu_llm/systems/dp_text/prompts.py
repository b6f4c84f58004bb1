"""Prompts: public, and with a reference in them, for a model that goes on with text.

    public     begin | query
    private    begin | reference, cut to so many tokens | two blank lines | query

`begin` is what the tokenizer puts before any text (LLaMA's first token), or else the end of another
text. The public prompt is not the private one with an empty reference: an empty reference is *null*
and adds an exact zero to the sum (`mechanism.clipped_sum`), whatever a model would say to it. A
reference is cut by its own length alone; the query's tokens are the same whatever comes before.

With `Templates` both prompts are in words of one's own (InvisibleInk, table 5), as a chat where the
model has chats; then a reference stands between other words, which are the same for all of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.chat import Message
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_json_lines, read_json_texts

# What stands between definitions in Python source, which the shipped models know: they carry more
# over it than over one blank line.
BETWEEN = "\n\n\n"
LEAST_REFERENCE = 8  # tokens that a reference may have at least
USUAL_REFERENCE = 512  # what it is cut to where nothing else is asked for
TEXT = "text"  # the field of a record that is sensitive
_FIELD = re.compile(r"\{(\w+)\}")
# In place of a reference, to find where a chat template writes it.
_MARK = "\N{LEFT SQUARE BRACKET WITH QUILL}reference\N{RIGHT SQUARE BRACKET WITH QUILL}"

# Renders a chat up to where the answer begins.
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Prompts:
    """Prompts in tokens: of phi_pub, and what stands around a reference, which is cut to
    `reference_tokens`. query: what of the public prompt is text.
    """

    tokenizer: Tokenizer
    query: str
    reference_tokens: int
    public: list[int]
    before: list[int]
    after: list[int]

    @staticmethod
    def of_query(tokenizer: Tokenizer, query: str, reference_tokens: int) -> Prompts:
        """Return prompts that go on with a query, with a reference before it or none."""
        begin = beginning(tokenizer)
        public = begin + tokenizer.encode(query, goes_on=True)
        after = tokenizer.encode(BETWEEN + query, goes_on=True)
        return Prompts(tokenizer, query, reference_tokens, public, begin, after)

    @property
    def begin(self) -> list[int]:
        return beginning(self.tokenizer)

    def private(self, reference: str) -> list[int]:
        """Return the prompt of one reference, `room` tokens at most."""
        own = self.tokenizer.encode(reference, goes_on=True)[: self.reference_tokens]
        return self.before + own + self.after

    def lanes(self, references: Sequence[str | None], batch: int) -> list[list[int]]:
        """Return the prompts of a batch, padded with nulls to B; a null's prompt is only there to
        be computed.
        """
        filler = self.before + self.after
        rows = [self.private(r) if r else filler for r in references]
        return rows + [filler] * (batch - len(rows))

    @property
    def room(self) -> int:
        """Return the number of tokens of a private prompt at most."""
        return len(self.before) + self.reference_tokens + len(self.after)


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return what every prompt begins with: what the tokenizer puts there, or the end of a text."""
    return tokenizer.encode("") or [min(tokenizer.eos_ids)]


@dataclass(frozen=True)
class Templates:
    """Prompts in words. private: with {text} once, where the reference is to stand. Other fields in
    braces, in both, are `labels`: public, and the same for all references of a batch. system: what
    the system says, in a chat; render: writes chats; None for a model that goes on with text.
    """

    private: str
    public: str
    labels: tuple[str, ...] = ()
    system: str = ""
    render: Render | None = None

    def __post_init__(self) -> None:
        fields = _FIELD.findall(self.private)
        if fields.count(TEXT) != 1:
            raise InputError(
                "--template must have {text} once, where a reference is to stand; found "
                f"{fields.count(TEXT)} of it"
            )
        if TEXT in _FIELD.findall(self.public):
            raise InputError("--public-template has {text}, which is what must not be in it")
        if TEXT in self.labels:
            raise InputError("--labels are public; the text of a reference cannot be one")
        others = {*fields, *_FIELD.findall(self.public)} - {TEXT, *self.labels}
        if others:
            raise InputError(
                f"the templates have {{{min(others)}}}, which --labels does not name: what is not "
                "public must be part of the text"
            )
        if self.system and self.render is None:
            raise InputError("this model has no chat template; leave --system out")

    def prompts(
        self, tokenizer: Tokenizer, labels: Mapping[str, str], reference_tokens: int
    ) -> Prompts:
        """Return the prompts of references with these labels. InputError where a chat template does
        not write a message as it is.
        """
        private = _filled(self.private, {**labels, TEXT: _MARK})
        query = _filled(self.public, labels)
        if self.render is None:
            begin, parts = beginning(tokenizer), private.split(_MARK)
            shown = query
        else:
            begin, parts = [], self._said(private).split(_MARK)
            shown = self._said(query)
        if len(parts) != 2:
            raise InputError("the model's chat template does not write a message as it is")
        public, before, after = (
            tokenizer.encode(part, goes_on=True) if part else [] for part in (shown, *parts)
        )
        return Prompts(tokenizer, query, reference_tokens, begin + public, begin + before, after)

    def _said(self, text: str) -> str:
        assert self.render is not None
        system = [Message("system", self.system)] if self.system else []
        return self.render([*system, Message("user", text)])


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def prompts_for(
    tokenizer: Tokenizer,
    query: str,
    context: int,
    new_tokens: int,
    reference_tokens: int | None = None,
) -> Prompts:
    """Return prompts with room for references as of `with_room`. InputError when that is too
    little, or the query is no text.
    """
    try:
        query.encode()
    except UnicodeEncodeError:
        raise InputError("the query is not valid UTF-8; give it as UTF-8") from None
    bare = Prompts.of_query(tokenizer, query, 0)
    return with_room([bare], context, new_tokens, reference_tokens)[0]


def with_room(
    bare: Sequence[Prompts], context: int, new_tokens: int, reference_tokens: int | None
) -> list[Prompts]:
    """Return prompts with as much room for references as was asked for, or as the context leaves
    to all of them, `USUAL_REFERENCE` at most. InputError when that is too little.
    """
    longest = max(max(len(p.public), len(p.before) + len(p.after)) for p in bare)
    left = context - new_tokens - longest
    wanted = min(left, USUAL_REFERENCE) if reference_tokens is None else reference_tokens
    if not LEAST_REFERENCE <= wanted <= left:
        raise InputError(
            f"the model has {context} positions: {new_tokens} new tokens and the query leave "
            f"{max(left, 0)} for a reference, which must have {LEAST_REFERENCE} or more"
            + (f", and {reference_tokens} are asked for" if reference_tokens is not None else "")
        )
    return [replace(prompts, reference_tokens=wanted) for prompts in bare]


def read_references(path: Path, *, none: bool = False) -> list[str]:
    """Return one reference for each line, a JSON object with its `text`; an empty text is null.
    none: there may be none. InputError when the file cannot be used; the message shows nothing of
    what is in it.
    """
    references = read_json_texts(path, "--references")
    if not references and not none:
        raise InputError(f"{path}, of --references, is empty")
    return references


def read_labelled(
    path: Path, labels: Sequence[str], *, none: bool = False
) -> dict[tuple[str, ...], list[str]]:
    """Return references by their labels, in the order of the file; without labels, all together,
    and `none` where there may be none. Each line is a JSON object with `text` and all labels: texts
    or numbers. InputError as of `read_references`.
    """
    if not labels:
        return {(): read_references(path, none=none)}
    references: dict[tuple[str, ...], list[str]] = {}
    for number, record in enumerate(read_json_lines(path, "--references"), 1):
        values = [record.get(name) for name in labels]
        text = record.get(TEXT)
        if not isinstance(text, str) or not all(
            isinstance(value, str | int | float) for value in values
        ):
            raise InputError(
                f"{path}, of --references, line {number}: must have {TEXT}, a text, and "
                f"{', '.join(labels)}, texts or numbers"
            )
        references.setdefault(tuple(map(str, values)), []).append(text)
    if not references:
        raise InputError(f"{path}, of --references, is empty")
    return references
