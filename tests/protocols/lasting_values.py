"""What holds of every private value whose masks last, whatever the products with it are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocols.arithmetic.lasting import Lasting
from spu_llm.core.errors import PeerError
from spu_llm.core.op import ProtocolOp
from spu_llm.core.prg import Prg
from spu_llm.core.simulated import SimulatedParty
from spu_llm.core.values import CLIENT, Arith, fork
from spu_llm.testing.run import Outcome


def party(rank: int = CLIENT, seed: int = 0) -> SimulatedParty:
    return SimulatedParty(rank, Prg.from_seed(seed, "test"), Prg.from_seed(0, "common"))


def repeated_words(outcome: Outcome, rank: int) -> int:
    """Return how many words a party sends twice."""
    sent = [data.view(np.uint64) for data in outcome.views[rank].outgoing]
    words = np.concatenate([np.zeros(0, np.uint64), *sent])
    return words.size - len(set(words.tolist()))


Used = Callable[[SimulatedParty], Lasting]  # a value that a product has used


def check_other_sessions_are_refused(op: ProtocolOp, x: Arith, used: Used, **static: Any) -> None:
    known = used(party())
    with pytest.raises(ValueError, match="another session"):
        op.run(party(seed=1), [x, known], static)


def check_nothing_goes_on(op: ProtocolOp, rank: int, x: Arith, used: Used, **static: Any) -> None:
    """Check that a failure is the end: a mask may be used up."""
    one = party(rank)
    known = used(one)

    def fail(*_: Any) -> Any:
        raise PeerError("gone")

    one.send = one.recv = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(PeerError):
        op.run(one, [x, known], static)
    with pytest.raises(ValueError, match="has failed"):
        op.run(one, [x, known], static)


def check_fork(op: ProtocolOp, rank: int, x: Arith, used: Used, **static: Any) -> None:
    """Check that a dry run on a fork leaves the value as it was, and gives nothing away, when it
    comes to fresh units, too.
    """
    one = party(rank)
    known = used(one)
    (dry, again), owner = fork([known, known]), known.owner
    assert dry.state is again.state is not known.state
    if rank != owner:
        assert dry.value is None
    else:
        assert known.value is not None
        assert not dry.value.any() and known.value.any()
    price = op.cost(x, known, **static)
    assert op.cost(x, dry, **static) == price
    for _ in range(6):
        before, said = op.cost(x, dry, **static), len(one.outgoing)
        (result,) = op.run(one, [x, dry], static)
        assert isinstance(result, Arith) and not result.words.any()
        sent = one.outgoing[said:]
        assert not any(words.any() for words in sent)
        sizes = before.client_to_provider, before.provider_to_client
        assert sum(words.nbytes for words in sent) == sizes[rank]
    assert op.cost(x, known, **static) == price
