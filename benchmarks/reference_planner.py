"""Runs under the interpreter of the reference engine: capacity searches over its passes, one JSON line per question.

The reference's planner is not to be had there. Its own work is what spec/07 section 5 says that it does, in the scalar
transcription that the tests hold ours against: candidate by candidate, pass by pass.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.planning import naive_planner


def main() -> None:
    from aiconfigurator_core.sdk import RustForwardPassPerfModel

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    model, passes = RustForwardPassPerfModel.from_native(json.loads(sys.stdin.readline())), []

    def seconds(ranks: list[naive_planner.Rank]) -> float:
        ((prompts, tokens, decodes, kv),) = ranks
        scheduled = {"num_prefill_requests": prompts, "sum_prefill_tokens": tokens,
                     "num_decode_requests": decodes, "sum_decode_kv_tokens": kv}  # fmt: skip
        passes.append({"scheduled_requests": scheduled})
        return max(model.estimate_forward_pass_time_ms(passes[-1]) / 1000, 0.0)

    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        role, limits, request = (SimpleNamespace(**told) for told in json.loads(line))
        request.targets, request.objective = dict(request.targets).copy, SimpleNamespace(name=request.objective)
        passes.clear()
        began = time.perf_counter()
        found = naive_planner.capacity(seconds, role, limits, request)
        searched = time.perf_counter()
        for one in passes:
            model.estimate_forward_pass_time_ms(one)
        passed = time.perf_counter()
        told = {"batch": found and found[0], "search_s": searched - began, "passes_s": passed - searched}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
