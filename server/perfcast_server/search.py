"""The Search service: each search in a process of its own, below the one that answers step queries."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from perfcast.v1 import search_pb2

from perfcast_server.cache import Broadcast
from perfcast_server.rpc import Method, ServerStream, Unary
from perfcast_server.search_process import RECOMMEND, SEARCH
from perfcast_server.searchers import Searchers

SERVICE = "perfcast.v1.Search"


class Search:
    """Finds the best deployments. Equal searches under way are one."""

    def __init__(self, searchers: Searchers) -> None:
        self._searchers = searchers
        self._running: Broadcast[tuple[object, bytes], bytes] = Broadcast()

    def methods(self) -> tuple[Method, ...]:
        return (
            ServerStream("Search", search_pb2.SearchRequest, self.search, keeps_last=True),
            Unary("Recommend", search_pb2.RecommendRequest, self.recommend),
        )

    def search(self, request: search_pb2.SearchRequest) -> AsyncGenerator[bytes]:
        data = request.SerializeToString(deterministic=True)
        key = self._searchers.generation, data
        return self._running.watch(key, lambda: self._searchers.ask(SEARCH, data))

    async def recommend(self, request: search_pb2.RecommendRequest) -> bytes:
        (answer,) = [told async for told in self._searchers.ask(RECOMMEND, request.SerializeToString())]
        return answer
