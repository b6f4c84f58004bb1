"""Keys of watermarks for completions: a client's (`--watermark`), which finds its text again, by
the noise of a race or as one of several candidates a step; and that of a provider started here.

The client's key goes to its worker over its standard input, with the prompt, and nowhere else. What
the worker used of it comes back as events, and is in the history beside the key before the text
that follows them is shown: the worker itself may touch neither file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.limits import MAX_CANDIDATES
from spu_llm.systems.decoding.records import MARKED, RulesModule
from spu_llm.systems.watermark.history import History, HistoryFile, history_path, unpacked
from spu_llm.systems.watermark.keys import RIVALS, Key, Scheme, read_keys, write_key
from spu_llm.systems.watermark.private_text import USED, Mark
from spu_llm.systems.watermark.selecting import group_of


@dataclass(frozen=True)
class Marking:
    """Keys for one text, one scheme, and their histories, which no other run has meanwhile."""

    keys: tuple[Key, ...]
    scheme: Scheme
    histories: tuple[History, ...]

    @property
    def mark(self) -> RulesModule:
        """Return what the worker has to know."""
        scheme = self.scheme
        return Mark(
            [key.secret.hex() for key in self.keys],
            scheme.ngram,
            [history.packed().hex() for history in self.histories],
            scheme.method,
            scheme.units,
            scheme.family.name,
            scheme.family.k,
        ).rules

    @property
    def told(self) -> dict[str, Any]:
        """Return what anybody may know."""
        return {"method": self.scheme.method, "ngram": self.scheme.ngram, "keys": len(self.keys)}

    def noted(self, event: dict[str, Any]) -> bool:
        """Add what an event says was used of the keys to their histories; return whether it did."""
        if event["event"] != USED:
            return False
        for history, names in zip(self.histories, event["names"], strict=True):
            history.add(unpacked(bytes.fromhex(names)))
        return True


@dataclass(frozen=True)
class KeyFiles:
    """A client's keys for one text, of one scheme, as they lie in files."""

    paths: tuple[Path, ...]
    keys: tuple[Key, ...]
    scheme: Scheme

    @staticmethod
    def read(
        paths: Sequence[Path], verify: str, candidates: int, *, greedy: bool = False
    ) -> KeyFiles | None:
        """Return the keys in these files, None without any. InputError for keys that cannot mark a
        text that is asked for with this verification and so many candidates, and for candidates
        that nothing chooses among.
        """
        if not paths:
            if candidates != 1 and verify != "race" and not greedy:
                raise InputError(
                    "--candidates are chains of drafts with --verify race or --temperature 0; add "
                    "one of these, or --watermark KEYFILE, whose key chooses among them"
                )
            return None
        if greedy and candidates != 1:
            raise InputError(
                "a key has nothing to choose among --candidates at --temperature 0; give a "
                "--temperature"
            )
        first, several = paths[0], len(paths) > 1
        keys, scheme = read_keys(paths)
        if scheme.method in ("provider", *RIVALS):
            whose = "a provider's" if scheme.method == "provider" else f"{scheme.method}'s"
            raise InputError(
                f"{first} is {whose}; make a key with spu-llm watermark keygen "
                "--race --tokenizer DIR"
            )
        if scheme.method == "race":
            if several:
                raise InputError(f"{first} marks the noise of a race, which one key does; give one")
            if candidates != 1:
                raise InputError(
                    f"{first} marks the noise of a race, without --candidates; leave them "
                    "out, or make a key with spu-llm watermark keygen without --race"
                )
            if verify != "race":
                raise InputError(f"{first} marks the noise of a race; add --verify race")
        elif candidates == 1:
            raise InputError(
                f"{first} marks by candidates; add --candidates 4, or make a key with "
                "spu-llm watermark keygen --race --tokenizer DIR"
            )
        elif several:
            group_of(candidates, len(keys), MAX_CANDIDATES)
        return KeyFiles(tuple(paths), keys, scheme)

    @contextmanager
    def opened(self, tokenizer: Tokenizer) -> Iterator[Marking]:
        """Yield the keys with their histories; `tokenizer`: of the text. InputError for keys of
        another tokenizer, or that another run is using.
        """
        scheme = self.scheme
        if scheme.units == "tokens" and not tokenizer.is_named(scheme.tokenizer):
            raise InputError(
                f"{self.paths[0]} marks tokens of another tokenizer than the provider's model "
                "has; make a key with spu-llm watermark keygen --tokenizer DIR, where that one is"
            )
        with ExitStack() as kept:
            histories = tuple(
                kept.enter_context(HistoryFile(history_path(path), key))
                for path, key in zip(self.paths, self.keys, strict=True)
            )
            yield Marking(self.keys, scheme, histories)


@contextmanager
def provider_key(
    verify: str, given: Path | None, directory: Path, *, elsewhere: bool
) -> Iterator[Path | None]:
    """Yield the key of a provider with the model in `directory` that is started here: `given`, or
    one of its own, which nobody has afterwards. None where it marks nothing, and for a provider
    `elsewhere`.
    """
    if elsewhere and given is not None:
        raise InputError("--mark is the key of a provider on this machine; leave it out")
    if verify != MARKED:
        if given is not None:
            raise InputError(f"with --mark every text is marked; add --verify {MARKED}")
        yield None
        return
    if elsewhere or given is not None:
        yield given
        return
    digest = Tokenizer.load(directory).digest
    with tempfile.TemporaryDirectory(prefix="spu-llm-") as folder:
        path = Path(folder, "key")
        write_key(path, Key.from_os(), Scheme(method="provider", tokenizer=digest))
        yield path
