"""`--watermark KEYFILE` of `generate` and `demo`: private text that its key finds again, by the
noise of a race or as one of several candidates a step (`--candidates`); and `--mark KEYFILE`, the
key of a provider that is started here.

The client's key goes to its worker over its standard input, with the prompt, and nowhere else. What
the worker used of it comes back as events, and is in the history beside the key before the text
that follows them is shown: the worker itself may touch neither file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.decoding.records import Mark
    from spu_llm.systems.watermark.history import History
    from spu_llm.systems.watermark.keys import Key, Scheme


@dataclass(frozen=True)
class Marking:
    """Keys for one text, one scheme, and their histories, which no other run has meanwhile."""

    keys: tuple[Key, ...]
    scheme: Scheme
    histories: tuple[History, ...]

    @property
    def mark(self) -> Mark:
        """What the worker has to know."""
        from spu_llm.systems.decoding.records import Mark

        scheme = self.scheme
        return Mark(
            [key.secret.hex() for key in self.keys], scheme.ngram,
            [history.packed().hex() for history in self.histories], scheme.method,
            scheme.units, scheme.family.name, scheme.family.k,
        )  # fmt: skip

    @property
    def told(self) -> dict[str, Any]:
        """What anybody may know."""
        return {
            "method": self.scheme.method, "ngram": self.scheme.ngram, "keys": len(self.keys)
        }  # fmt: skip

    def noted(self, event: dict[str, Any]) -> bool:
        """Whether an event is of what was used of the keys, which is then in their histories."""
        from spu_llm.systems.decoding.marked import USED
        from spu_llm.systems.watermark.history import unpacked

        if event["event"] != USED:
            return False
        for history, names in zip(self.histories, event["names"], strict=True):
            history.add(unpacked(bytes.fromhex(names)))
        return True


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watermark", type=Path, action="append", default=[], metavar="KEYFILE",
                        help="mark the text under a key of watermark keygen (with --candidates; "
                        "may be given again: two keys choose one inside the other, among 4, 9 or "
                        "16) or watermark keygen --race (with --verify race), which watermark "
                        "detect then finds; KEYFILE.history keeps what was used of it"
                        )  # fmt: skip


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Also of a completion to come."""
    parser.add_argument("--candidates", type=int, default=1, metavar="M",
                        help="a step verifies 2 to 16 continuations, each with drafts of its own, "
                        "of which the key of --watermark chooses one (M of all keys together); you "
                        "see all M, the provider learns M, not which")  # fmt: skip


def keys_of(options: argparse.Namespace) -> tuple[tuple[Key, ...], Scheme] | None:
    """Return the keys of `--watermark` and their one scheme, None without it. InputError for keys
    that cannot mark a text that is asked for like this.
    """
    if not options.watermark:
        if options.candidates != 1:
            raise InputError("a key chooses among --candidates; add --watermark KEYFILE")
        return None
    from spu_llm.systems.decoding.request import MAX_CANDIDATES
    from spu_llm.systems.watermark.keys import read_keys
    from spu_llm.systems.watermark.selecting import group_of

    first, several = options.watermark[0], len(options.watermark) > 1
    keys, scheme = read_keys(options.watermark)
    if scheme.method == "provider":
        raise InputError(
            f"{first} is a provider's; make a key with spu-llm watermark keygen "
            "--race --tokenizer DIR"
        )
    if scheme.method == "race":
        if several:
            raise InputError(f"{first} marks the noise of a race, which one key does; give one")
        if options.candidates != 1:
            raise InputError(
                f"{first} marks the noise of a race, without --candidates; leave them "
                "out, or make a key with spu-llm watermark keygen without --race"
            )
        if options.verify != "race":
            raise InputError(f"{first} marks the noise of a race; add --verify race")
    elif options.candidates == 1:
        raise InputError(
            f"{first} marks by candidates; add --candidates 4, or make a key with "
            "spu-llm watermark keygen --race --tokenizer DIR"
        )
    elif several:
        group_of(options.candidates, len(keys), MAX_CANDIDATES)
    return keys, scheme


@contextmanager
def opened(
    options: argparse.Namespace, found: tuple[tuple[Key, ...], Scheme] | None, tokenizer: Tokenizer
) -> Iterator[Marking | None]:
    """The keys that `keys_of` has found, with their histories; `tokenizer`: of the text. InputError
    for keys of another tokenizer, or that another run is using.
    """
    if found is None:
        yield None
        return
    from spu_llm.systems.watermark.history import HistoryFile, history_path

    keys, scheme = found
    if scheme.units == "tokens" and not tokenizer.is_named(scheme.tokenizer):
        raise InputError(
            f"{options.watermark[0]} marks tokens of another tokenizer than the provider's model "
            "has; make a key with spu-llm watermark keygen --tokenizer DIR, where that one is"
        )
    with ExitStack() as kept:
        histories = tuple(
            kept.enter_context(HistoryFile(history_path(path), key))
            for path, key in zip(options.watermark, keys, strict=True)
        )
        yield Marking(keys, scheme, histories)


def add_provider_option(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--mark", type=Path, metavar="KEYFILE",
                        help="mark every text under a key of watermark keygen --provider, which "
                        "clients ask for with --verify marked and --temperature 0.5 or more; "
                        f"{words}KEYFILE.sessions keeps what watermark detect needs")  # fmt: skip


@contextmanager
def provider_key(options: argparse.Namespace, directory: Path) -> Iterator[Path | None]:
    """The key of a provider with the model in `directory` that is started here; one of its own,
    which nobody has afterwards, where none is given. None where the provider is elsewhere or marks
    nothing.
    """
    from spu_llm.systems.decoding.records import MARKED

    given: Path | None = getattr(options, "mark", None)
    if options.verify != MARKED:
        if given is not None:
            raise InputError(f"with --mark every text is marked; add --verify {MARKED}")
        yield None
        return
    if options.server is not None or given is not None:
        yield given
        return
    from models.tokenizer import Tokenizer
    from spu_llm.systems.watermark.keys import Key, Scheme, write_key

    digest = Tokenizer.load(directory).digest
    with tempfile.TemporaryDirectory(prefix="spu-llm-") as folder:
        path = Path(folder, "key")
        write_key(path, Key.from_os(), Scheme(method="provider", tokenizer=digest))
        yield path
