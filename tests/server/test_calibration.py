"""Calibration states: learned, versioned, idempotent, carried away and back, kept over a restart."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from perfcast.v1 import calibration_pb2
from perfcast_client import Client, EngineConfig, calibration, errors, planner
from perfcast_client.calibration import LearningOptions
from perfcast_client.planner_types import Limits, RankPass
from perfcast_server.settings import SettingsError

from tests.server.running import PATIENCE_S, Running, eventually, running

A = EngineConfig(model="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", tp=4)
DECODE = RankPass(decode_requests=40, decode_kv_tokens=120_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def learning(folder: Path) -> Iterator[Running]:
    with running(state_dir=str(folder), max_states=40) as server:
        yield server


@pytest.fixture(scope="module")
def client(learning: Running) -> Iterator[Client]:
    with Client(learning.address) as client:
        yield client


def measured(work: RankPass, ms: float, times: int = 1) -> list[list[RankPass]]:
    return [[dataclasses.replace(work, wall_time_s=ms / 1000)]] * times


def native_ms(client: Client, work: RankPass, state: str = "") -> float:
    return float(client.ask(planner.estimate_passes(A, [[work]], state)).latency_ms[0])


def samples(exported: bytes) -> list[bytes]:
    state = calibration_pb2.CalibrationState.FromString(exported)
    return [part.SerializeToString(deterministic=True) for part in (state.prefill, state.decode, state.mixed)]


def test_estimates_follow_what_was_observed_and_echo_the_version(client: Client) -> None:
    native = native_ms(client, DECODE)
    assert client.ask(planner.estimate_passes(A, [[DECODE]], "follow")).state_version == 0
    told = client.ask(calibration.tune(A, "follow", measured(DECODE, native * 1.5, 20), client_id="c", sequence=1))
    assert (told.state_version, told.kept_iterations) == (1, 20)
    estimate = client.ask(planner.estimate_passes(A, [[DECODE]], "follow"))
    assert estimate.state_version == 1
    assert estimate.latency_ms[0] == pytest.approx(native * 1.5, rel=1e-12)
    found = client.ask(planner.capacity(A, isl=3000, osl=150, role="decode", state="follow"))
    assert found is not None and found.state_version == 1
    shown = client.ask(calibration.diagnose(A, "follow"))
    assert (shown.source, shown.readiness, shown.retained_observations) == ("aic_with_correction", "ready", 20)
    assert shown.avg_correction_factor == pytest.approx(1.5, rel=1e-12)
    kinds = {kind.kind: kind for kind in shown.kinds}
    assert kinds["decode"].no_signal_reason == "" and kinds["decode"].correction_factors == (pytest.approx(1.5),)
    assert "nothing" in kinds["prefill"].no_signal_reason
    assert shown.options == LearningOptions()


def test_first_samples_are_held_to_fifteen_percent(client: Client) -> None:
    native, before = native_ms(client, DECODE), client.ask(planner.capacity(A, isl=3000, osl=150, itl_s=0.02))
    assert before is not None
    for sequence in range(1, 10):
        call = calibration.tune(A, "cold", measured(DECODE, native * 3), client_id="c", sequence=sequence)
        client.ask(call)
        assert native_ms(client, DECODE, "cold") <= native * 1.15 * (1 + 1e-12)
        after = client.ask(planner.capacity(A, isl=3000, osl=150, itl_s=0.02, state="cold"))
        assert after is not None and before.rps / 1.15 <= after.rps <= before.rps * 1.15
    shown = client.ask(calibration.diagnose(A, "cold"))
    assert [kind.cold for kind in shown.kinds] == [False, True, False]
    client.ask(calibration.tune(A, "cold", measured(DECODE, native * 3), client_id="c", sequence=10))
    assert native_ms(client, DECODE, "cold") == pytest.approx(native * 2, rel=1e-12)


def test_first_samples_of_other_work_leave_alone_what_was_learned_long_ago(client: Client) -> None:
    decodes = [RankPass(decode_requests=batch, decode_kv_tokens=batch * 3075) for batch in range(5, 512, 6)]
    learned = [iteration for work in decodes for iteration in measured(work, native_ms(client, work) * 1.6)]
    asked = planner.capacity(A, isl=3000, osl=150, role="decode", state="warm")
    native = client.ask(asked)
    client.ask(calibration.tune(A, "warm", learned, client_id="c", sequence=1))
    before = client.ask(asked)
    assert native is not None and before is not None and before.rps == pytest.approx(native.rps / 1.6)
    client.ask(calibration.tune(A, "warm", measured(RankPass(1, 500), 20.0), client_id="c", sequence=2))
    after = client.ask(asked)
    assert after is not None and (after.rps, after.corrections_held_back) == (before.rps, False)
    prompts = [RankPass(1, tokens, 0, 40, 120_000) for tokens in range(100, 8000, 1000)]
    mixed = [iteration for work in prompts for iteration in measured(work, native_ms(client, work) * 1.9)]
    both = planner.capacity(A, isl=3000, osl=150, state="warm")
    before = client.ask(both)
    client.ask(calibration.tune(A, "warm", mixed, client_id="c", sequence=3))
    after = client.ask(both)
    assert before is not None and after is not None and before.rps / 1.15 <= after.rps <= before.rps * 1.15


def test_first_samples_take_no_capacity_away(client: Client) -> None:
    one = RankPass(decode_requests=1, decode_kv_tokens=3075)
    native = native_ms(client, one)
    asked = planner.capacity(
        A, isl=3000, osl=150, role="decode", itl_s=native * 1.01 / 1000, on_infeasible="none", state="taken",
        limits=Limits(max_num_seqs=1),
    )  # fmt: skip
    before = client.ask(asked)
    assert before is not None and before.eligible
    client.ask(calibration.tune(A, "taken", measured(one, native * 2, 6), client_id="c", sequence=1))
    assert client.ask(asked) == dataclasses.replace(before, corrections_held_back=True, state_version=1)
    client.ask(calibration.tune(A, "taken", measured(one, native * 2, 6), client_id="c", sequence=2))
    assert client.ask(asked) is None


def test_a_repeated_sequence_is_answered_and_not_learned(client: Client) -> None:
    call = calibration.tune(A, "again", measured(DECODE, 30, 3), client_id="c", sequence=5)
    assert client.ask(call) == client.ask(call) == calibration.Tuned(1, 3)
    assert client.ask(calibration.diagnose(A, "again")).retained_observations == 3
    other = calibration.tune(A, "again", measured(DECODE, 31), client_id="c", sequence=5)
    behind = calibration.tune(A, "again", measured(DECODE, 30), client_id="c", sequence=4)
    for bad in (other, behind):
        with pytest.raises(errors.StateConflict) as caught:
            client.ask(bad)
        assert caught.value.reason == "STATE_CONFLICT" and caught.value.code == "ABORTED"
    from_another = calibration.tune(A, "again", measured(DECODE, 30), client_id="d", sequence=1)
    assert client.ask(from_another).state_version == 2
    assert client.ask(call) == calibration.Tuned(1, 3)


def test_a_stale_version_is_refused_and_says_the_one_that_is(client: Client) -> None:
    def tune(sequence: int, expected: int) -> calibration.Tuned:
        call = calibration.tune(
            A, "stale", measured(DECODE, 30), client_id="c", sequence=sequence, expected_version=expected
        )
        return client.ask(call)

    assert tune(1, 0).state_version == 1
    for wrong in (0, 2):
        with pytest.raises(errors.StateConflict) as caught:
            tune(2, wrong)
        assert caught.value.details["version"] == "1"
    assert tune(2, 1).state_version == 2
    assert tune(2, 1).state_version == 2, "a retry of an applied call is no conflict"


def test_a_call_is_learned_whole_or_not_at_all(client: Client) -> None:
    bad = [*measured(DECODE, 30), [RankPass(0, 7, wall_time_s=0.1)]]
    with pytest.raises(errors.InvalidRequest):
        client.ask(calibration.tune(A, "whole", bad, client_id="c", sequence=1))
    with pytest.raises(errors.NotFound) as caught:
        client.ask(calibration.diagnose(A, "whole"))
    assert caught.value.reason == "UNKNOWN_STATE"


def test_a_call_teaches_only_so_much(client: Client) -> None:
    call = calibration.tune(A, "much", measured(DECODE, 30, 65_537), client_id="c", sequence=1)
    with pytest.raises(errors.LimitExceeded):
        client.ask(call)


def test_concurrent_callers_lose_nothing(client: Client) -> None:
    def tune(number: int) -> int:
        call = calibration.tune(A, "many", measured(DECODE, 30), client_id=f"c{number}", sequence=1)
        for _ in range(600):  # a busy machine turns callers away; one that comes again is served
            try:
                return client.ask(call).state_version
            except errors.LimitExceeded:
                time.sleep(0.1)
        raise AssertionError("was never let in")

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(tune, range(40)))
    assert sorted(versions) == list(range(1, 41))
    assert client.ask(calibration.diagnose(A, "many")).retained_observations == 40


def test_options_hold_for_the_life_of_a_state(client: Client) -> None:
    loose = LearningOptions(max_slower_correction_factor=None, cold_start_factor=None, min_observations=1)
    native = native_ms(client, DECODE)

    def tune(sequence: int, options: LearningOptions | None) -> int:
        call = calibration.tune(
            A, "loose", measured(DECODE, native * 7), client_id="c", sequence=sequence, options=options
        )
        return client.ask(call).state_version

    tune(1, loose)
    assert native_ms(client, DECODE, "loose") == pytest.approx(native * 7, rel=1e-12)
    assert client.ask(calibration.diagnose(A, "loose")).options == loose
    assert (tune(2, None), tune(3, loose)) == (2, 3)
    with pytest.raises(errors.InvalidRequest, match="options"):
        tune(4, LearningOptions())
    for bad in ({"bucket_count": 15}, {"min_observations": 65}, {"max_observations": 10**9}):
        call = calibration.tune(A, "bad", [], client_id="c", sequence=1, options=LearningOptions(**bad))
        with pytest.raises(errors.InvalidRequest):
            client.ask(call)


def test_a_regression_learns_without_an_engine(client: Client) -> None:
    prefill = [[RankPass(1, tokens, wall_time_s=(5 + tokens / 100) / 1000)] for tokens in range(100, 1100, 100)]
    with pytest.raises(errors.NotReady):
        client.ask(planner.capacity(None, isl=100, osl=10, role="prefill", state="line"))
    client.ask(calibration.tune(None, "line", prefill, client_id="c", sequence=1))
    told = client.ask(planner.estimate_passes(None, [[RankPass(1, 550)], [DECODE], [RankPass()]], "line"))
    assert told.engine is None and told.state_version == 1
    assert told.latency_ms[0] == pytest.approx(10.5) and told.latency_ms[2] == 0
    assert told.latency_ms[1] != told.latency_ms[1], "nothing was observed of decodes"
    found = client.ask(planner.capacity(None, isl=550, osl=10, role="prefill", state="line"))
    assert found is not None and found.rps > 1 / 0.0105
    shown = client.ask(calibration.diagnose(None, "line"))
    assert (shown.source, shown.readiness) == ("fallback_regression", "ready")
    assert shown.avg_correction_factor is None


def records(seed: int, count: int, shuffled: bool = False) -> list[list[RankPass]]:
    rng, order = random.Random(seed), random.Random(seed + 1)
    iterations = []
    for _ in range(count):
        ranks = []
        for rank in range(4):
            tokens, decodes = rng.choice([0, 500, 4000]), rng.choice([0, 5, 80])
            kv = decodes * rng.choice([100, 2000])
            ranks.append(RankPass(int(tokens > 0), tokens, 0, decodes, kv, rng.uniform(0.01, 0.3), rank))
        iterations.append(order.sample(ranks, 4) if shuffled else ranks)
    return iterations


PROCESS = """
import sys
from tests.server.running import running
from tests.server.test_calibration import A, records
from perfcast_client import Client, calibration
with running(state_dir=sys.argv[1]) as server, Client(server.address) as client:
    for engine in (A, None):
        client.ask(calibration.tune(engine, "s", records(1, 300), client_id="c", sequence=1))
        sys.stdout.write(client.ask(calibration.export_state(engine, "s")).hex() + "\\n")
"""


def test_the_same_records_leave_the_same_bytes_in_another_process(client: Client, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    for engine, theirs in zip((A, None), run.stdout.split(), strict=True):
        client.ask(calibration.tune(engine, "twin", records(1, 300), client_id="c", sequence=1))
        ours = client.ask(calibration.export_state(engine, "twin"))
        assert ours == bytes.fromhex(theirs)
        client.ask(calibration.tune(engine, "mixed-up", records(1, 300, True), client_id="c", sequence=1))
        assert samples(client.ask(calibration.export_state(engine, "mixed-up"))) == samples(ours)


def test_an_exported_state_goes_on_elsewhere_as_it_would_have_here(client: Client, tmp_path: Path) -> None:
    client.ask(calibration.tune(A, "here", records(2, 100), client_id="c", sequence=1))
    carried = client.ask(calibration.export_state(A, "here"))
    more = calibration.tune(A, "here", records(3, 50), client_id="c", sequence=2)
    client.ask(more)
    with running(state_dir=str(tmp_path)) as server, Client(server.address) as other:
        assert other.ask(calibration.import_state(A, "here", carried)) == 1
        assert other.ask(calibration.export_state(A, "here")) == carried
        repeated = calibration.tune(A, "here", records(2, 100), client_id="c", sequence=1)
        assert other.ask(repeated).state_version == 1, "the client's progress came along"
        other.ask(more)
        assert other.ask(calibration.export_state(A, "here")) == client.ask(calibration.export_state(A, "here"))


def test_an_import_over_a_state_needs_its_version_and_never_goes_back(client: Client) -> None:
    client.ask(calibration.tune(A, "over", measured(DECODE, 30), client_id="c", sequence=1))
    old = client.ask(calibration.export_state(A, "over"))
    client.ask(calibration.tune(A, "over", measured(DECODE, 40), client_id="c", sequence=2))
    for wrong in (None, 1):
        with pytest.raises(errors.StateConflict):
            client.ask(calibration.import_state(A, "over", old, expected_version=wrong))
    assert client.ask(calibration.import_state(A, "over", old, expected_version=2)) == 3
    assert samples(client.ask(calibration.export_state(A, "over"))) == samples(old)


def hostile() -> list[tuple[str, object]]:
    nan, huge = float("nan"), float("inf")
    return [
        ("format", lambda s: setattr(s, "format", 2)),
        ("version 0", lambda s: setattr(s, "version", 0)),
        ("version", lambda s: setattr(s, "version", 2**63)),
        ("another engine", lambda s: setattr(s, "engine_handle", "0" * 32)),
        ("options", lambda s: setattr(s.options, "bucket_count", 15)),
        ("memory", lambda s: setattr(s.options, "max_observations", 2**40)),
        ("ragged", lambda s: s.decode.features.append(1.0)),
        ("fraction", lambda s: s.decode.features.__setitem__(0, 1.5)),
        ("nan feature", lambda s: s.decode.features.__setitem__(0, nan)),
        ("infinite feature", lambda s: s.decode.features.__setitem__(0, huge)),
        ("nan value", lambda s: s.decode.values.__setitem__(0, nan)),
        ("zero value", lambda s: s.decode.values.__setitem__(0, 0.0)),
        ("beyond bounds", lambda s: s.decode.values.__setitem__(0, 5.0)),
        ("stray bounds", lambda s: s.decode.lower_seen.extend([1.0, 1.0])),
        ("too many", lambda s: (s.prefill.features.extend([1.0] * 65), s.prefill.values.extend([1.0] * 65))),
        ("client twice", lambda s: s.clients.append(s.clients[0])),
        ("client ahead", lambda s: setattr(s.clients[0], "state_version", 99)),
        ("digest", lambda s: setattr(s.clients[0], "digest", b"x")),
    ]


@pytest.mark.parametrize(("what", "spoil"), hostile())
def test_a_hostile_import_is_refused_and_changes_nothing(client: Client, what: str, spoil) -> None:
    state = calibration_pb2.CalibrationState.FromString(_exported(client))
    spoil(state)
    with pytest.raises(errors.InvalidRequest):
        client.ask(calibration.import_state(A, "hostile", state.SerializeToString()))
    with pytest.raises(errors.NotFound):
        client.ask(calibration.export_state(A, "hostile"))


def _exported(client: Client) -> bytes:
    client.ask(calibration.tune(A, "sound", measured(DECODE, 30, 6), client_id="c", sequence=1))
    return client.ask(calibration.export_state(A, "sound"))


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "../é", "a\nb"])
def test_names_are_checked(client: Client, name: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="state_name"):
        client.ask(calibration.tune(A, name, [], client_id="c", sequence=1))


def test_states_survive_a_restart_and_are_shared_by_processes(tmp_path: Path) -> None:
    with running(state_dir=str(tmp_path)) as first, Client(first.address) as one:
        one.ask(calibration.tune(A, "s", measured(DECODE, 11, 12), client_id="c", sequence=1))
        with running(state_dir=str(tmp_path)) as second, Client(second.address) as two:
            before = two.ask(planner.estimate_passes(A, [[DECODE]], "s"))
            assert before.state_version == 1
            assert two.ask(
                calibration.tune(A, "s", measured(DECODE, 16, 12), client_id="d", sequence=1)
            ).state_version == 2  # fmt: skip
            after = one.ask(planner.estimate_passes(A, [[DECODE]], "s"))
            assert after.state_version == 2 and after.latency_ms[0] != before.latency_ms[0]
        kept = one.ask(calibration.export_state(A, "s"))
    with running(state_dir=str(tmp_path)) as third, Client(third.address) as client:
        assert client.ask(calibration.export_state(A, "s")) == kept


def test_no_more_states_than_allowed(tmp_path: Path) -> None:
    with running(state_dir=str(tmp_path), max_states=2) as server, Client(server.address) as client:
        for name in ("a", "b"):
            client.ask(calibration.tune(None, name, [], client_id="c", sequence=1))
        with pytest.raises(errors.LimitExceeded):
            client.ask(calibration.tune(None, "c", [], client_id="c", sequence=1))
        client.ask(calibration.tune(None, "b", [], client_id="c", sequence=2))


def test_what_waits_for_the_store_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    learned = calibration.tune(A, "s", measured(DECODE, 11), client_id="c", sequence=1)
    with running(state_dir=str(tmp_path), threads=1) as server, Client(server.address, deadline_s=60) as client:
        with ThreadPoolExecutor(1) as pool, server.held("states"):
            asked = pool.submit(client.ask, learned)
            eventually(lambda: server.metric("lane_in_work", lane="states") == 1)
            assert native_ms(client, DECODE) > 0
            assert client.ask(planner.capacity(A, isl=3000, osl=150)) is not None
        assert asked.result(PATIENCE_S).state_version == 1


def test_a_store_that_another_process_holds_is_told_and_used_again_when_it_is_free(tmp_path: Path) -> None:
    with running(state_dir=str(tmp_path)) as server, Client(server.address, deadline_s=60) as client:
        first = calibration.tune(None, "s", [], client_id="c", sequence=1)
        assert client.ask(first).state_version == 1
        other = sqlite3.connect(tmp_path / "calibration.sqlite3", isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            path, second = "/perfcast.v1.Calibration/Tune", calibration.tune(None, "s", [], client_id="c", sequence=2)
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(second.request.SerializeToString(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert client.ask(calibration.diagnose(None, "s")).state_version == 1
            other.execute("ROLLBACK")
        assert client.ask(second).state_version == 2


def test_a_damaged_store_is_told_without_a_crash(tmp_path: Path) -> None:
    with running(state_dir=str(tmp_path)) as server, Client(server.address) as client:
        client.ask(calibration.tune(None, "s", [], client_id="c", sequence=1))
        with sqlite3.connect(tmp_path / "calibration.sqlite3") as database:
            database.execute("UPDATE state SET body=x'0851', version=9")
        with pytest.raises(errors.ServerFault) as caught:
            client.ask(planner.estimate_passes(None, [[DECODE]], "s"))
        assert caught.value.reason == "DATA_CORRUPT"
        assert client.ask(planner.estimate_passes(A, [[DECODE]])).latency_ms[0] > 0
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="state_dir"), running(state_dir=str(tmp_path / "file")):
        pass


def test_the_mean_factor_is_a_metric(client: Client, learning: Running) -> None:
    native = native_ms(client, DECODE)
    client.ask(calibration.tune(A, "gauge", measured(DECODE, native * 1.5, 20), client_id="c", sequence=1))
    handle = client.resolve(A).handle
    assert learning.metric("correction_factor", engine=handle, state="gauge", kind="decode") == pytest.approx(1.5)
