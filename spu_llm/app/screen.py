"""A session on the terminal: streamed text on stdout, progress and summary on stderr."""

from __future__ import annotations

import sys
import time

from spu_llm.api.completion import Completion
from spu_llm.api.events import Event, FetchingHint, Making, Note, Round, Stage, Step, Text, Token
from spu_llm.app.printing import Generated, say, tell
from spu_llm.app.progress import Progress
from spu_llm.core.units import mb


class Stages:
    """Shows how far a session has come; `lines`: also where there is no terminal."""

    def __init__(self, *, lines: bool = True) -> None:
        self._event: Event | None = None  # the last one
        self._progress = Progress(self._wire_bytes, lines=lines)
        self._doing = ""
        self._making_since = time.monotonic()
        self._progress.stage("starting")

    def on_event(self, event: Event) -> None:
        self._event = event
        match event:
            case Stage(name):
                self._doing = name
                self._progress.stage(self._doing)
            case Making(made, total):
                words = f"making correlated randomness, {made} of {total} batches"
                self._part(made, total, words + self._to_go(made, total))
            case FetchingHint(done, total):
                parts = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
                self._part(done, total, f"fetching the model's hint, {parts} (once: it is kept)")
            case Round(done, total, loss):
                self._progress.stage(f"round {done} of {total}, loss {loss:.3f}")
            case Token(tokens):
                self._progress.update(f"{self._doing}: {tokens} tokens")
            case Note(text):
                self._progress.pause()
                say(text)

    def say(self, doing: str) -> None:
        """Show a stage before the session."""
        self._progress.stage(doing)

    def pause(self) -> None:
        """Take the progress away until there is some."""
        self._progress.pause()

    def close(self) -> None:
        """Take the progress away."""
        self._progress.close()

    def _part(self, done: int, total: int, words: str) -> None:
        """Show a stage within the stage, until all of it is done."""
        if done == total:
            self._progress.stage(self._doing)
        elif done:
            self._progress.update(words)
        else:
            self._progress.stage(words)

    def _to_go(self, made: int, total: int) -> str:
        """Return words for the seconds until all batches are made, by the pace so far."""
        if not made:
            self._making_since = time.monotonic()
            return ""
        seconds = (time.monotonic() - self._making_since) / made * (total - made)
        return f", about {seconds:.0f} s to go"

    def _wire_bytes(self) -> int | None:
        count = None if self._event is None else self._event.wire_bytes
        return None if count is None else count()


class Screen(Stages):
    """Shows the events of one completion."""

    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._prompt = prompt
        self._texted = False
        self._generated = Generated()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Token):
            self._doing = "decoding"
        super().on_event(event)
        match event:
            case Text(text, continues):
                self._progress.pause()
                if not continues:
                    self._prompt = ""
                self._show_prompt()
                self._generated.write(text)
            case Step(steps, accepted, drafted):
                self._doing = f"decoding, {steps} steps, {accepted} of {drafted} drafts accepted"
                self._progress.update(self._doing)

    def finish(self) -> None:
        """Show that the completion has ended, perhaps without any text."""
        self._progress.pause()
        self._show_prompt()

    def end_text(self) -> None:
        """End the text; another one may follow."""
        self._progress.pause()
        if self._texted:
            self._generated.end_line()
        self._generated, self._texted, self._progress.below = Generated(), False, False

    def close(self) -> None:
        """Take the progress away and end the line of text."""
        super().close()
        if self._texted:
            self._generated.end_line()

    def summary(self, result: Completion) -> None:
        """Show what each party learned, and what it took."""
        tell(*learned_lines(result.learned), *_figures(result))

    def _show_prompt(self) -> None:
        if not self._texted:
            self._texted = True
            self._generated.write(self._prompt)
            self._progress.below = sys.stdout.isatty()


def learned_lines(learned: dict[str, list[str]]) -> list[str]:
    """Return what each process learned, in lines for people."""
    lines = []
    for role, facts in learned.items():
        lines += [f"{role} learned:", *(f"  - {fact}" for fact in facts)]
    return lines


def _figures(result: Completion) -> list[str]:
    """Return lines on speed and traffic: online alone, and with all that comes before it and beside
    it.
    """
    tokens, steps, drafted = len(result.token_ids), result.steps, result.drafted
    seconds, elapsed = result.seconds, result.elapsed_seconds
    online, offline, wire = result.bytes["online"], result.bytes["offline"], result.wire_bytes
    text = f"{tokens} tokens, ended by {result.finish_reason}"
    if steps:
        text += f"; {steps} secure steps, {(tokens - 1) / steps:.2f} tokens a step"
    if drafted:
        text += (
            f", {result.accepted} of {drafted} drafts accepted ({result.accepted / drafted:.0%})"
        )
    lines = [text]
    if tokens:
        lines.append(
            f"first token: after {result.first_token_seconds:.1f} s, set-up and preprocessing "
            f"included (prefill alone {seconds.prefill:.1f} s)"
        )
    if steps:
        rate = (tokens - 1) / seconds.decode
        lines.append(f"online: {rate:.2f} tokens/s, {seconds.decode:.1f} s of decoding")
    everything = f"everything included: {elapsed:.1f} s, {seconds.offline:.1f} s of them offline"
    if beside := result.made_beside.seconds:
        everything += f", and {beside:.1f} s of preprocessing in the background"
    lines.append(everything + (f"; {elapsed / tokens:.2f} s per token" if tokens else ""))
    lines += [
        f"payload: online {mb(online.total)} in {result.messages['online']:,} messages "
        f"(client sent {mb(online.client_to_provider)}, provider "
        f"{mb(online.provider_to_client)}), offline {mb(offline.total)}",
        f"on the wire: {mb(wire.total)} (client sent {mb(wire.client_to_provider)}, "
        f"provider {mb(wire.provider_to_client)})",
    ]
    return lines
