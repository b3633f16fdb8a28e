"""Runs under the interpreter of the reference engine: times lists of forward passes, one JSON line per question."""

import json
import sys
import time


def main() -> None:
    from aiconfigurator_core.sdk import RustForwardPassPerfModel

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    model = RustForwardPassPerfModel.from_native(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        passes = json.loads(line)
        began = time.perf_counter()
        for one in passes:
            model.estimate_forward_pass_time_ms(one)
        print(json.dumps(time.perf_counter() - began), file=answers, flush=True)


if __name__ == "__main__":
    main()
