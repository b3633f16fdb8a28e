"""Resident memory of a process and of all that it has started."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def children(pid: int) -> list[int]:
    """``pid`` and everything below it that is alive."""
    found = [pid]
    for at in found:
        for task in Path(f"/proc/{at}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # has ended meanwhile
    return found


def kind(pid: int) -> str:
    """What a process of a server is: serve (the supervisor, or the only one), worker or search."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return "search" if "search_process" in command else "worker" if "server.worker" in command else "serve"


def resident(pid: int) -> dict[str, tuple[int, int]]:
    """Bytes resident of all processes from ``pid`` down, by what they are: (in all, of those not backed by a file)."""
    totals: dict[str, tuple[int, int]] = {}
    for each in children(pid):
        try:
            name = kind(each)
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        told = {line.partition(":")[0]: line.partition(":")[2].split()[0] for line in lines if line.startswith("Rss")}
        anonymous, mapped = int(told.get("RssAnon", 0)) << 10, int(told.get("RssFile", 0)) << 10
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + anonymous + mapped, before[1] + anonymous
    return totals
