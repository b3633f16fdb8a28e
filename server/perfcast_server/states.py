"""Calibration states, durable: what was acknowledged survives a crash of the process or the machine."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError
from perfcast.v1.calibration_pb2 import CalibrationState
from perfcast_engine.errors import EngineError
from perfcast_engine.step import StepModel
from perfcast_planning.planner.pass_model import PassModel

from perfcast_server.cache import Lru
from perfcast_server.errors import ServiceError, invalid
from perfcast_server.learned import model_of
from perfcast_server.settings import SettingsError

FILE, SCHEMA = "calibration.sqlite3", 1
OPEN_S, BUSY_S = 10.0, 2.0  # that another process may hold the store, before it is opened and before it is used
MODELS_KEPT = 256
NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
T = TypeVar("T")
Change = tuple[CalibrationState | None, PassModel | None, T]
Key = tuple[str, str]  # engine handle, "" for a regression; name


class States:
    """All states of one folder; several processes may share it. Blocking, safe to use from any thread."""

    def __init__(self, folder: str, max_states: int) -> None:
        self._folder = folder
        self._max_states = max_states
        self._lock = threading.Lock()
        self._models: Lru[Key, tuple[int, PassModel]] = Lru(MODELS_KEPT)
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Make folder and file where they do not exist; nothing without a folder. Raises SettingsError."""
        if not self._folder:
            return
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(
                Path(self._folder) / FILE, timeout=OPEN_S, isolation_level=None, check_same_thread=False
            )
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            if schema not in (0, SCHEMA):
                raise SettingsError(f"state_dir: {FILE} is of schema {schema}; this build knows {SCHEMA}")
            database.execute(
                "CREATE TABLE IF NOT EXISTS state (engine TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, "
                "body BLOB NOT NULL, PRIMARY KEY (engine, name)) WITHOUT ROWID"
            )
            database.execute(f"PRAGMA user_version={SCHEMA}")
            database.execute(f"PRAGMA busy_timeout={BUSY_S * 1000:.0f}")
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"state_dir: cannot keep states in {self._folder}: {error}") from None
        self._database = database

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def read(self, key: Key) -> CalibrationState:
        """A state as it is kept; NOT_FOUND where there is none."""
        with self._lock:
            state = self._find(self._on(), key)
        if state is None:
            raise unknown(key[1])
        return state

    def require_on(self) -> None:
        """CALIBRATION_OFF without a folder."""
        self._on()

    def forget_models(self, is_ready: Callable[[str], bool]) -> None:
        """Keep no engines for the sake of their models that are not ready (handles) by themselves."""
        with self._lock:
            for key in self._models:
                if key[0] and not is_ready(key[0]):
                    self._models.pop(key)

    def known(self, key: Key) -> PassModel | None:
        """The model of a state if it is at hand."""
        with self._lock:
            found = self._models.get(key)
        return None if found is None else found[1]

    def model(self, key: Key, steps: StepModel | None) -> tuple[int, PassModel]:
        """Version and model of a state, to be read only; version 0 and nothing learned where there is none."""
        check_name(key[1])
        with self._lock:
            database = self._on()
            row = _guarded(
                lambda: database.execute("SELECT version FROM state WHERE engine=? AND name=?", key).fetchone()
            )
            if row is None:
                return 0, PassModel(steps=steps)
            found = self._models.get(key)
            if found is None or found[0] != row[0] or found[1].steps is not steps:
                state = self._find(database, key)
                assert state is not None, "states are never deleted"
                found = state.version, _restored(state, steps)
                self._models.put(key, found)
            return found

    def change(
        self,
        key: Key,
        steps: StepModel | None,
        work: Callable[[CalibrationState | None, PassModel | None], Change[T]],
    ) -> T:
        """Give state and model to ``work`` and keep what it returns, durably, before returning the rest; nothing is
        kept where it raises or returns no state. No other change comes between."""
        check_name(key[1])
        with self._lock:
            database = self._on()
            _guarded(lambda: database.execute("BEGIN IMMEDIATE"))
            try:
                state = self._find(database, key)
                model = None
                if state is not None:
                    kept = self._models.get(key)
                    usable = kept is not None and kept[0] == state.version and kept[1].steps is steps
                    model = kept[1] if kept is not None and usable else _restored(state, steps)
                new, learned, answer = work(state, model)
                if new is not None:
                    self._write(database, key, new)
                _guarded(lambda: database.execute("COMMIT"))
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise
            if new is not None and learned is not None:
                self._models.put(key, (new.version, learned))
            return answer

    def _on(self) -> sqlite3.Connection:
        if self._database is None:
            why = "this server keeps no calibration states; start it with --state-dir"
            raise ServiceError("CALIBRATION_OFF", why, flag="--state-dir")
        return self._database

    def _find(self, database: sqlite3.Connection, key: Key) -> CalibrationState | None:
        row = _guarded(lambda: database.execute("SELECT body FROM state WHERE engine=? AND name=?", key).fetchone())
        if row is None:
            return None
        try:
            return CalibrationState.FromString(row[0])
        except DecodeError:
            raise ServiceError("DATA_CORRUPT", f"calibration state {key[1]!r} is damaged", name=key[1]) from None

    def _write(self, database: sqlite3.Connection, key: Key, state: CalibrationState) -> None:
        (others,) = _guarded(
            lambda: database.execute("SELECT count(*) FROM state WHERE NOT (engine=? AND name=?)", key).fetchone()
        )
        if others >= self._max_states:
            raise ServiceError("LIMIT", f"{others} calibration states are kept already", limit="max_states", retry="no")
        row = (*key, state.version, state.SerializeToString(deterministic=True))
        _guarded(lambda: database.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?)", row))


def unknown(name: str) -> ServiceError:
    return ServiceError("UNKNOWN_STATE", f"no calibration state {name!r} of this engine", kind="state", name=name)


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise invalid("state_name", 'must be 1 to 128 letters, digits and "._-/:"')


def _restored(state: CalibrationState, steps: StepModel | None) -> PassModel:
    try:
        return model_of(state, steps)
    except (EngineError, ServiceError) as error:
        raise ServiceError("DATA_CORRUPT", f"a kept calibration state is damaged: {error}") from None


def _guarded(work: Callable[[], T]) -> T:
    """Without sqlite's own words, which tell paths: a store that is busy, full or broken."""
    try:
        return work()
    except sqlite3.OperationalError:
        raise ServiceError("STATE_STORE", "the store of calibration states cannot be used now") from None
    except sqlite3.DatabaseError:
        raise ServiceError("DATA_CORRUPT", "the store of calibration states is damaged") from None
