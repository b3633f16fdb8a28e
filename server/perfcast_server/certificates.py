"""TLS: the server's certificate, read again when its files change, and the authority that clients must be from."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from perfcast_server.settings import Settings, SettingsError
from perfcast_server.watched import Watched


class Certificates:
    """What new connections are shown; connections that exist keep what they have seen."""

    def __init__(self, settings: Settings) -> None:
        paths = [settings.tls_cert, settings.tls_key]
        self._mutual = bool(settings.tls_client_ca)
        self._files = Watched([*paths, settings.tls_client_ca] if self._mutual else paths, "certificates", self._read)
        self._shown = 0

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._files.value, self._changed, self._mutual)

    def refresh(self) -> None:
        self._files.refresh()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked before every handshake, in a thread of gRPC's."""
        if self._shown == self._files.changes:
            return None
        self._shown = self._files.changes
        return self._files.value

    def _read(self, cert: str, key: str, *ca: str) -> grpc.ServerCertificateConfiguration:
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            check.load_cert_chain(cert, key, password=lambda: "")
            for authority in ca:
                check.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise SettingsError(f"tls_cert, tls_key and tls_client_ca do not fit: {error.reason}") from None
        roots = Path(ca[0]).read_bytes() if ca else None
        return grpc.ssl_server_certificate_configuration([(Path(key).read_bytes(), Path(cert).read_bytes())], roots)
