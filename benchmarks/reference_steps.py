"""Runs under the interpreter of the reference engine: CPU seconds of a step, the mean over the points of a question."""

import json
import sys
import time


def main() -> None:
    from aiconfigurator.sdk.engine import EngineHandle

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    setup = json.loads(sys.stdin.readline())
    names = (setup["model"], setup["system"], setup["backend"])
    engine = EngineHandle.compile(*names, **setup["options"])
    calls = {
        "prefill": engine.predict_prefill_latency,
        "decode": engine.decode_step_latency,
        "mixed": engine.mixed_step_latency,
    }
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        kind, points = json.loads(line)
        call = calls[kind]
        began = time.process_time()
        for point in points:
            call(*point)
        print(json.dumps((time.process_time() - began) / len(points)), file=answers, flush=True)


if __name__ == "__main__":
    main()
