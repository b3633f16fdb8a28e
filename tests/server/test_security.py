"""Who may call: TLS, client certificates, tokens, quotas, and nothing open to a network by accident."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from click.testing import CliRunner
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from perfcast_cli.main import main
from perfcast_client import AsyncClient, Client, DecodeTrajectory, EngineConfig, Prefill, Tls, bearer, errors
from perfcast_client.channel import bearer_file
from perfcast_server.app import Server
from perfcast_server.callers import Caller, Quotas, Tokens
from perfcast_server.errors import ServiceError
from perfcast_server.settings import Settings, SettingsError, require_guarded

from tests.server.running import eventually, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
ADA, BOB = "ada-0123456789abcdef", "bob-0123456789abcdef"
SLOW = DecodeTrajectory(8, 1000, 100_000, stride=1)
OTHER = DecodeTrajectory(2, 9, 50_000, stride=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(path: Path, *parts: trustme.Blob) -> str:
    """All at once, as secrets are replaced in practice."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"".join(part.bytes() for part in parts))
    os.replace(fresh, path)
    return str(path)


def issued(folder: Path, authority: trustme.CA, name: str) -> dict[str, str]:
    made = authority.issue_cert(name, "127.0.0.1", common_name=name)
    return {
        "cert": write(folder / f"{name}.crt", *made.cert_chain_pems),
        "key": write(folder / f"{name}.key", made.private_key_pem),
    }


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> dict[str, str]:
    own = issued(tmp_path, authority, "localhost")
    return {"tls_cert": own["cert"], "tls_key": own["key"]}


@pytest.fixture
def roots(tmp_path: Path, authority: trustme.CA) -> str:
    return write(tmp_path / "roots.pem", authority.cert_pem)


def tokens(path: Path, text: str) -> str:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
    return str(path)


def with_token(address: str, token: str) -> Client:
    return Client(address, metadata=bearer(lambda: token))


def refused(call: Callable[[], object], kind: type[Exception]) -> errors.PerfcastError:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, errors.PerfcastError)
    return caught.value


def test_tls_is_spoken_to_clients_that_trust_the_server_and_to_nobody_else(tls: dict[str, str], roots: str) -> None:
    with running(**tls) as served:
        with Client(served.address, tls=Tls(ca=roots)) as client:
            assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
        for stranger in (Client(served.address), Client(served.address, tls=Tls())):
            with stranger:
                refused(lambda client=stranger: client.systems(deadline_s=2), errors.PerfcastError)


def test_the_asyncio_client_and_the_command_line_speak_tls_too(tls: dict[str, str], roots: str) -> None:
    async def ask(address: str) -> float:
        async with AsyncClient(address, tls=Tls(ca=roots)) as client:
            return (await client.predict(CONFIG, Prefill(1, 128))).latency_ms

    with running(**tls) as served:
        assert asyncio.run(ask(served.address)) > 0
        told = CliRunner().invoke(main, ["health", "--server", served.address, "--tls-ca", roots, "--timeout", "10"])
        assert (told.exit_code, told.output) == (0, "SERVING\n")
        told = CliRunner().invoke(main, ["systems", "--server", served.address, "--tls-ca", roots])
        assert told.exit_code == 0 and "h200_sxm" in told.output


def test_mutual_tls_lets_in_who_has_a_certificate_of_the_authority(
    tmp_path: Path, tls: dict[str, str], roots: str, authority: trustme.CA
) -> None:
    ada = issued(tmp_path, authority, "ada.example")
    mallory = issued(tmp_path, trustme.CA(), "mallory.example")
    with running(**tls, tls_client_ca=roots) as served:
        with Client(served.address, tls=Tls(roots, ada["cert"], ada["key"])) as client:
            assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
        for bad in (Tls(roots), Tls(roots, mallory["cert"], mallory["key"])):
            with Client(served.address, tls=bad) as client:
                refused(lambda client=client: client.systems(deadline_s=2), errors.PerfcastError)


def test_quotas_know_callers_by_their_certificates(
    tmp_path: Path, tls: dict[str, str], roots: str, authority: trustme.CA
) -> None:
    own = {name: issued(tmp_path, authority, name) for name in ("ada.example", "bob.example")}
    limits = {"caller_requests_per_s": 0.001, "caller_burst": 2.0}
    with running(**tls, tls_client_ca=roots, **limits) as served:
        for files in own.values():
            with Client(served.address, tls=Tls(roots, files["cert"], files["key"])) as client:
                client.systems()  # and one call for the server's revision
                refused(client.systems, errors.LimitExceeded)


def test_a_new_certificate_is_shown_without_a_restart_and_a_bad_one_is_not(
    tmp_path: Path, tls: dict[str, str], roots: str, authority: trustme.CA
) -> None:
    second = trustme.CA()
    new_roots = write(tmp_path / "new_roots.pem", second.cert_pem)

    def reaches(ca: str) -> bool:
        with Client(served.address, tls=Tls(ca=ca)) as client:
            try:
                return bool(client.systems(deadline_s=2))
            except errors.PerfcastError:
                return False

    with running(**tls) as served:
        assert reaches(roots) and not reaches(new_roots)
        issued(tmp_path, second, "localhost")
        eventually(lambda: reaches(new_roots))
        assert not reaches(roots)
        Path(tls["tls_cert"]).write_text("not a certificate")
        certificates = served.server._certificates
        assert certificates is not None
        certificates.refresh()
        assert reaches(new_roots)


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_cert": "/nowhere/a.crt", "tls_key": "/nowhere/a.key"},
        {"token_file": "/nowhere/tokens"},
    ],
)
def test_files_that_cannot_be_read_end_the_start(settings: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        asyncio.run(_made(Settings(port=0, metrics_port=-1, **settings)))


async def _made(settings: Settings) -> Server:
    return Server(settings)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, tls: dict[str, str], authority: trustme.CA) -> None:
    other = issued(tmp_path, authority, "other")
    with pytest.raises(SettingsError, match="do not fit"):
        asyncio.run(_made(Settings(tls_cert=tls["tls_cert"], tls_key=other["key"])))


@pytest.mark.parametrize("settings", [{"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}])
def test_half_of_tls_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="needed together"):
        Settings(**settings)


def test_calls_need_a_known_token_but_health_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tokens(tmp_path / "tokens", f"# callers\nada {ADA}\n\nbob\t{BOB}  admin # keeps the house\n")
    with running(token_file=file, log_level="debug") as served:
        for token in (ADA, BOB):
            with with_token(served.address, token) as client:
                assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
        for token in ("", "x", ADA[:-1], ADA + "x", ADA.upper(), f"{ADA} {ADA}"):
            with with_token(served.address, token) as client:
                error = refused(client.systems, errors.AccessDenied)
                assert (error.reason, error.code) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        with Client(served.address) as client:
            assert "is missing" in refused(client.systems, errors.AccessDenied).message
            refused(lambda: client.stream(CONFIG).predict_ms(Prefill(1, 128)), errors.AccessDenied)
        twice = [("authorization", f"Bearer {ADA}"), ("authorization", f"Bearer {BOB}")]
        with Client(served.address, metadata=lambda: twice) as client:
            refused(client.systems, errors.AccessDenied)
        with grpc.insecure_channel(served.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
            call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([b""]), timeout=60))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert list(call(iter([b"\x3a\x00"]), timeout=60, metadata=[("authorization", f"Bearer {ADA}")]))
    assert ADA not in caplog.text and BOB not in caplog.text


def test_tokens_change_with_their_file_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    known = Tokens(tokens(path, f"ada {ADA}\n"))
    tokens(path, f"bob {BOB} admin\n")
    known.refresh()
    assert (known.caller(ADA), known.caller(BOB)) == (None, Caller("bob", admin=True))
    for bad in ("", "bob short\n", f"bob {BOB} king\n", f"bob  {BOB} admin admin\n"):
        tokens(path, bad)
        known.refresh()
        assert known.caller(BOB) == Caller("bob", admin=True)
    path.unlink()
    known.refresh()
    assert known.caller(BOB) == Caller("bob", admin=True)


def test_what_is_wrong_with_a_token_file_is_told_without_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="line 2") as caught:
        Tokens(tokens(tmp_path / "tokens", f"ada {ADA}\nbob {BOB} king\n"))
    assert BOB not in str(caught.value)


def test_a_running_server_takes_new_tokens_and_a_client_its_new_one(tmp_path: Path) -> None:
    file, own = tokens(tmp_path / "tokens", f"ada {ADA}\n"), tokens(tmp_path / "own", ADA + "\n")
    with running(token_file=file) as served, Client(served.address, metadata=bearer_file(own)) as client:
        assert client.systems()
        tokens(tmp_path / "tokens", f"bob {BOB}\n")

        def is_shut_out() -> bool:
            try:
                client.systems()
            except errors.AccessDenied:
                return True
            return False

        eventually(is_shut_out)
        tokens(tmp_path / "own", BOB)
        assert client.systems()
        told = CliRunner().invoke(main, ["systems", "--server", served.address, "--token-file", own])
        assert told.exit_code == 0 and "h200_sxm" in told.output


def test_a_caller_over_its_rate_is_told_when_to_come_back_and_others_are_served(tmp_path: Path) -> None:
    file = tokens(tmp_path / "tokens", f"ada {ADA}\nbob {BOB}\n")
    with running(token_file=file, caller_requests_per_s=0.01, caller_burst=3.0) as served:
        with with_token(served.address, ADA) as ada:
            ada.systems(), ada.systems()
            error = refused(ada.systems, errors.LimitExceeded)
            assert error.details["limit"] == "caller_requests_per_s"
            assert error.retry_after_s is not None and 90 < error.retry_after_s <= 100
        with with_token(served.address, BOB) as bob:
            assert bob.systems()
        assert served.metric("refusals_total", reason="LIMIT") == 1


def test_a_quota_failure_is_a_detail_of_the_status(tmp_path: Path) -> None:
    with running(caller_requests_per_s=0.01) as served, grpc.insecure_channel(served.address) as channel:
        call = channel.unary_unary("/perfcast.v1.Catalog/ListSystems")
        call(b"")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"")
        status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
        quota = error_details_pb2.QuotaFailure()
        assert any(detail.Unpack(quota) for detail in status.details)
        assert quota.violations[0].subject == "caller_requests_per_s"


def test_a_caller_has_so_many_calls_in_work_and_others_have_theirs(tmp_path: Path) -> None:
    file = tokens(tmp_path / "tokens", f"ada {ADA}\nbob {BOB}\n")
    with (
        running(token_file=file, caller_concurrency=1) as served,
        with_token(served.address, ADA) as ada,
        with_token(served.address, BOB) as bob,
        ThreadPoolExecutor() as pool,
    ):
        handle = ada.resolve(CONFIG).handle
        with served.held():
            busy = pool.submit(ada.predict, CONFIG, SLOW, deadline_s=60)
            eventually(lambda: served.metric("grpc_server_in_work") == 1)
            error = refused(lambda: ada.predict(handle, OTHER), errors.LimitExceeded)
            assert error.details["limit"] == "caller_concurrency"
            assert bob.predict(handle, Prefill(1, 512)).latency_ms > 0
        assert busy.result().latency_ms > 0
        assert ada.predict(handle, OTHER).latency_ms > 0


def test_a_bucket_fills_with_time_and_forgets_refused_calls() -> None:
    now = [0.0]
    quotas, ada = Quotas(per_s=2.0, burst=3.0, clock=lambda: now[0]), Caller("ada")
    for _ in range(3):
        quotas.take(ada)
    for _ in range(5):
        with pytest.raises(ServiceError) as caught:
            quotas.take(ada)
        assert caught.value.retry_s == 0.5
    now[0] = 0.5
    quotas.take(ada)
    now[0] = 100.0
    assert [quotas.owed_s(ada) for _ in range(5)] == [0, 0, 0, 0.5, 1.0]
    quotas.take(Caller("bob"))


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    now = [100.0]
    quotas = Quotas(per_s=1.0, burst=1.0, clock=lambda: now[0])
    quotas.take(Caller("ada"))
    now[0] = 0.0
    with pytest.raises(ServiceError):
        quotas.take(Caller("ada"))


def test_a_stream_is_read_no_faster_than_the_quota() -> None:
    limits = {"caller_requests_per_s": 50.0, "caller_burst": 4.0}
    with running(**limits) as served, Client(served.address) as client, client.stream(CONFIG) as stream:
        answers = list(stream.predict_all_ms([Prefill(1, n) for n in range(1, 20)]))
    assert len(answers) == 19 and min(answers) > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_open_port_must_be_asked_for(host: str) -> None:
    with pytest.raises(SettingsError, match=r"not loopback.*insecure_anywhere"):
        require_guarded(Settings(host=host))
    require_guarded(Settings(host=host, insecure_anywhere=True))
    require_guarded(Settings(host=host, tls_cert="a", tls_key="b"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_guard(host: str) -> None:
    require_guarded(Settings(host=host))


def test_a_server_open_by_accident_does_not_start() -> None:
    with pytest.raises(SettingsError, match="insecure_anywhere"), running(host="0.0.0.0"):
        pass
