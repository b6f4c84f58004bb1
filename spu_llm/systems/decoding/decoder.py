"""The decoder: one object a session, whose prefill and steps every program decodes with.

It knows the public course: which rows of the shared block are written, how long the block is, and
what comes before a step (a longer block, or a packed one). Whoever uses it schedules steps and
resolves their outcomes. It runs the same in plaintext, between two parties, and in a dry run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from protocols.verification.variants import side_by_side
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import PeerError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, public
from spu_llm.runtime.dry_session import DrySession
from spu_llm.runtime.session import Session, private_tree
from spu_llm.systems.decoding.judges import Judge, RowsJudge
from spu_llm.systems.decoding.secure_model import build, lengthen, pack
from spu_llm.systems.decoding.session_shape import Place, SessionShape, Text
from spu_llm.systems.decoding.text_rows import TextRows

# Which rows of a step stay in the text: bool [lane, n]; any, not only the first ones. None at the
# provider where only the client may know them.
Retained = np.ndarray | None


class JudgeInputs(NamedTuple):
    """The inputs of the parties to the judge of a forward, as private values of the session, for
    each lane, or branch of a lane, that it decides on (`SessionShape.judged`).
    """

    client: Any
    provider: Any


class VerificationResult(NamedTuple):
    """The result of a forward, for each sequence that is judged (`SessionShape.judged`): the
    judge's outcome, which is the client's, and what the judge makes public, such as the number of
    accepted drafts.
    """

    outcome: Any
    accepted: Any


class _NoRoom(ValueError):
    """Rows do not fit the longest block."""


class Decoder:
    """Sequences that are continued together. ValueError when a step does not fit the layout."""

    def __init__(
        self,
        session: Session,
        layout: SessionShape,
        judge: Judge,
        weights: Any,
        text: Text | None = None,
    ) -> None:
        """Build the layout's programs. `text`: what stands before every lane's prompt, where the
        layout has rows for it.
        """
        if layout.hidden and not judge.hide_progress:
            raise ValueError(f"`{judge.name}` opens how many drafts stay: rows cannot be hidden")
        self._session, self._layout, self._judge, self._weights = session, layout, judge, weights
        self._programs = build(layout, judge)  # type: ignore[arg-type]  # frozen
        self._rows = TextRows(layout.begun, layout.branches)
        self._written = self._rows.written  # as both know it
        self._shared: Any = None
        self._prefix: Any = None
        self._hidden: Any = None  # which rows of the prefix hold no text
        self._public: Any = None  # weights that both know, from the prefill on
        assert (text is None) == (layout.prefix == 0)
        if text is not None:
            self._prefix = session.call(self._programs.prefix, weights, *text)
            self._hidden = text.hidden
        self._last_count = 0  # rows of the last step
        # Of the last forward, and of what came before it: what it took, and the secure function
        # with its arguments.
        self.demand = Demand()
        self.last: tuple[SecureFunction, tuple[Any, ...]] | None = None

    def prefill(
        self, prompts: Any, inputs: JudgeInputs, then: int | None = None
    ) -> VerificationResult:
        """Write the prompts, the client's n rows as `SessionShape.rows_in` has them, padded to the
        longest: their keys and values become shares, and their last rows are judged. `then`: rows
        of the step that may follow, whose correlations may be made meanwhile; None: there is none.
        """
        self.demand = Demand()
        self._public = self._of_both(self._session.call)
        self._check_public()
        return self._forward(
            0, then, self._programs.prefill, prompts, *inputs, self._prefix, self._hidden
        )

    def open(self) -> None:
        """Begin without prompts: `extend` comes first."""
        self._public = self._of_both(self._session.call)
        self._check_public()
        zero = self._session.private(PROVIDER, lambda: np.float32(0), (), np.float32)
        self._shared = self._call(self._programs.empty, zero, self._prefix)

    def step(
        self, tokens: Any, inputs: JudgeInputs, retained: Retained, then: int | None = None
    ) -> VerificationResult:
        """Write `tokens`, the client's n rows as `SessionShape.rows_in` has them, after what the
        lanes retain of the last step, and judge every row. `retained` is not looked at after a
        prefill or `extend`, all of which stays. `then`: as for `prefill`.
        """
        self.demand = Demand()
        self._retain(retained)
        count = tokens.shape[1]
        judged = self._after(count, then, self._programs.decode, tokens, inputs)
        self._last_count = count
        return judged

    def extend(
        self,
        tokens: Any,
        inputs: JudgeInputs,
        retained: Retained,
        then: int | None = None,
        empty: int | None = 0,
    ) -> VerificationResult:
        """Write text that follows what the lanes retain of the last step: `tokens`, the client's n
        rows as `SessionShape.rows_in` has them; their last row is judged. `empty`: how many of the
        first ones hold no text, which only the client may know where progress is hidden; all others
        stay. `retained`, `then`: as for `step`.
        """
        if self._layout.branches > 1:
            raise ValueError("a text that has several continuations does not go on as one")
        self.demand, lanes = Demand(), self._layout.lanes
        self._retain(retained)
        count = tokens.shape[1]
        judged = self._after(count, then, self._programs.extend, tokens, inputs, empty)
        self._last_count = count
        holds = None if empty is None else np.tile(np.arange(count) >= empty, (lanes, 1))
        self._retain(holds)
        return judged

    def rehearse(self, dry: DrySession, rows: int, count: int, steps: int) -> list[Demand]:
        """Go dry through an `extend` of `rows` rows and so many steps of `count` rows after what
        there is, as far as the block has room; return the demand of each.
        """
        twin = copy.copy(self)
        twin._session, twin._rows = dry, copy.copy(self._rows)
        layout, demands = self._layout, []
        with suppress(_NoRoom):
            twin.extend(layout.rows_in(rows), self.judge_shapes(1), None, empty=None)
            demands.append(dry.demand())
            for _ in range(steps):
                twin.step(layout.rows_in(count), self.judge_shapes(count), None)
                demands.append(dry.demand())
        return demands

    def prepare(self, counts: Sequence[int]) -> None:
        """Compile all that may be called, for steps of so many rows of every lane, and agree on it
        with the peer, before the first secret.
        """
        layout, programs, shape = self._layout, self._programs, jax.ShapeDtypeStruct

        def run(function: SecureFunction, *args: Any) -> Any:
            self._session.prepare(function, *args)
            return function.results(*args)

        prompts, inputs = layout.rows_in(max(layout.prompts)), self.judge_shapes(1)
        prefix, public = (self._prefix, self._hidden), self._of_both(run)
        _, _, shared, _ = run(programs.prefill, self._weights, prompts, *inputs, *prefix)
        for size in layout.sizes:
            if layout.inside + size > shared.positions:
                shared = run(lengthen(layout.inside + size, layout.backend), shared)
            for count in counts:
                place = Place(*_place_shapes(layout, count, size))
                run(
                    programs.decode,
                    self._weights,
                    layout.rows_in(count),
                    place,
                    *self.judge_shapes(count),
                    shared,
                    shape((), np.int32),
                    *prefix,
                    public,
                )
        if layout.packs:
            kept = shape((layout.lanes, layout.live_rows), np.int32)
            run(pack(layout.sizes[-1], layout.inside, layout.backend), kept, shared)

    def _of_both(self, run: Callable[..., Any]) -> Any:
        """Return what `run` gives of the weights that both parties know: none in most families, and
        none where rows are public, which the provider computes with alone.
        """
        return run(self._programs.public, self._weights) if self._layout.public_weights else {}

    def _check_public(self) -> None:
        """Raise PeerError for opened weights that shares do not hold: which of them the client
        computes with would say which rows hold text.
        """
        largest = max(self._layout.config.largest_score)
        for name, words in self._layout.public_weights.items():
            values = self._session.get(self._public[name])
            if values is not None and not np.all(np.abs(values) <= largest):
                raise PeerError(
                    f"the provider's {words} has numbers beyond {largest:g}, the range that it "
                    "stated"
                )

    def inputs(
        self, count: int, provider: Prg | None, client: Callable[..., Sequence[Any]], *args: Any
    ) -> JudgeInputs:
        """Return what the parties put into the judge of `count` rows of every lane: the client
        `client(*args)`, an input for each sequence that is judged; the provider what it draws from
        its stream.
        """
        shapes, session = self.judge_shapes(count), self._session
        return JudgeInputs(
            private_tree(session, CLIENT, lambda: side_by_side(client(*args)), shapes.client),
            private_tree(session, PROVIDER, self._of_provider, shapes.provider, count, provider),
        )

    def _of_provider(self, count: int, stream: Prg) -> Any:
        assert not isinstance(self._judge, RowsJudge)
        layout = self._layout
        sizes = layout.drafts(count), layout.config.vocab_size
        drawn = [self._judge.provider_input(*sizes, stream) for _ in range(layout.judged)]
        return side_by_side(drawn)

    def judge_shapes(self, count: int) -> JudgeInputs:
        """Return the shapes of what the parties put into the judge of `count` rows of every
        lane.
        """
        layout = self._layout

        def of_all(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((layout.judged, *one.shape), one.dtype)

        sizes = layout.drafts(count), layout.config.vocab_size
        client, provider = self._judge.client_shapes(*sizes), self._judge.provider_shapes(*sizes)
        return JudgeInputs(*jax.tree.map(of_all, (client, provider)))

    def _retain(self, retained: Retained) -> None:
        if not self._last_count:
            return
        if self._layout.hidden:
            # Roll-back would say how many rows stay: they all do, and the client hides them.
            self._session.local(CLIENT, self._rows.add, retained, self._last_count)
            self._written += self._last_count
        else:
            assert retained is not None
            self._rows.add(retained, self._last_count)
            self._rows.cut()
            self._written = self._rows.written
        self._last_count = 0

    def _make_room(self, count: int) -> None:
        """Make room for `count` rows in the shared block: leave it, lengthen it or, when it is
        full, pack it by the rows of the client's choice.
        """
        layout, needed = self._layout, self._written + count
        if needed <= self._capacity:
            return
        for size in layout.sizes:
            if needed <= size:
                self._shared = self._call(
                    lengthen(layout.inside + size, layout.backend), self._shared
                )
                return
        if not layout.packs or layout.live_rows + count > layout.sizes[-1]:
            raise _NoRoom(f"{needed} rows do not fit a block of {layout.sizes[-1]}")
        shape = (layout.lanes, layout.live_rows)
        kept = self._session.private(CLIENT, self._rows.pack, shape, np.int32, layout.live_rows)
        self._shared = self._call(
            pack(layout.sizes[-1], layout.inside, layout.backend), kept, self._shared
        )
        self._written = layout.live_rows

    @property
    def _capacity(self) -> int:
        """Return how many own rows the shared block has, the prefix's not counted."""
        return int(self._shared.positions) - self._layout.inside

    def _place(self, count: int, empty: int | None) -> Place:
        capacity, context = self._capacity, self._layout.config.context
        context -= self._layout.prefix
        if not self._layout.hidden:
            return Place(*map(public, self._rows.place(count, capacity, context)))
        shapes = _place_shapes(self._layout, count, capacity)
        placed = private_tree(
            self._session, CLIENT, self._rows.place, shapes, count, capacity, context, empty
        )
        return Place(*placed)

    def _after(
        self,
        count: int,
        then: int | None,
        function: SecureFunction,
        tokens: Any,
        inputs: JudgeInputs,
        empty: int | None = 0,
    ) -> VerificationResult:
        """Run a forward whose `count` rows are written after the rows that there are, the first
        `empty` of them without text.
        """
        self._make_room(count)
        place = self._place(count, empty)
        at = public(np.int32(self._written))
        return self._forward(
            count,
            then,
            function,
            tokens,
            place,
            *inputs,
            self._shared,
            at,
            self._prefix,
            self._hidden,
            self._public,
        )

    def _forward(
        self, count: int, then: int | None, function: SecureFunction, *args: Any
    ) -> VerificationResult:
        self._make_ready(function, self._weights, *args)
        if then is not None:
            twin = copy.copy(self)
            twin._rows = copy.copy(self._rows)
            self._session.prefetch(lambda dry: twin._go_on(dry, count, then, function, *args))
        outcome, accepted, self._shared, self._prefix = self._session.call(
            function, self._weights, *args
        )
        return VerificationResult(outcome, accepted)

    def _go_on(
        self, dry: Session, count: int, then: int, function: SecureFunction, *args: Any
    ) -> None:
        """Go dry through a forward of `count` rows that is ready, and a step of `then` rows after
        it. Of a decode step only the first row is taken to stay: which rows will is not known yet,
        and what a step takes seldom depends on it, by the length of the block or by when a tile of
        the cache is begun.
        """
        self._session = dry
        self._forward(count, None, function, *args)
        self._last_count = count
        stay = count if function is self._programs.extend else 1
        retained = np.tile(np.arange(count) < stay, (self._layout.lanes, 1))
        self.step(self._layout.rows_in(then), self.judge_shapes(then), retained)

    def _call(self, function: SecureFunction, *args: Any) -> Any:
        self._make_ready(function, *args)
        return self._session.call(function, *args)

    def _make_ready(self, function: SecureFunction, *args: Any) -> None:
        # What a forward takes is made in one go before it, so that nothing is made inside it.
        self.demand += self._session.preprocess(function, *args)
        self.last = function, args


def _place_shapes(layout: SessionShape, count: int, capacity: int) -> tuple[Any, Any]:
    shape, lanes = jax.ShapeDtypeStruct, layout.lanes
    return shape((lanes, count), np.int32), shape((lanes, count, capacity), np.bool_)
