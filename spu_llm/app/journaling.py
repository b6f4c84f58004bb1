"""What a provider writes down of its work, and where: options of the commands that serve."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from spu_llm.app.options import address
from spu_llm.app.printing import say, tell
from spu_llm.core.errors import WantedError

if TYPE_CHECKING:
    from spu_llm.service.journal import Log, Record

TEXT, JSON = "text", "json"


def add_options(serve: argparse.ArgumentParser) -> None:
    """Add the log's form, the audit file, and where counts are read."""
    serve.add_argument(
        "--log-format",
        choices=(TEXT, JSON),
        default=TEXT,
        help="of lines on stderr: for people, or for programs an object a line "
        "(default: %(default)s)",
    )
    serve.add_argument(
        "--audit",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each session and refusal (of a client at most 20 refusals "
        "a minute): who asked for how much, when, what it took, how it ended; no session runs that "
        "cannot be written down",
    )
    serve.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="where Prometheus reads counts, by plain HTTP from whoever connects",
    )


def opened(options: argparse.Namespace) -> Log:
    """Return what takes the records of a provider, on any thread. InputError for a file or an
    address that cannot be used.
    """
    from spu_llm.service.journal import AuditFile, Bounded

    written: list[Log] = [] if options.audit is None else [AuditFile(options.audit).write]
    written.append(_tell_json if options.log_format == JSON else _say_words)
    logs: list[Log] = [Bounded(take).take for take in written]
    if options.metrics is not None:
        logs.append(_counted_at(*address(options.metrics, "--metrics")))
    one_at_a_time = threading.Lock()

    def log(record: Record) -> None:
        """Give a record to all; WantedError, in the end, where the audit file cannot hold it."""
        failed: WantedError | None = None
        with one_at_a_time:
            for take in logs:
                try:
                    take(record)
                except WantedError as error:
                    failed = error
        if failed is not None:
            raise failed

    return log


def _counted_at(host: str, port: int) -> Log:
    from spu_llm.service.metrics import Metrics

    metrics = Metrics()
    metrics.listen(host, port)
    return metrics.count


def _tell_json(record: Record) -> None:
    tell(record.as_json(with_words=True))


def _say_words(record: Record) -> None:
    if record.words:
        say(record.words)
