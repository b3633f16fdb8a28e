"""Memory goes back soon after what held it was let go of."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from perfcast_client import Client, EngineConfig, Prefill
from perfcast_server.tidy import Tidy

from tests.server.running import eventually, running


class Large:
    """Refers to itself, so that counting references does not free it."""

    def __init__(self) -> None:
        self.itself: Any = self


async def tidied(tidy: Tidy, renewed: bool) -> None:
    before = tidy.times
    tidy.due(renewed)
    async with asyncio.timeout(60):
        while tidy.times == before:
            await asyncio.sleep(0.01)


async def test_what_refers_to_itself_is_collected_when_it_is_due_and_not_before() -> None:
    tidy = Tidy(every_s=0.0)
    keeping = asyncio.ensure_future(tidy.keep())
    await asyncio.sleep(0)
    assert tidy.times == 0
    gone = weakref.ref(Large())
    await tidied(tidy, False)
    assert gone() is None
    keeping.cancel()


async def test_what_collections_pass_over_is_collected_once_it_was_renewed() -> None:
    tidy = Tidy(every_s=0.0)
    keeping = asyncio.ensure_future(tidy.keep())
    held: Any = Large()
    gone = weakref.ref(held)
    gc.freeze()
    try:
        held = None
        await tidied(tidy, False)
        assert gone() is not None
        await tidied(tidy, True)
        assert gone() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        keeping.cancel()


def test_a_server_tidies_up_after_it_took_new_data() -> None:
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    with running() as served, Client(served.address, deadline_s=60.0) as client:
        served.server._tidy._every_s = 0.0
        assert client.predict(config, Prefill(1, 128)).latency_ms > 0
        catalog = served.server.engines.predictor
        old = weakref.ref(catalog)
        assert served.server._data is not None
        served.do(served.server.prepare(served.server._data.version))
        served.do(served.server.commit())
        del catalog
        eventually(lambda: old() is None)
