"""The prompt for infilling: what a model reads before it says what stands in a gap of a text.

"Confidential Prompting" (Gim, Li, Zhong), section 5 and algorithm 1, line 4: Format({F_i},
S_context, n), control sequences F_i around the text before and after a target. Which they are
depends on the model. One that was trained to fill gaps has tokens for it (Bavarian et al. 2022,
arXiv:2207.14255). Any other gets a few words, as in Donahue et al. 2020 (arXiv:2005.05339), whose
models were trained for that, and then the text before the gap again, so that the target follows
what it followed in the text. n, how long the target is, is not said: the algorithm stops at n by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.tokenizer import Tokenizer

# Special tokens before the text before the gap, before the text after it, and before what fills it:
# StarCoder's, Qwen2.5-Coder's and Code Llama's.
_TRAINED = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_WORDS = ("A text with a gap: ", " ____ ", "\nThe same text without the gap: ")


@dataclass(frozen=True)
class Infilling:
    """Control sequences F_1 to F_3, in tokens: before the text before a gap, before the text after
    it, and before what fills it. `again`: the text before the gap comes after F_3 once more.
    """

    before: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    again: bool = True

    @staticmethod
    def of(tokenizer: Tokenizer) -> Infilling:
        """Return a model's control sequences, by its tokenizer."""
        special = tokenizer.special_tokens
        for names in _TRAINED:
            if all(name in special for name in names):
                before, gap, then = ((special[name],) for name in names)
                return Infilling(before, gap, then, again=False)
        first, *others = _WORDS
        middle, last = (tuple(tokenizer.encode(words, goes_on=True)) for words in others)
        return Infilling(tuple(tokenizer.encode(first)), middle, last)

    def context(self, tokens: Sequence[int], target: range) -> list[int]:
        """Return what the model reads before the target (S with a tilde), in tokens: nothing where
        there are neither control sequences nor other text.
        """
        before, after = tokens[: target.start], tokens[target.stop :]
        again = before if self.again else ()
        return [*self.before, *before, *self.gap, *after, *self.then, *again]

    def room(self, tokens: int) -> int:
        """Return the most tokens that the context and target of a text of so many take."""
        return 2 * tokens + len(self.before) + len(self.gap) + len(self.then)
