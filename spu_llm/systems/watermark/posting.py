"""Requests over HTTP to a server that limits, restarts or fails.

A request is repeated where the server has done nothing for it: it answered 429 or 503, or the
connection was refused or reset before an answer. It says itself how long to wait (Retry-After), or
the wait doubles. Proxies are those of the environment, but what runs on this machine is reached
without one.
"""

from __future__ import annotations

import ipaddress
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InvalidHeader,
    LocationParseError,
    MaxRetryError,
    ProtocolError,
    ProxyError,
    ProxySchemeUnknown,
)
from urllib3.util import Timeout, Url, make_headers, parse_url
from urllib3.util.retry import Retry

from spu_llm.core.errors import InputError, PeerError

ANSWER_S = 120.0
CONNECT_S = 20.0
PATIENCE_S = 300.0  # for one request with all its waits
TRIES = 8
AT_ONCE = 8  # connections
_NOT_NOW = (429, 503)
_MOST_BYTES = 1 << 26  # of an answer
_PATIENCE = Retry(total=TRIES - 1, backoff_factor=0.5, backoff_max=30, backoff_jitter=0.5)


class Answer(NamedTuple):
    status: int
    body: bytes
    wait: float  # seconds that the server asks for; 0: it names none


class Poster:
    """Posts to one URL, from several threads at once. `on_wait` hears why a request waits."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        answer_s: float = ANSWER_S,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._url, self._headers, self._answer_s, self._on_wait = url, headers, answer_s, on_wait
        self._pool = _pool(_parsed(url))
        self._reached = False

    def post(self, body: bytes) -> Answer:
        """Return the answer, whatever its status; the last one of a server that does not get
        ready. PeerError when there is none.
        """
        again, until = _PATIENCE, time.monotonic() + PATIENCE_S
        while True:
            answer: Answer | None = None
            try:
                answer = self._posted(body)
                if answer.status not in _NOT_NOW:
                    return answer
                why, wait = f"the endpoint answered {answer.status}", answer.wait
            except (HTTPError, ValueError) as exc:
                # An address that has never answered is taken for a wrong one.
                if not self._reached or not _did_nothing(exc):
                    raise PeerError(f"cannot reach {self._url}: {_reason(exc)}") from None
                why, wait = "the endpoint does not accept requests", 0.0
            try:
                again = again.increment("POST", self._url)
            except MaxRetryError:
                return _or_fail(answer, f"{self._url} broke {TRIES} connections one after another")
            wait = wait or again.get_backoff_time()
            if time.monotonic() + wait > until:
                return _or_fail(answer, f"{self._url} has not been ready for {PATIENCE_S:.0f} s")
            self._on_wait(f"waiting {wait:.0f} s, {why}")
            time.sleep(wait)

    def close(self) -> None:
        """End the connections that are not in use."""
        self._pool.clear()

    def _posted(self, body: bytes) -> Answer:
        response = self._pool.urlopen(
            "POST",
            self._url,
            body=body,
            headers=self._headers,
            retries=False,
            redirect=False,
            preload_content=False,
            timeout=Timeout(connect=CONNECT_S, read=self._answer_s),
        )
        self._reached = True
        data, until = b"", time.monotonic() + self._answer_s
        try:
            while more := response.read1(1 << 16):
                data += more
                if len(data) > _MOST_BYTES:
                    raise PeerError(f"{self._url} answered with more than {_MOST_BYTES} bytes")
                if time.monotonic() > until:
                    raise PeerError(f"{self._url} has not answered for {self._answer_s:.0f} s")
        except HTTPError as exc:
            raise PeerError(f"{self._url} broke off its answer: {_reason(exc)}") from None
        finally:
            response.close()
        return Answer(response.status, data, _asked(response))


def _or_fail(answer: Answer | None, message: str) -> Answer:
    if answer is None:
        raise PeerError(message)
    return answer


def _did_nothing(exc: Exception) -> bool:
    """Return whether the server cannot have begun with a request, or has dropped it."""
    if isinstance(exc, ProxyError):
        exc = exc.original_error
    return isinstance(exc, ConnectTimeoutError | ProtocolError)


def _reason(exc: Exception) -> str:
    """Return what went wrong, without addresses of objects in memory."""
    while isinstance(exc, ProxyError | ProtocolError):
        inner = exc.args[-1]
        if not isinstance(inner, Exception):
            break
        exc = inner
    return str(exc).rpartition(">: ")[2] or type(exc).__name__


def _asked(response: urllib3.BaseHTTPResponse) -> float:
    try:
        return _PATIENCE.get_retry_after(response) or 0.0
    except (InvalidHeader, ValueError, OverflowError, TypeError):
        return 0.0  # no time that can be waited for


def _parsed(url: str) -> Url:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"an endpoint is http://... or https://..., not {url!r}")
    try:
        parsed = parse_url(url)
    except LocationParseError:
        raise InputError(f"an endpoint is http://HOST:PORT/..., not {url!r}") from None
    if not parsed.host:
        raise InputError(f"an endpoint is http://HOST:PORT/..., not {url!r}")
    if parsed.auth:
        raise InputError("an endpoint's address, which is printed, holds no login; leave it out")
    return parsed


def _pool(url: Url) -> urllib3.PoolManager:
    proxy = _proxy_of(url)
    if proxy is None:
        return urllib3.PoolManager(maxsize=AT_ONCE)
    try:
        parsed = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        user = make_headers(proxy_basic_auth=unquote(parsed.auth)) if parsed.auth else None
        return urllib3.ProxyManager(
            parsed._replace(auth=None).url, proxy_headers=user, maxsize=AT_ONCE
        )
    except (LocationParseError, ProxySchemeUnknown):
        raise InputError(
            f"the proxy of {url.scheme} addresses in the environment is none of HTTP; unset "
            f"{url.scheme}_proxy, or name the endpoint's host in no_proxy"
        ) from None


def _proxy_of(url: Url) -> str | None:
    """Return the environment's proxy for a URL, None where it is reached without."""
    host = (url.host or "").strip("[]")
    if _is_loopback(host):
        return None
    where = host if url.port is None else f"{host}:{url.port}"
    if urllib.request.proxy_bypass(where):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme or "") or proxies.get("all")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
