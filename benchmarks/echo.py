"""A bare gRPC server: answers every call with as many bytes as its request's first four say.

python -m benchmarks.echo [asyncio | uvloop | threads]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

KINDS = ("asyncio", "uvloop", "threads")
UNARY, STREAM = "/echo.Echo/Unary", "/echo.Echo/Stream"
LIMIT = 64 << 20
OPTIONS = [("grpc.max_receive_message_length", LIMIT), ("grpc.max_send_message_length", LIMIT)]


def request(size: int, answer: int) -> bytes:
    """A request of ``size`` bytes that asks for ``answer`` bytes."""
    return answer.to_bytes(4, "little") + bytes(max(0, size - 4))


def answer(data: bytes) -> bytes:
    return bytes(int.from_bytes(data[:4], "little"))


async def unary(data: bytes, context: Any) -> bytes:
    return answer(data)


async def stream(_: Any, context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(answer(data))


def unary_in_thread(data: bytes, context: Any) -> bytes:
    return answer(data)


def stream_in_thread(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    return map(answer, requests)


def listening(server: Any, one: Any, many: Any) -> Any:
    methods = {"Unary": grpc.unary_unary_rpc_method_handler(one), "Stream": grpc.stream_stream_rpc_method_handler(many)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", methods),))
    server.port = server.add_insecure_port("127.0.0.1:0")
    return server


async def serve() -> None:
    server = listening(grpc.aio.server(options=OPTIONS), unary, stream)
    await server.start()
    print(f"ready on 127.0.0.1:{server.port}", flush=True)
    await server.wait_for_termination()


def serve_in_threads() -> None:
    server = listening(grpc.server(ThreadPoolExecutor(), options=OPTIONS), unary_in_thread, stream_in_thread)
    server.start()
    print(f"ready on 127.0.0.1:{server.port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else KINDS[0]
    if kind == "threads":
        serve_in_threads()
    elif kind == "uvloop":
        import uvloop

        uvloop.run(serve())
    else:
        asyncio.run(serve())
