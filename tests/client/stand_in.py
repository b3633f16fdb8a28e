"""Servers that behave as the real one does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc


@contextmanager
def standing_in(handlers: Mapping[str, grpc.RpcMethodHandler]) -> Iterator[str]:
    """The address of a server of nothing but those handlers, by "service/method"."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 32 << 20)])
    for path, handler in handlers.items():
        service, _, name = path.partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
