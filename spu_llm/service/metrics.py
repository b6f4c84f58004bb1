"""Counts of a provider's work, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from spu_llm.core.errors import InputError
from spu_llm.service import journal
from spu_llm.service.journal import Record

_SECONDS = (1, 2, 5, 10, 30, 60, 300, 900, 3600, 14400)


class Metrics:
    """Counts of a provider's sessions and refusals since it began."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"spu_llm_provider_{name}", words, labels, registry=registry)

        self._ended = counter("sessions", "sessions that have ended", "program", "outcome")
        self._refused = counter("refusals", "connections and calls that got no session", "error")
        self._bytes = counter("wire_bytes", "bytes of ended sessions on the wire", "direction")
        self._seconds = Histogram(
            "spu_llm_provider_session_seconds",
            "how long sessions took that have ended",
            buckets=_SECONDS,
            registry=registry,
        )
        self._open = Gauge(
            "spu_llm_provider_open_sessions", "sessions whose worker is at work", registry=registry
        )
        self._waits = Gauge(
            "spu_llm_provider_waiting_sessions",
            "sessions that wait for a machine with room",
            registry=registry,
        )
        self._placed = counter("placed_sessions", "sessions placed on a machine", "machine")
        self._begun: set[object] = set()
        self._waiting: set[object] = set()

    def count(self, record: Record) -> None:
        """Count what a record tells."""
        fields = record.fields
        if record.event == journal.WAITING:
            self._waiting.add(fields["session"])
        else:  # whatever else is told of a session, it waits no more
            self._waiting.discard(fields.get("session"))
        match record.event:
            case journal.PLACED:
                self._placed.labels(fields["machine"]).inc()
            case journal.BEGUN:
                self._begun.add(fields["session"])
            case journal.REFUSED:
                self._begun.discard(fields.get("session"))
                self._refused.labels(fields.get("error", "stranger")).inc()
            case journal.FINISHED | journal.FAILED:
                self._begun.discard(fields["session"])
                self._ended.labels(fields["program"], fields.get("error", "finished")).inc()
                for direction in ("sent", "received"):
                    self._bytes.labels(direction).inc(float(fields[f"wire_bytes_{direction}"] or 0))
                self._seconds.observe(float(fields["seconds"] or 0))
        self._open.set(len(self._begun))
        self._waits.set(len(self._waiting))

    def listen(self, host: str, port: int) -> None:
        """Answer Prometheus until this process ends. InputError where it cannot listen."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            raise InputError(
                f"--metrics {host}:{port}: {error.strerror or error}; give another address"
            ) from None
