"""Where searches run: ``python -m perfcast_server.search_process SETTINGS VERSION``, a Unix socket as standard input.

It opens the data, of that VERSION, and forks a child for every socket that it is sent over its own. Over that, a child
takes frames of kind, length, payload: S(earch) or R(ecommend) with a request. It sends I(d) with the number of its
process first, and for each request P(rogress) as it is made, then A(nswer) or E(rror). Who wants no answer kills it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import NoReturn

from perfcast.v1 import search_pb2
from perfcast_engine.predictor import Predictor

from perfcast_server import logs, searching
from perfcast_server.errors import ServiceError, refusal
from perfcast_server.settings import Settings

log = logging.getLogger("perfcast.search")

HEADER = struct.Struct(">cI")
SEARCH, RECOMMEND, ID, PROGRESS, ANSWER, ERROR = b"S", b"R", b"I", b"P", b"A", b"E"
NICENESS = 10  # below the process that answers step queries


class Searcher:
    """Answers the requests that come in on a socket, one after another."""

    def __init__(self, settings: Settings, predictor: Predictor, is_current: bool, end: socket.socket) -> None:
        self._settings = settings
        self._predictor = predictor
        self._is_current = is_current
        self._inbox, self._outbox = end.makefile("rb"), end.makefile("wb")
        self._asked: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        self._send(ID, str(os.getpid()).encode())
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            kind, request = self._asked.get()
            try:
                self._send(ANSWER, self._answer(kind, request))
            except Exception as error:
                incident = secrets.token_hex(4)
                told = refusal(error, incident)
                if told.reason == "INTERNAL":
                    log.error("unforeseen error", exc_info=error, extra={"incident": incident})
                self._send(ERROR, told.detail().SerializeToString())
            if resident_bytes() > self._settings.max_engine_bytes:
                self._predictor.catalog.let_go()
                gc.collect()

    def _answer(self, kind: bytes, data: bytes) -> bytes:
        if not self._is_current:
            told = "the data on disk are not those that this server answers from: let it reload, or put those back"
            raise ServiceError("DATA_REFUSED", told)
        if kind == RECOMMEND:
            asked = search_pb2.RecommendRequest.FromString(data)
            return searching.recommend(asked, self._predictor, self._settings).SerializeToString()
        request = search_pb2.SearchRequest.FromString(data)
        result = searching.search(request, self._predictor, self._settings, self._tell)
        return search_pb2.SearchResponse(result=result).SerializeToString()

    def _tell(self, progress: search_pb2.SearchProgress) -> None:
        self._send(PROGRESS, search_pb2.SearchResponse(progress=progress).SerializeToString())

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        try:
            self._outbox.write(HEADER.pack(kind, len(data)) + data)
            self._outbox.flush()
        except OSError:
            os._exit(0)  # whoever asks is gone

    def _listen(self) -> NoReturn:
        with contextlib.suppress(OSError, struct.error):  # killed, it may leave a connection reset or half a message
            while header := self._inbox.read(HEADER.size):
                kind, size = HEADER.unpack(header)
                self._asked.put((kind, self._inbox.read(size)))
        os._exit(0)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ends with its server, which may still wait for an answer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    os.nice(NICENESS)
    told = json.loads(sys.argv[1])
    settings = Settings(**told | {"data": tuple(told["data"])})
    logs.configure(settings.log_level, settings.log_format)
    predictor = Predictor(roots=settings.data)
    is_current = predictor.catalog.digest() == sys.argv[2]
    gc.collect()
    gc.freeze()  # collections in children would copy what they share
    with socket.socket(fileno=sys.stdin.fileno()) as own:
        while True:
            _, ends, _, _ = socket.recv_fds(own, 1, 1)
            if not ends:
                break
            with socket.socket(fileno=ends[0]) as end:
                if os.fork() == 0:
                    own.close()
                    Searcher(settings, predictor, is_current, end).run()
            if not is_current:
                break  # the next one may be
    with contextlib.suppress(ChildProcessError):
        os.wait()  # stays until the last child has ended


if __name__ == "__main__":
    main()
