"""Prompts with spans: what stays with the vault, and what fake prompts differ in.

"Confidential Prompting" (Gim, Li, Zhong), section 3: `<confidential>` spans stay with the vault,
`<redacted>` ones inside them are what obfuscation hides. Here a `<redacted>` span is confidential
wherever it stands, and so is a prompt without any tag, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError

CONFIDENTIAL, REDACTED = "confidential", "redacted"
_TAG = re.compile(rf"<(/?)({CONFIDENTIAL}|{REDACTED})>")
_NEARLY = re.compile(rf"<\s*/?\s*(?:{CONFIDENTIAL}|{REDACTED})\b[^<>]*>", re.IGNORECASE)


class Span(NamedTuple):
    """Characters [start, stop) of a text."""

    start: int
    stop: int


# Finds what to redact in a text without tags: spans in order, that do not overlap.
Tagger = Callable[[str], Sequence[Span]]


@dataclass(frozen=True)
class Marked:
    """A text without its tags."""

    text: str
    confidential: list[Span]  # in order, apart from each other; redacted ones are within
    redacted: list[Span]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a marked text. A token that overlaps a span belongs to it."""

    marked: Marked
    tokens: list[int]
    targets: list[range]  # of the redacted spans: tokens; apart from each other
    edges: list[tuple[bytes, bytes]]  # of each target: what its tokens hold before and after it
    public: list[int]  # tokens of no confidential span

    @property
    def leading(self) -> list[int]:
        """Return the positions of the public tokens before all others, whose keys and values depend
        on nothing else.
        """
        positions = []
        for expected, position in enumerate(self.public):
            if position != expected:
                break
            positions.append(position)
        return positions

    @property
    def hidden(self) -> list[int]:
        """Return the positions of the redacted spans."""
        return [position for target in self.targets for position in target]

    @property
    def shape(self) -> tuple[object, ...]:
        """Return all but the text and tokens: what prompts among each other have in common."""
        return self.targets, self.edges, self.public, self.same

    @property
    def same(self) -> list[tuple[int, str, str]]:
        """Return, for each target, the first one with the same word (`said`), which may be itself;
        and what stands around the word, where others have it, too.
        """
        parts = [said(self.marked.text[span.start : span.stop]) for span in self.marked.redacted]
        words = [word for _, word, _ in parts]
        return [
            (words.index(word), before, after) if words.count(word) > 1 else (i, "", "")
            for i, (before, word, after) in enumerate(parts)
        ]


def said(text: str) -> tuple[str, str, str]:
    """Split off a text's word, between the white space and punctuation before and after it; all of
    it where it is nothing else.
    """
    match = re.fullmatch(r"(\W*)(.*?)(\W*)", text, re.DOTALL)
    assert match is not None
    before, word, after = match.groups()
    return (before, word, after) if word else ("", text, "")


def secret_in(
    tokenizer: Tokenizer, tokens: Sequence[int], edges: tuple[bytes, bytes]
) -> str | None:
    """Return what a target of these tokens says between its edges; None without them, or if it is
    no text.
    """
    data, (left, right) = tokenizer.token_bytes(tokens), edges
    stop = len(data) - len(right)
    if stop <= len(left) or data[: len(left)] != left or data[stop:] != right:
        return None
    try:
        return data[len(left) : stop].decode()
    except UnicodeDecodeError:
        return None


def parse(text: str) -> Marked:
    """Take the tags out of a text. InputError for tags that are unclosed, closed without being
    open, or nested in their own kind or the wrong way round; for what is nearly a tag, which would
    else go out with what it was to hide; and for an empty span.
    """
    for near in _NEARLY.findall(text):
        if not _TAG.fullmatch(near):
            raise InputError(f"{near[:60]!a} is no tag; write it in small letters, without spaces")
    spans: dict[str, list[Span]] = {CONFIDENTIAL: [], REDACTED: []}
    parts: list[str] = []
    opened: list[tuple[str, int]] = []
    end = length = 0
    for tag in _TAG.finditer(text):
        parts.append(text[end : tag.start()])
        length += len(parts[-1])
        end = tag.end()
        closes, name = bool(tag[1]), tag[2]
        if not closes:
            if opened and (name == CONFIDENTIAL or opened[-1][0] == name):
                raise InputError(
                    f"<{name}> opens inside <{opened[-1][0]}>; close that one first (only "
                    f"<{REDACTED}> may stand inside <{CONFIDENTIAL}>)"
                )
            opened.append((name, length))
            continue
        if not opened or opened[-1][0] != name:
            inner = f"<{opened[-1][0]}> is still open" if opened else "none is open"
            raise InputError(f"</{name}> closes nothing: {inner}")
        start = opened.pop()[1]
        if start == length:
            raise InputError(f"<{name}></{name}> is empty; put text into it or leave it out")
        spans[name].append(Span(start, length))
    if opened:
        raise InputError(f"<{opened[-1][0]}> is not closed; add </{opened[-1][0]}>")
    whole = "".join([*parts, text[end:]])
    confidential, redacted = spans[CONFIDENTIAL], spans[REDACTED]
    alone = [s for s in redacted if not any(c.start <= s.start < c.stop for c in confidential)]
    if not confidential and not redacted:
        confidential = [Span(0, len(whole))]
    return Marked(whole, sorted([*confidential, *alone]), redacted)


def tagged(text: str, tagger: Tagger) -> Marked:
    """Mark a text without tags: whole confidential, with what the tagger finds redacted. InputError
    for a text with tags.
    """
    marked = parse(text)
    if marked.text != text:
        raise InputError("the prompt has tags already; leave --redact out, or the tags")
    spans = sorted(span for span in tagger(text) if span.start < span.stop)
    apart: list[Span] = []
    for span in spans:
        if apart and span.start < apart[-1].stop:  # two kinds of the same words
            apart[-1] = Span(apart[-1].start, max(span.stop, apart[-1].stop))
        else:
            apart.append(span)
    return Marked(text, marked.confidential, apart)


def filled(marked: Marked, secrets: Sequence[str]) -> Marked:
    """Put these secrets in place of the redacted spans of a marked text."""
    parts, end = [], 0
    shifts = []
    for span, secret in zip(marked.redacted, secrets, strict=True):
        parts += [marked.text[end : span.start], secret]
        end = span.stop
        shifts.append((end, len(secret) - (span.stop - span.start)))

    def moved(span: Span) -> Span:
        return Span(*(at + sum(by for stop, by in shifts if stop <= at) for at in span))

    text = "".join([*parts, marked.text[end:]])
    return Marked(text, list(map(moved, marked.confidential)), list(map(moved, marked.redacted)))


def tokenised(marked: Marked, tokenizer: Tokenizer) -> Prompt:
    """Return the tokens of a marked text. InputError when the tokenizer does not give the text
    back, or two redacted spans share a token.
    """
    tokens = tokenizer.encode(marked.text)
    ends = _byte_ends(tokens, marked.text, tokenizer)
    starts = [0, *ends[:-1]]

    def within(span: Span) -> tuple[range, int, int]:
        start, stop = (len(marked.text[:at].encode()) for at in span)
        inside = [i for i in range(len(tokens)) if starts[i] < stop and ends[i] > start]
        return range(inside[0], inside[-1] + 1), start, stop

    data = marked.text.encode()
    confidential = [span for span in marked.confidential if span.start < span.stop]
    private = {i for span in confidential for i in within(span)[0]}
    targets: list[range] = []
    edges: list[tuple[bytes, bytes]] = []
    for span in marked.redacted:
        where, start, stop = within(span)
        if targets and where.start < targets[-1].stop:
            raise InputError("two redacted spans touch; put them into one")
        targets.append(where)
        edges.append((data[starts[where.start] : start], data[stop : ends[where.stop - 1]]))
    public = [i for i in range(len(tokens)) if i not in private]
    return Prompt(marked, tokens, targets, edges, public)


def _byte_ends(tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return where each token ends in the text's bytes."""
    whole, data = tokenizer.token_bytes(tokens), text.encode()
    # SentencePiece puts a space before a text.
    more = len(whole) - len(data)
    if whole != b" " * more + data:
        raise InputError("the tokenizer does not give this prompt back; use plain text")
    ends, at = [], -more
    for token in tokens:
        at += len(tokenizer.token_bytes([token]))
        ends.append(max(at, 0))
    return ends
