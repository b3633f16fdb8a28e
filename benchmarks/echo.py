"""A bare asyncio gRPC server: answers every call with as many bytes as its request's first four say."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

UNARY, STREAM = "/echo.Echo/Unary", "/echo.Echo/Stream"


def request(size: int, answer: int) -> bytes:
    """A request of ``size`` bytes that asks for ``answer`` bytes."""
    return answer.to_bytes(4, "little") + bytes(max(0, size - 4))


async def unary(data: bytes, context: Any) -> bytes:
    return bytes(int.from_bytes(data[:4], "little"))


async def stream(_: Any, context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(bytes(int.from_bytes(data[:4], "little")))


async def main() -> None:
    limit = 64 << 20
    options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
    server = grpc.aio.server(options=options)
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
