"""`spu-llm prepare --watch`: correlated randomness is made again whenever a completion has used
some.

A completion that wants the directory while correlated randomness is made gets it: the session ends
at once, as when it is interrupted, and making goes on when the completion has ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from spu_llm.api.preparation import NoRoom
from spu_llm.app.stock_tables import made_line
from spu_llm.core.errors import (
    InputError,
    PeerError,
    PoolError,
    StalledError,
    WantedError,
    WorkerError,
)
from spu_llm.offline import priority_lock, stock
from spu_llm.offline.files import IN_USE
from spu_llm.service.supervisor import Look

LOOK_S = 5.0  # between two looks at the directory
AWAY_MOST_S = 60.0  # between two attempts while the provider is away

Make = Callable[[Look], dict[str, Any]]
Restock = Callable[[], int]


def watch(
    directory: Path, make: Make, say: Callable[[str], None], restock: Restock | None = None
) -> None:
    """Keep correlated randomness in a client's pool directory until Ctrl-C or SIGTERM; `make` is
    `Client.prepare`, which is told what may end it. `restock`: `Client.restock`, where there are
    producers.

    What is being made then is lost, as when any session is interrupted; what is made stays.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        keep(directory, make, say, restock=restock)
    say("ended; what was made stays")


def keep(
    directory: Path,
    make: Make | None,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    restock: Restock | None = None,
    made: dict[str, Any] | None = None,
) -> NoReturn:
    """Make correlated randomness, and more when the client's half no longer has what `make` was
    asked for.

    A directory in use is left alone, but by `restock`, which makes more after the first time. When
    the provider cannot be reached, that is said once and tried again. NoRoom only at first: later
    on, batches that are half used may fill the disk. `made`: what `make` has given already; with
    `restock`, there is no more use for `make` then.
    """
    left: dict[str, int] = {}  # after the last attempt
    away_s = 0.0

    def attempt() -> str:
        """Make what lacks; return the line that says so."""
        nonlocal made
        if made is not None and restock is not None:
            return f"{restock()} batches came from producers"
        assert make is not None
        with priority_lock.in_background(directory) as look:
            made = make(look)
        return made_line(made)

    while True:
        pause_s = LOOK_S
        beside = made is not None and restock is not None
        if (beside or not _is_used(directory)) and (made is None or _is_short(made, left)):
            try:
                if made is not None and not away_s:
                    say("the stock no longer lasts for all steps: making more")
                line = attempt()
                assert made is not None
                left, away_s = _units_left(made), 0.0
                say(line)
                if beside and _is_short(made, {}):  # some that were asked for did not come
                    left, pause_s = {}, AWAY_MOST_S
            except NoRoom as exc:
                if made is None:
                    raise
                left, away_s = _units_left(made), 0.0
                say(str(exc))
            except (PeerError, StalledError, InputError, PoolError) as exc:
                # Of the last two, only those of a cluster that is away for a while pass by.
                if isinstance(exc, InputError | PoolError) and not beside:
                    raise
                if not away_s:
                    say(f"nothing can be made now, trying again: {exc}")
                pause_s = away_s = min(max(LOOK_S, 2 * away_s), AWAY_MOST_S)
            except WantedError as exc:
                left = {}
                say(f"making stops for now: {exc}")
            except WorkerError as exc:
                if IN_USE not in str(exc):  # by a session that has begun meanwhile
                    raise
        pause(pause_s)


def _is_used(directory: Path) -> bool:
    """Return whether a session uses correlated randomness of a directory, or a completion is about
    to.
    """
    return priority_lock.is_claimed(directory) or stock.in_use(directory)


def _is_short(made: dict[str, Any], left: dict[str, int]) -> bool:
    """Return whether some of what a result of `make` says is needed is not there, and the stock is
    another than the `left` that nothing could be added to.
    """
    now = _units_left(made)
    short = any(now.get(row["kind"], 0) < row["needed_units"] for row in made["correlations"])
    return short and now != left


def _units_left(made: dict[str, Any]) -> dict[str, int]:
    """Return the units in the client's directory, by kind."""
    folder = Path(made["config"]["pool"], made["config"]["peer"])
    return {kind.name: kind.units for kind in stock.kinds_in(folder)}
