"""A process that searches, one request at a time: ``python -m perfcast_server.search_process SETTINGS``.

Frames of kind, length, payload come on standard input and leave on standard output. In: S(earch), R(ecommend) with a
request, C(ancel) for the one in work. Out: P(rogress) as it is made, then A(nswer), E(rror) or X (cancelled).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import secrets
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from perfcast.v1 import search_pb2
from perfcast_engine.predictor import Predictor
from perfcast_engine.search.task import Cancelled

from perfcast_server import logs, searching
from perfcast_server.errors import refusal
from perfcast_server.settings import Settings

log = logging.getLogger("perfcast.search")

HEADER = struct.Struct(">cI")
SEARCH, RECOMMEND, CANCEL, PROGRESS, ANSWER, ERROR, CANCELLED = b"S", b"R", b"C", b"P", b"A", b"E", b"X"
NICENESS = 10  # below the process that answers step queries


class Searcher:
    """The requests that come in on a stream, and their answers on another."""

    def __init__(self, settings: Settings, inbox: BinaryIO, outbox: BinaryIO) -> None:
        self._settings = settings
        self._inbox = inbox
        self._outbox = outbox
        self._asked: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._unwanted = threading.Event()

    def run(self) -> None:
        """Until the inbox ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        predictor = Predictor(roots=self._settings.data)
        while True:
            kind, request = self._asked.get()
            try:
                self._send(ANSWER, self._answer(kind, request, predictor))
            except Cancelled:
                self._send(CANCELLED)
            except Exception as error:
                incident = secrets.token_hex(4)
                told = refusal(error, incident)
                if told.reason == "INTERNAL":
                    log.error("unforeseen error", exc_info=error, extra={"incident": incident})
                self._send(ERROR, told.detail().SerializeToString())
            if resident_bytes() > self._settings.max_engine_bytes:
                predictor = Predictor(roots=self._settings.data)  # forgets the tables of all systems asked about
                gc.collect()

    def _answer(self, kind: bytes, data: bytes, predictor: Predictor) -> bytes:
        settings, cancelled = self._settings, self._unwanted.is_set
        if kind == RECOMMEND:
            asked = search_pb2.RecommendRequest.FromString(data)
            return searching.recommend(asked, predictor, settings, cancelled).SerializeToString()
        request = search_pb2.SearchRequest.FromString(data)
        result = searching.search(request, predictor, settings, self._tell, cancelled)
        return search_pb2.SearchResponse(result=result).SerializeToString()

    def _tell(self, progress: search_pb2.SearchProgress) -> None:
        self._send(PROGRESS, search_pb2.SearchResponse(progress=progress).SerializeToString())

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        self._outbox.write(HEADER.pack(kind, len(data)) + data)
        self._outbox.flush()

    def _listen(self) -> None:
        while header := self._inbox.read(HEADER.size):
            kind, size = HEADER.unpack(header)
            data = self._inbox.read(size)
            if kind == CANCEL:
                self._unwanted.set()
            else:
                self._unwanted.clear()
                self._asked.put((kind, data))
        os._exit(0)  # whoever asks is gone


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ends with its server, which may still wait for an answer
    os.nice(NICENESS)
    told = json.loads(sys.argv[1])
    settings = Settings(**told | {"data": tuple(told["data"])})
    logs.configure(settings.log_level, settings.log_format)
    outbox = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not break a frame
    Searcher(settings, sys.stdin.buffer, outbox).run()


if __name__ == "__main__":
    main()
