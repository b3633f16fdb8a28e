"""Who calls, and how much of the server each may have: bearer tokens, client certificates, quotas."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfcast_server.cache import Lru
from perfcast_server.errors import ServiceError
from perfcast_server.settings import Settings, SettingsError
from perfcast_server.watched import Watched

log = logging.getLogger("perfcast.callers")

MAX_FILE_BYTES, MAX_TOKENS = 1 << 20, 10_000
MAX_CALLERS = 10_000  # whose use is remembered; the one not seen for longest begins anew
LINE = re.compile(r"(?P<name>[\w.@:/-]{1,64})[ \t]+(?P<token>[A-Za-z0-9._~+/=-]{16,512})(?P<admin>[ \t]+admin)?")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a call comes from. ``name`` is that of the token, else of the client's certificate, else the address."""

    name: str
    admin: bool = False


class Tokens:
    """The callers of a file with one ``name token [admin]`` a line; # begins a comment, a name may have several.

    Tokens are kept as keyed digests under a key of this process: how long a look-up takes says nothing about them.
    """

    def __init__(self, path: str) -> None:
        self._key = secrets.token_bytes(32)
        self._file = Watched((path,), "tokens", self._read)

    def refresh(self) -> None:
        """Read the file again if it has changed; what is wrong with it is logged, and the old tokens stay."""
        self._file.refresh()

    def caller(self, token: str) -> Caller | None:
        digest = self._digest(token)
        known: tuple[bytes, Caller] | None = self._file.value.get(digest)
        return known[1] if known is not None and hmac.compare_digest(known[0], digest) else None

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(), "sha256")

    def _read(self, path: str) -> Mapping[bytes, tuple[bytes, Caller]]:
        data = Path(path).read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise SettingsError(f"token_file has more than {MAX_FILE_BYTES} bytes")
        found: dict[bytes, tuple[bytes, Caller]] = {}
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            match = LINE.fullmatch(text)
            if match is None:
                raise SettingsError(f"token_file, line {number}: is not NAME TOKEN [admin] with 16 characters or more")
            digest = self._digest(match["token"])
            found[digest] = digest, Caller(match["name"], match["admin"] is not None)
        if not 0 < len(found) <= MAX_TOKENS:
            raise SettingsError(f"token_file holds {len(found)} tokens; it needs 1 to {MAX_TOKENS}")
        return found


@dataclass(slots=True)
class _Use:
    """What one caller has left and has in work."""

    left: float
    at: float
    in_work: int = 0


@dataclass(slots=True)
class Quotas:
    """A bucket of ``burst`` calls that fills at ``per_s``, and at most ``at_once`` in work; 0 is no bound."""

    per_s: float = 0.0
    burst: float = 0.0
    at_once: int = 0
    clock: Callable[[], float] = time.monotonic
    _uses: Lru[str, _Use] = field(init=False, default_factory=lambda: Lru(MAX_CALLERS))

    def take(self, caller: Caller) -> None:
        """One call; refused with the time after which the next one will do."""
        if self.per_s and (wait := self.owed_s(caller)) > 0:
            use = self._uses.get(caller.name)
            assert use is not None
            use.left += 1  # a refused call is not counted
            raise ServiceError(
                "LIMIT",
                f"more than {self.per_s:g} calls per second of one caller",
                wait,
                limit="caller_requests_per_s",
            )

    def owed_s(self, caller: Caller) -> float:
        """One call, whatever is left: how long to wait until it is paid for."""
        if not self.per_s:
            return 0.0
        use, now = self._use(caller), self.clock()
        most = self.burst or max(1.0, self.per_s)
        use.left = min(most, use.left + max(0.0, now - use.at) * self.per_s) - 1
        use.at = now
        return max(0.0, -use.left / self.per_s)

    @contextmanager
    def work(self, caller: Caller) -> Iterator[None]:
        """Count one call or stream in work."""
        use = self._use(caller)
        if self.at_once and use.in_work >= self.at_once:
            raise ServiceError(
                "LIMIT", f"{use.in_work} calls of this caller are in work already", limit="caller_concurrency"
            )
        use.in_work += 1
        try:
            yield
        finally:
            use.in_work -= 1

    def _use(self, caller: Caller) -> _Use:
        use = self._uses.get(caller.name)
        if use is None:
            use = _Use(self.burst or max(1.0, self.per_s), self.clock())
            self._uses.put(caller.name, use)
        return use


class Gate:
    """Lets calls in: knows their caller, and keeps each to its quotas."""

    def __init__(self, settings: Settings) -> None:
        self.quotas = Quotas(settings.caller_requests_per_s, settings.caller_burst, settings.caller_concurrency)
        self.tokens = Tokens(settings.token_file) if settings.token_file else None
        self._by_certificate = bool(settings.tls_client_ca)

    def caller(self, context: Any) -> Caller:
        """Raises UNAUTHENTICATED."""
        if self.tokens is not None:
            given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
            scheme, _, token = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
            known = self.tokens.caller(token) if scheme.lower() == "bearer" else None
            if known is None:
                why = "is not known" if given else "is missing"
                raise ServiceError("UNAUTHENTICATED", f"the bearer token in the metadata authorization {why}")
            return known
        if self._by_certificate:
            names = context.auth_context().get("x509_common_name") or [b"certificate"]
            return Caller(names[0].decode(errors="replace")[:64])
        return Caller(_host(context.peer()))


def gate(settings: Settings) -> Gate | None:
    """None where everybody may do everything, so that no call is asked who it comes from."""
    bounded = settings.caller_requests_per_s or settings.caller_concurrency
    return Gate(settings) if bounded or settings.token_file else None


def _host(peer: str) -> str:
    """Of "ipv4:127.0.0.1:5000", "ipv6:[::1]:5000" or "unix:"."""
    kind, _, place = peer.partition(":")
    return place.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
