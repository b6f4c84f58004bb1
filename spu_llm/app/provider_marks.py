"""`spu-llm watermark detect` with a provider's key: a text against the sessions beside the key."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app.output import write_json, write_page
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from models.tokenizer import Tokenizer
    from spu_llm.systems.watermark.aligning import SessionEvidence
    from spu_llm.systems.watermark.keys import KeyFile
    from spu_llm.systems.watermark.sessions import Session

MAX_REFERENCES = 100_000
_SHADES = (
    "The darker a token, the surer that the session's noise drew it; underlined where that is "
    "likelier than not."
)
_NO_SHADES = (
    "Which tokens the noise drew is known of a marked text, with --draft-model: none are shaded."
)


def add_options(detect: argparse.ArgumentParser) -> None:
    """Add the options that `detect` takes for a provider's key."""
    detect.add_argument(
        "--session",
        metavar="NONCE",
        help="of a provider's key: only the session with this nonce, known "
        "from elsewhere: p is too small for one that an earlier detect has named",
    )
    detect.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="of a provider's key: the public model that clients draft with; what "
        "it would have drafted says how the text was made: finds marks in "
        "shorter texts, and about where they are; texts of a client that drafted "
        "otherwise are found as without it",
    )
    detect.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="N",
        help="of a provider's key: also compare with N sessions that never were: "
        "a p by their rank times the sessions that there are (Bonferroni), so down "
        "to sessions / (N + 1)",
    )


def check_unused(options: argparse.Namespace) -> None:
    """Raise InputError for options that another key than a provider's has no use for."""
    given = options.session, options.draft_model
    if options.references or any(option is not None for option in given):
        raise InputError(
            "--session, --draft-model and --references are for a provider's key; leave them out"
        )


def detect(options: argparse.Namespace, file: KeyFile, tokenizer: Tokenizer, text: str) -> None:
    """Detect a provider's marks: the verdict to stdout, all of it to `--json`, the text with its
    marks to `--html`. InputError for options of other keys, and for a session that is not recorded.
    """
    import numpy as np

    from spu_llm.app.progress import Progress
    from spu_llm.systems.watermark import aligning
    from spu_llm.systems.watermark.page import Shaded, page_of
    from spu_llm.systems.watermark.sessions import recorded, sessions_path
    from spu_llm.systems.watermark.units import TokenUnits

    (path,) = options.key
    _check(options)
    sessions = _chosen(recorded(sessions_path(path), file.key), options.session, path)
    units = TokenUnits(tokenizer).placed(text)
    tokens = [int.from_bytes(unit.value, "little") for unit in units]
    laws = _laws(options.draft_model, tokenizer, tokens)
    progress = Progress()
    try:
        progress.stage("comparing")
        found = aligning.detect(
            file.key,
            sessions,
            tokens,
            laws,
            options.references,
            lambda done, of: progress.update(f"{done} of {of} sessions"),
        )
        surely, parts = np.zeros(len(units)), list[tuple[int, int]]()
        marked = found.log_p <= math.log(options.alpha)
        # Where a text begins and ends is vague while nothing is known of its drafts.
        if found.best is not None and marked and options.draft_model is not None:
            stream = file.key.session(found.best.nonce)
            surely = aligning.drawn(stream, found.best.shape, tokens, laws)
            parts = _parts(surely)
    finally:
        progress.close()
    spans = [(units[first].start, units[last - 1].end) for first, last in parts]
    heard = said(found, options.alpha, spans)
    show_table(heard)
    write_json(options.json, as_json(found, options.alpha, spans))
    if options.html is not None:
        shaded = [
            Shaded(unit.start, unit.end, float(p)) for unit, p in zip(units, surely, strict=True)
        ]
        explained = _SHADES if surely.any() else _NO_SHADES
        write_page(options.html, page_of(text, heard, explained, shaded, parts))


def said(found: SessionEvidence, alpha: float, spans: Sequence[tuple[int, int]] = ()) -> str:
    """Return the verdict in a few lines."""
    from spu_llm.systems.watermark.detecting import as_p

    if found.best is None:
        return "no mark found: there are no sessions yet"
    marked = found.log_p <= math.log(alpha)
    verdict = "marked" if marked else "no mark found"
    lines = [f"{verdict}: p <= {as_p(found.log_p)}, of {found.sessions} sessions"]
    if marked:  # of a text without a mark it would say nothing
        lines.append(f"  most like session {found.best.nonce.hex()} of {found.best.began}")
    lines += [f"  characters {start} to {end}" for start, end in spans]
    if found.rank is not None:
        lines.append(f"  by {found.references} sessions that never were: p = {found.rank:.3g}")
    return "\n".join(lines)


def as_json(
    found: SessionEvidence, alpha: float, spans: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    marked = found.log_p <= math.log(alpha)
    best = found.best if marked else None
    return {
        "marked": marked,
        "alpha": alpha,
        "log10_p": found.log_p / math.log(10),
        "sessions": found.sessions,
        "tokens": found.tokens,
        "session": None if best is None else {"nonce": best.nonce.hex(), "began": best.began},
        "spans": [{"start": start, "end": end} for start, end in spans],
        "references": found.references,
        "rank_p": found.rank,
    }


def _parts(drawn: np.ndarray) -> list[tuple[int, int]]:
    """Return runs of tokens that are likelier drawn than not: first, and one after the last."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn > 0.5, [False]])))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _check(options: argparse.Namespace) -> None:
    if options.score is not None or options.join:
        raise InputError("--score and --join are not for a provider's key; leave them out")
    if not 0 < options.alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {options.alpha}")
    if not 0 <= options.references <= MAX_REFERENCES:
        raise InputError(f"--references must be 0 to {MAX_REFERENCES}, found {options.references}")


def _chosen(sessions: list[Session], nonce: str | None, path: Path) -> list[Session]:
    """Return all sessions, or the one with this nonce; InputError when there is none."""
    if nonce is None:
        return sessions
    chosen = [session for session in sessions if session.nonce.hex() == nonce.lower()]
    if not chosen:
        raise InputError(f"--session: {path}.sessions has no {nonce!r:.80}")
    return chosen


def _laws(directory: Path | None, tokenizer: Tokenizer, tokens: list[int]) -> Any:
    """Return the law of alignments, by what a public model would have drafted, if there is one."""
    from models.hf import load_model
    from models.tokenizer import Tokenizer
    from spu_llm.systems.watermark.aligning import Law
    from spu_llm.systems.watermark.guessing import drafts_of

    if directory is None:
        return Law.unknown(len(tokens))
    if Tokenizer.load(directory).digest != tokenizer.digest:
        raise InputError(f"--draft-model: {directory} has another tokenizer than the key's")
    return Law.mixed(drafts_of(*load_model(directory), tokens))
