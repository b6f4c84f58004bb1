"""Detection with a provider's key: a text against the sessions that are recorded beside the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.watermark import aligning
from spu_llm.systems.watermark.aligning import AlignmentPrior, SessionEvidence
from spu_llm.systems.watermark.detecting import as_p
from spu_llm.systems.watermark.guessing import drafts_of
from spu_llm.systems.watermark.keys import KeyFile
from spu_llm.systems.watermark.page import Shaded, page_of
from spu_llm.systems.watermark.sessions import Session, recorded, sessions_path
from spu_llm.systems.watermark.units import TokenUnits

MAX_REFERENCES = 100_000
_SHADES = (
    "The darker a token, the surer that the session's noise drew it; underlined where that is "
    "likelier than not."
)
_NO_SHADES = (
    "Which tokens the noise drew is known of a marked text, with --draft-model: none are shaded."
)


@dataclass(frozen=True)
class ProviderVerdict:
    """The answer whether a text is a provider's, and of which session."""

    evidence: SessionEvidence
    alpha: float  # a text is called marked that has p of this or less
    shaded: list[Shaded]  # each token's place, and how surely the session's noise drew it
    parts: list[tuple[int, int]]  # runs of tokens that are likelier drawn than not: [first, end)

    @property
    def marked(self) -> bool:
        return self.evidence.best is not None and self.evidence.log_p <= math.log(self.alpha)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the characters [start, end) of `parts`."""
        return [(self.shaded[first].start, self.shaded[last - 1].end) for first, last in self.parts]

    def summary(self) -> str:
        """Return the verdict in a few lines."""
        evidence = self.evidence
        if evidence.best is None:
            return "no mark found: there are no sessions yet"
        words = "marked" if self.marked else "no mark found"
        lines = [f"{words}: p <= {as_p(evidence.log_p)}, of {evidence.sessions} sessions"]
        if self.marked:  # of a text without a mark it would say nothing
            lines.append(
                f"  most like session {evidence.best.nonce.hex()} of {evidence.best.began}"
            )
        lines += [f"  characters {start} to {end}" for start, end in self.spans]
        if evidence.rank is not None:
            lines.append(
                f"  by {evidence.references} sessions that never were: p = {evidence.rank:.3g}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the command line's `--json`."""
        evidence = self.evidence
        best = evidence.best if self.marked else None
        return {
            "marked": self.marked,
            "alpha": self.alpha,
            "log10_p": evidence.log_p / math.log(10),
            "sessions": evidence.sessions,
            "tokens": evidence.tokens,
            "session": None if best is None else {"nonce": best.nonce.hex(), "began": best.began},
            "spans": [{"start": start, "end": end} for start, end in self.spans],
            "references": evidence.references,
            "rank_p": evidence.rank,
        }

    def page(self, text: str) -> str:
        """Return the text as an HTML page, its tokens shaded."""
        explained = _SHADES if any(token.strength for token in self.shaded) else _NO_SHADES
        return page_of(text, self.summary(), explained, self.shaded, self.parts)


def detect_provider(
    path: Path,
    file: KeyFile,
    tokenizer: Tokenizer,
    text: str,
    *,
    alpha: float = 1e-3,
    session: str | None = None,
    draft_model: Path | None = None,
    references: int = 0,
    on_progress: Callable[[str], None] = lambda words: None,
) -> ProviderVerdict:
    """Compare a text with the sessions recorded beside the provider's key in `path`.

    alpha: p of what is called marked. session: the nonce of the only one to compare with.
    draft_model: directory of the public model that clients draft with. references: so many sessions
    that never were are compared, too. InputError for nonsense and for a session not recorded.
    """
    if not 0 < alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {alpha}")
    if not 0 <= references <= MAX_REFERENCES:
        raise InputError(f"--references must be 0 to {MAX_REFERENCES}, found {references}")
    sessions = _chosen(recorded(sessions_path(path), file.key), session, path)
    units = TokenUnits(tokenizer).placed(text)
    tokens = [int.from_bytes(unit.value, "little") for unit in units]
    distributions = _priors(draft_model, tokenizer, tokens)
    evidence = aligning.detect(
        file.key,
        sessions,
        tokens,
        distributions,
        references,
        lambda done, of: on_progress(f"{done} of {of} sessions"),
    )
    surely, parts = np.zeros(len(units)), list[tuple[int, int]]()
    # Where a text begins and ends is vague while nothing is known of its drafts.
    if evidence.best is not None and evidence.log_p <= math.log(alpha) and draft_model is not None:
        stream = file.key.session(evidence.best.nonce)
        surely = aligning.drawn(stream, evidence.best.shape, tokens, distributions)
        parts = _parts(surely)
    shaded = [Shaded(unit.start, unit.end, float(p)) for unit, p in zip(units, surely, strict=True)]
    return ProviderVerdict(evidence, alpha, shaded, parts)


def _parts(drawn: np.ndarray) -> list[tuple[int, int]]:
    """Return runs of tokens that are likelier drawn than not: first, and one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn > 0.5, [False]])))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _chosen(sessions: list[Session], nonce: str | None, path: Path) -> list[Session]:
    """Return all sessions, or the one with this nonce; InputError when there is none."""
    if nonce is None:
        return sessions
    chosen = [session for session in sessions if session.nonce.hex() == nonce.lower()]
    if not chosen:
        raise InputError(f"--session: {path}.sessions has no {nonce!r:.80}")
    return chosen


def _priors(
    directory: Path | None, tokenizer: Tokenizer, tokens: list[int]
) -> list[AlignmentPrior]:
    """Return the distribution of alignments, by what a public model would have drafted if given."""
    if directory is None:
        return AlignmentPrior.unknown(len(tokens))
    if Tokenizer.load(directory).digest != tokenizer.digest:
        raise InputError(f"--draft-model: {directory} has another tokenizer than the key's")
    return AlignmentPrior.mixed(drafts_of(*load_model(directory), tokens))
