"""How the server is run: flags over environment over file, in one frozen record."""

from __future__ import annotations

import ipaddress
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

ENV_PREFIX = "PERFCAST_"


class SettingsError(ValueError):
    """A setting is unknown or malformed; says where it came from."""


class NotReady(RuntimeError):
    """No engine at all could be opened and probed."""


def address(host: str, port: int) -> str:
    """As clients spell it, for names and for addresses of both families."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def child_environment() -> dict[str, str]:
    """For another interpreter that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every knob of ``perfcast serve``. The command line, the environment and the file all know these names."""

    host: str = _setting("127.0.0.1", "address to listen on; empty for none (with --unix-socket)")
    port: int = _setting(50051, "TCP port; 0 picks a free one")
    unix_socket: str = _setting("", "path of a Unix socket to listen on as well")
    metrics_host: str = _setting("127.0.0.1", "address of the metrics endpoint")
    metrics_port: int = _setting(9464, "HTTP port of the Prometheus metrics; 0 picks a free one, -1 is off")
    tls_cert: str = _setting("", "PEM certificate chain of the server; it and the other files may change at any time")
    tls_key: str = _setting("", "PEM key of that certificate")
    tls_client_ca: str = _setting("", "PEM roots that a client's certificate must come from; empty asks for none")
    insecure_anywhere: bool = _setting(False, "without TLS, listen on other addresses than loopback too")
    admin: bool = _setting(False, "serve perfcast.v1.Admin to callers whose token is marked admin")
    token_file: str = _setting("", "callers, one 'NAME TOKEN [admin]' a line; every call needs a bearer token then")
    caller_requests_per_s: float = _setting(0.0, "calls per second of one caller in one process; 0 is no bound")
    caller_burst: float = _setting(0.0, "calls that a quiet caller may make at once; 0 is those of one second")
    caller_concurrency: int = _setting(0, "calls and streams of one caller in work in one process; 0 is no bound")
    data: tuple[str, ...] = _setting((), "roots with measured packs, searched before the shipped ones")
    state_dir: str = _setting("", "folder that calibration states are kept in; empty turns calibration off")
    max_states: int = _setting(1024, "calibration states kept; no more can be made")
    workers: int = _setting(1, "processes that share the port; each has caches and limits of its own")
    threads: int = _setting(0, "threads of a process for each kind of heavy work; 0 means one per core, at least 2")
    max_concurrent_requests: int = _setting(256, "requests in work or waiting; more are refused at once")
    max_request_bytes_in_work: int = _setting(256 << 20, "bytes of requests in work or waiting")
    max_wait_s: float = _setting(0.15, "time that a burst may wait for a thread; more is refused at once")
    max_streams: int = _setting(64, "step streams open at once; more are refused at once")
    search_workers: int = _setting(
        0, "search processes beside each worker, started when needed; 0 shares half the cores"
    )
    max_search_s: float = _setting(300.0, "time that one search may take")
    max_connections: int = _setting(1024, "connections; more are not accepted")
    max_searches: int = _setting(8, "searches in work or waiting; more are refused at once")
    max_points_per_request: int = _setting(1_000_000, "points of one request; each sample of a trajectory is one")
    inline_points: int = _setting(256, "requests up to this size on a loaded engine skip the thread pool")
    max_message_bytes: int = _setting(16 << 20, "largest message, both ways")
    max_config_json_bytes: int = _setting(1 << 20, "largest inline config.json")
    response_cache_bytes: int = _setting(64 << 20, "bound of the cache of serialised answers; 0 is off")
    max_engines: int = _setting(128, "engines kept ready; the least recently used leaves first")
    max_engine_bytes: int = _setting(
        1 << 30, "engines kept ready with the data behind them; more make room by themselves"
    )
    max_surface_bytes: int = _setting(256 << 20, "bound of the cache of compiled surfaces")
    max_handles: int = _setting(4096, "configurations remembered by handle")
    drain_delay_s: float = _setting(0.0, "seconds between NOT_SERVING and refusing new calls on SIGTERM")
    drain_grace_s: float = _setting(30.0, "seconds that work in flight may still take on SIGTERM")
    max_connection_age_s: float = _setting(300.0, "age at which a connection is asked to reconnect")
    min_ping_interval_s: float = _setting(10.0, "least time between keepalive pings of a client")
    reflection: bool = _setting(True, "serve gRPC reflection")
    tracing: bool = _setting(False, "send a span of every call over OTLP; where to is said by the OTEL_* variables")
    log_level: str = _setting("info", "debug, info, warning or error")
    log_format: str = _setting("json", "json, or text for people")

    def __post_init__(self) -> None:
        if not self.host and not self.unix_socket:
            raise SettingsError("neither host nor unix_socket to listen on")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"log_level: {self.log_level!r} is not one of debug, info, warning, error")
        if self.log_format not in ("json", "text"):
            raise SettingsError(f"log_format: {self.log_format!r} is not one of json, text")
        for item in fields(self):
            value = getattr(self, item.name)
            counted = item.name.startswith("max_") and isinstance(value, int)
            least = -1 if item.name == "metrics_port" else int(counted)
            if isinstance(value, int | float) and not value >= least:
                raise SettingsError(f"{item.name}: {value} is less than {least}")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise SettingsError("tls_cert and tls_key are needed together, and by tls_client_ca")
        if self.admin and not self.token_file:
            raise SettingsError("admin: needs a token file that says who may (--token-file)")
        if self.workers < 1:
            raise SettingsError(f"workers: {self.workers} is less than 1")
        if self.workers > 1 and (self.unix_socket or not self.host):
            raise SettingsError("workers: several can share a TCP port, not a Unix socket")
        if max(self.port, self.metrics_port) > 65535:
            raise SettingsError("a port is larger than 65535")


def require_guarded(settings: Settings) -> None:
    """Refuse to be open to a network by accident."""
    if settings.tls_cert or settings.insecure_anywhere or not settings.host or is_loopback(settings.host):
        return
    raise SettingsError(
        f"host: {settings.host} is not loopback and there is no TLS; give tls_cert and tls_key, or insecure_anywhere"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: str | None = None) -> Settings:
    """Settings from ``flags`` (None means not given), else PERFCAST_* variables, else a TOML or YAML ``file``."""
    known = {item.name: item for item in fields(Settings)}
    values: dict[str, Any] = {}
    if file is not None:
        for name, value in _read(Path(file)).items():
            key = name.replace("-", "_")
            if key not in known:
                raise SettingsError(f"{file}: unknown setting {name!r}; known are {', '.join(known)}")
            values[key] = _parsed(known[key], value, file)
    for key, item in known.items():
        if (text := environment.get(ENV_PREFIX + key.upper())) is not None:
            values[key] = _parsed(item, text, ENV_PREFIX + key.upper())
    values.update({key: value for key, value in flags.items() if value is not None})
    return Settings(**values)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"cannot read {path}: it is no text in UTF-8") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            values = yaml.safe_load(text)
        else:
            values = tomllib.loads(text)
    except Exception as error:
        raise SettingsError(f"{path} is not well-formed: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise SettingsError(f"{path} does not hold a mapping of settings")
    return values


TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _parsed(item: Field[Any], value: Any, where: str) -> Any:
    """``value`` as the type of the setting's default; text is parsed, anything else must be of that type."""
    kind: Any = type(item.default)
    if kind is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(part.strip() for part in parts if part.strip())
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
    elif isinstance(value, str) or (kind is float and isinstance(value, int)) or type(value) is kind:
        try:
            return kind(value)
        except ValueError:
            pass
    raise SettingsError(f"{where}: {item.name} = {value!r} is not of type {kind.__name__}")
