"""The query, and a reference before it, as prompts for a model that goes on with text.

    public     begin | query
    private    begin | reference, cut to so many tokens | two blank lines | query

`begin` is what the tokenizer puts before any text (LLaMA's first token), or else the end of another
text. The public prompt is not the private one with an empty reference: an empty reference is *null*
and adds an exact zero to the sum (`mechanism.clipped_sum`), whatever a model would say to it. A
reference is cut by its own length alone; the query's tokens are the same whatever comes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_json_texts

# What stands between definitions in Python source, which the shipped models know: they carry more
# over it than over one blank line.
BETWEEN = "\n\n\n"
LEAST_REFERENCE = 8  # tokens that a reference may have at least


@dataclass(frozen=True)
class Prompts:
    """Prompts of one query. reference_tokens: what a reference is cut to."""

    tokenizer: Tokenizer
    query: str
    reference_tokens: int

    @property
    def begin(self) -> list[int]:
        return self.tokenizer.encode("") or [min(self.tokenizer.eos_ids)]

    @property
    def public(self) -> list[int]:
        """Return the prompt of phi_pub."""
        return self.begin + self.tokenizer.encode(self.query, goes_on=True)

    def private(self, reference: str) -> list[int]:
        """Return the prompt of one reference, `room` tokens at most."""
        own = self.tokenizer.encode(reference, goes_on=True)[: self.reference_tokens]
        return self.begin + own + self._after

    def lanes(self, references: Sequence[str | None], batch: int) -> list[list[int]]:
        """Return the prompts of a batch, padded with nulls to B; a null's prompt is only there to
        be computed.
        """
        filler = self.begin + self._after
        rows = [self.private(r) if r else filler for r in references]
        return rows + [filler] * (batch - len(rows))

    @property
    def room(self) -> int:
        """Return the number of tokens of a private prompt at most."""
        return len(self.begin) + self.reference_tokens + len(self._after)

    @property
    def _after(self) -> list[int]:
        return self.tokenizer.encode(BETWEEN + self.query, goes_on=True)


def prompts_for(
    tokenizer: Tokenizer,
    query: str,
    context: int,
    new_tokens: int,
    reference_tokens: int | None = None,
) -> Prompts:
    """Return prompts with as much room for references as the context leaves, or as was asked for.
    InputError when that is too little, or the query is no text.
    """
    try:
        query.encode()
    except UnicodeEncodeError:
        raise InputError("the query is not valid UTF-8; give it as UTF-8") from None
    bare = Prompts(tokenizer, query, 0)
    left = context - new_tokens - bare.room
    wanted = left if reference_tokens is None else reference_tokens
    if not LEAST_REFERENCE <= wanted <= left:
        raise InputError(
            f"the model has {context} positions: {new_tokens} new tokens and the query leave "
            f"{max(left, 0)} for a reference, which must have {LEAST_REFERENCE} or more"
            + (f", and {reference_tokens} are asked for" if reference_tokens is not None else "")
        )
    return Prompts(tokenizer, query, wanted)


def read_references(path: Path) -> list[str]:
    """Return one reference for each line, a JSON object with its `text`; an empty text is null.
    InputError when the file cannot be used; the message shows nothing of what is in it.
    """
    references = read_json_texts(path, "--references")
    if not references:
        raise InputError(f"{path}, of --references, is empty")
    return references
