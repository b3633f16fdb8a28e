"""Runs under the interpreter of the reference engine: runs its searches and estimates, one JSON line per request."""

import json
import logging
import sys
import time


def main() -> None:
    logging.disable(logging.CRITICAL)
    from aiconfigurator.cli.api import cli_estimate
    from aiconfigurator.sdk.task_v2 import Task

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    for line in sys.stdin:
        kind, fields = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        found = cli_estimate(**fields) if kind == "estimate" else Task(**fields).run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if kind == "search":
            found = found if hasattr(found, "columns") else found["pareto_df"]
            best = float(found["tokens/s/gpu"].max())
        else:
            best = float(found.ttft)
        print(json.dumps([wall, cpu, best]), file=answers, flush=True)


if __name__ == "__main__":
    main()
