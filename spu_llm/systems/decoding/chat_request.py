"""A conversation's request: what both parties know before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.family import ModelConfig
from protocols.verification.variants import HIDING
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.request import Request

# Rows of rejected drafts, before the block is packed again, as of a completion.
_SPARE_ROWS = 160
# What a client may have a provider make for a turn that may never come.
MOST_TURN_ROWS, MOST_AHEAD_STEPS, MOST_AHEAD_ROWS = 512, 256, 1024


@dataclass(frozen=True)
class ChatRequest(Request):
    """The public facts of a conversation, known to both parties before it starts. `prompt_tokens`
    counts its first turn, `max_new_tokens` limits each answer, and `conversation_tokens` limits all
    turns and answers together.

    With `turn_rows` the session is opened before its first turn, whose tokens are not counted here.
    Then every turn takes so many rows of a forward, or a multiple, the first of which may hold no
    text; and while the client has nothing to say, both parties make what such a turn and
    `ahead_steps` steps of its answer take.
    """

    conversation_tokens: int = field(kw_only=True)
    turn_rows: int = field(default=0, kw_only=True)
    ahead_steps: int = field(default=0, kw_only=True)

    @property
    def begins_later(self) -> bool:
        return self.turn_rows > 0

    @property
    def hide_progress(self) -> bool:
        """Return whether the provider does not learn which rows hold text: also without drafts,
        where those of a turn are not told.
        """
        return super().hide_progress or (self.begins_later and self.verify in HIDING)

    def rows_of_turn(self, tokens: int, room: int) -> int:
        """Return how many rows a turn of so many tokens takes, what of the text before goes into
        its forward included, where the conversation has room for `room` rows more: near its end,
        as many as the turn has.
        """
        if not self.turn_rows:
            return tokens
        rounded = -(-tokens // self.turn_rows) * self.turn_rows
        return rounded if rounded + self.turn_rows <= room else tokens

    @property
    def told(self) -> str:
        rounded, between = "", ""
        if self.turn_rows:
            rounded = f", rounded up to multiples of {self.turn_rows} while there is room"
            between = "; between turns, when the client lets something be made for the next one"
        return (
            "temperature, top-k, top-p and token limits; when turns come, how many tokens each "
            f"has{rounded}, and the number of each answer's steps{between}"
        )

    def live_rows(self, config: ModelConfig) -> int:
        return min(self.conversation_tokens, self._room(config))

    def limit(self, config: ModelConfig) -> int:
        """Return how many tokens the first answer may have."""
        return min(self.max_new_tokens, self.live_rows(config) - self.prompt_tokens)

    def capacity(self, config: ModelConfig) -> int:
        """Return how many rows the shared cache block has at most, room for a step's drafts
        included. With hidden progress it holds the live rows twice, so that a turn finds room in a
        block that was packed.
        """
        live = self.live_rows(config)
        if not self.hide_progress:
            return live + self.step_rows
        return min(self._most_written(config), 2 * live + _SPARE_ROWS)

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if self.turn_rows >= self.live_rows(config):
            raise InputError(
                f"turns are prepared for {self.turn_rows} tokens, and the conversation may have "
                f"{self.live_rows(config)}; prepare fewer"
            )
        if self.prompt_tokens >= self.live_rows(config):
            raise InputError(
                f"the first turn has {self.prompt_tokens} tokens, and the conversation may have "
                f"{self.live_rows(config)}; shorten it"
            )

    def check_options(self) -> None:
        super().check_options()
        if self.turn_rows or self.ahead_steps:
            self._check_ahead()
        if self.candidates > 1 or self.show_progress:
            raise InputError("a conversation has no --candidates and no --show-progress")
        if self.draft_length and not self.hide_progress:
            raise InputError(
                f"--verify {self.verify} shows which drafts stay, which a conversation does not"
            )

    def _check_ahead(self) -> None:
        if not 1 <= self.turn_rows <= MOST_TURN_ROWS:
            raise InputError(f"a turn is prepared for 1 to {MOST_TURN_ROWS} tokens")
        if not 0 <= self.ahead_steps <= MOST_AHEAD_STEPS:
            raise InputError(f"an answer is prepared for {MOST_AHEAD_STEPS} steps at most")
        if self.turn_rows + self.ahead_steps * self.step_rows > MOST_AHEAD_ROWS:
            raise InputError(f"turns are prepared with answers of {MOST_AHEAD_ROWS} rows at most")
        if self.prompt_tokens:
            raise InputError("a conversation whose turns are prepared has no prompt of its own")
        if not self.hide_progress:
            raise InputError(
                f"--verify {self.verify} shows which rows hold text; use token or race"
            )

    def _most_written(self, config: ModelConfig) -> int:
        return self.live_rows(config) * self.step_rows
