"""Counts of a gateway's work, as Prometheus reads them. None of them has words of a prompt."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spu_llm.gateway.outcome import Outcome
from spu_llm.gateway.running import Requests

_SECONDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Metrics:
    """The counters since the gateway began, and the gauges of now."""

    def __init__(self, requests: Requests) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"spu_llm_{name}", words, labels, registry=registry)

        self._ended = counter("requests", "requests that have ended", "path", "status")
        self._tokens = counter("tokens", "tokens of prompts, cached, and of answers", "kind")
        self._seconds = counter("seconds", "seconds in which answers waited for a phase", "phase")
        self._bytes = counter("bytes", "payload bytes of both parties", "phase")
        self._first = Histogram(
            "spu_llm_first_text_seconds",
            "from a request to the first text of its stream",
            buckets=_SECONDS,
            registry=registry,
        )
        now = {
            "open_requests": ("requests that wait or are answered", lambda: requests.count),
            "conversations": ("conversations that are open", lambda: requests.conversations),
            "ready_tokens": (
                "answer tokens, at least, that all is there for in open conversations",
                lambda: sum(1 + one.steps for _, one in requests.stocks if one.steps is not None),
            ),
            "lacking_batches": (
                "batches of correlated randomness to be made for next turns",
                lambda: sum(one.lacking for _, one in requests.stocks),
            ),
        }
        for name, (words, count) in now.items():
            Gauge(f"spu_llm_{name}", words, registry=registry).set_function(count)

    def text(self) -> bytes:
        """Return all of them in Prometheus's text format."""
        return generate_latest(self._registry)

    def first(self, seconds: float) -> None:
        """Count the time to a first text."""
        self._first.observe(seconds)

    def ended(self, path: str, status: int, outcome: Outcome | None = None) -> None:
        """Count a request, and what its answer took."""
        self._ended.labels(path, str(status)).inc()
        if outcome is None:
            return
        tokens = {
            "prompt": outcome.prompt_tokens,
            "cached": outcome.cached_tokens,
            "answer": outcome.completion_tokens,
        }
        for family, counts in (
            (self._tokens, tokens),
            (self._seconds, outcome.cost["seconds"]),
            (self._bytes, outcome.cost["bytes"]),
        ):
            for label, count in counts.items():
                family.labels(label).inc(count)
