"""Runs under the interpreter of the reference engine: times its steps, one JSON line per question."""

import json
import sys
import time


def main() -> None:
    from aiconfigurator.sdk.engine import EngineHandle

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    setup = json.loads(sys.stdin.readline())
    names = (setup["model"], setup["system"], setup["backend"])
    engine = EngineHandle.compile(*names, backend_version=setup["version"], tp_size=setup["tp"])
    calls = {
        "prefill": engine.predict_prefill_latency,
        "decode": engine.decode_step_latency,
        "mixed": engine.mixed_step_latency,
    }
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        kind, points = json.loads(line)
        call, seconds = calls[kind], []
        for point in points:
            began = time.perf_counter()
            call(*point)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
