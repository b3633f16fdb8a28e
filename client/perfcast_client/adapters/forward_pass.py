"""The forward-pass performance model of the ecosystem, answered by a server (spec/07 section 4, spec/04 section 11)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from perfcast_client import calibration, calls, planner
from perfcast_client.adapters import fpm
from perfcast_client.adapters.asking import Adapter, C, PerfDataNotAvailable, as_value_error, asking, build
from perfcast_client.adapters.records import engine_of, options_of
from perfcast_client.calibration import Diagnosis, LearningOptions
from perfcast_client.errors import NotReady, PerfcastError
from perfcast_client.record import EngineLike
from perfcast_client.turns import Steps

UNAVAILABLE = (
    "UNKNOWN_MODEL", "UNKNOWN_SYSTEM", "UNKNOWN_VERSION", "PERF_DATA_MISSING", "UNSUPPORTED", "DATA_CORRUPT",
    "INVALID_FIELD",  # such as widths that do not divide the heads; what is no configuration at all is not asked
)  # fmt: skip


class ForwardPassPerfModel(Adapter[C]):
    """How long an iteration takes, and learning from observed ones. Make it by one of the three constructors.

    What it learns, the server keeps as the calibration state ``state`` (its own one unless named): the server needs
    --state-dir as soon as something is tuned. A ``tune_with_fpms`` that fails leaves nothing of that call learned.
    Malformed input raises ValueError, missing data PerfDataNotAvailable, anything else RuntimeError.
    """

    def __init__(
        self, client: C, engine: EngineLike | None, options: LearningOptions, state: str, warning: str | None
    ) -> None:
        super().__init__(client)
        self.engine = engine
        self.options = options
        self.state = state or f"fpm/{secrets.token_hex(8)}"
        self.last_warning = warning
        self.state_version = 0
        self._client_id = secrets.token_hex(16)
        self._sequence = 0
        self._named = bool(state)

    @classmethod
    def from_native(
        cls,
        client: C,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        state: str = "",
        profile: str = "corrected",
    ) -> Any:
        """The engine of a configuration record; fails where it cannot be built."""
        return cls._made(client, config, options, state, profile, fallback=False)

    @classmethod
    def best_available(
        cls,
        client: C,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        state: str = "",
        profile: str = "corrected",
    ) -> Any:
        """As ``from_native``; a regression with a warning where model, system, version or data are not available, or
        the model cannot be split as told."""
        return cls._made(client, config, options, state, profile, fallback=True)

    @classmethod
    def from_regression(cls, client: C, options: Mapping[str, Any] | None = None, *, state: str = "") -> Any:
        """Learns from observations alone."""
        return build(cls(client, None, options_of(options), state, None), cls._checked)

    @classmethod
    def _made(
        cls,
        client: C,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None,
        state: str,
        profile: str,
        fallback: bool,
    ) -> Any:
        def made(model: ForwardPassPerfModel[C]) -> Steps[None]:
            yield from model.making(config, profile, fallback)

        with suppress(PerfDataNotAvailable):
            engine_of(config)
        return build(cls(client, None, options_of(options), state, None), made)

    def making(self, config: Mapping[str, Any] | None, profile: str, fallback: bool) -> Steps[None]:
        """Make sure of options and engine. ``config`` None is a regression; with ``fallback``, so is what misses."""
        yield from self._checked()
        if config is None:
            return
        try:
            self.engine = yield calls.resolve(engine_of(config, profile=profile))
        except PerfDataNotAvailable as error:
            if not fallback:
                raise
            self.last_warning = str(error)
        except PerfcastError as error:
            if not fallback or error.reason not in UNAVAILABLE:
                raise as_value_error(error) from None
            self.last_warning = error.message

    def _checked(self) -> Steps[None]:
        """Refuse options that no state could be made with."""
        options = self.options
        side = round(options.bucket_count**0.5)
        slower, faster = options.max_slower_correction_factor, options.min_faster_correction_factor
        if options.min_observations > options.max_observations:
            raise ValueError("min_observations exceeds max_observations")
        if side * side != options.bucket_count:
            raise ValueError("bucket_count must be a perfect square")
        if faster is not None and not 0 < faster <= 1:
            raise ValueError("min_faster_correction_factor must lie in (0, 1]")
        if slower is not None and not 1 <= slower < float("inf"):
            raise ValueError("max_slower_correction_factor must be finite and at least 1")
        return
        yield

    @property
    def _asked_state(self) -> str:
        return self.state if self._named or self.state_version else ""

    @asking
    def estimate_forward_pass_time_ms(self, metrics: Any) -> Steps[float | None]:
        """ms of one iteration, given as a record or the records of its ranks; None while a regression knows too little
        of such work."""
        ranks = fpm.iteration(metrics)
        if self.engine is None and not self._asked_state:
            return 0.0 if fpm.is_idle(ranks) else None
        try:
            told = yield planner.estimate_passes(self.engine, [ranks], self._asked_state)
        except NotReady:
            return None
        except PerfcastError as error:
            raise as_value_error(error) from None
        ms = float(told.latency_ms[0])
        return None if ms != ms else ms

    def tuning(self, iterations: Any) -> Steps[None]:
        """Learn from iterations in the order of time, each a list of ranks. One record, or a flat list of records, is
        one iteration."""
        flat = isinstance(iterations, Mapping) or not isinstance(iterations, list | tuple)
        if not flat and iterations and not isinstance(iterations[0], list | tuple):
            flat = True
        batch = [fpm.iteration(each) for each in ([iterations] if flat else iterations)]
        self._sequence += 1
        call = calibration.tune(
            self.engine,
            self.state,
            batch,
            client_id=self._client_id,
            sequence=self._sequence,
            options=None if self.state_version else self.options,
        )
        try:
            told = yield call
        except PerfcastError as error:
            raise as_value_error(error) from None
        self.state_version = told.state_version

    def diagnosing(self) -> Steps[dict[str, Any]]:
        """source, readiness, retained_observations, correction_ready_buckets, last_warning."""
        told = yield from self._diagnosis()
        if told is None:
            source, readiness = ("aic", "ready") if self.engine else ("fallback_regression", "insufficient_data")
            retained = ready = 0
        else:
            source, readiness = told.source, told.readiness
            retained, ready = told.retained_observations, told.correction_ready_buckets
        if self.last_warning and readiness == "insufficient_data":
            readiness = "unsupported_config"
        return {
            "source": source,
            "readiness": readiness,
            "retained_observations": retained,
            "correction_ready_buckets": ready,
            "last_warning": self.last_warning,
        }

    tune_with_fpms = asking(tuning)
    diagnostics = asking(diagnosing)

    @asking
    def get_min_correction_factor(self) -> Steps[float | None]:
        told = yield from self._diagnosis()
        return None if told is None else told.min_correction_factor

    @asking
    def get_max_correction_factor(self) -> Steps[float | None]:
        told = yield from self._diagnosis()
        return None if told is None else told.max_correction_factor

    @asking
    def get_avg_correction_factor(self) -> Steps[float | None]:
        told = yield from self._diagnosis()
        return None if told is None else told.avg_correction_factor

    def close(self) -> None:
        """Nothing to let go of: the client stays the caller's."""

    def _diagnosis(self) -> Steps[Diagnosis | None]:
        if not self._asked_state:
            return None
        try:
            told: Diagnosis = yield calibration.diagnose(self.engine, self.state)
        except PerfcastError as error:
            if error.reason == "UNKNOWN_STATE":
                return None
            raise as_value_error(error) from None
        return told
