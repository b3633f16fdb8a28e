"""What one engine sustains, in ten lines: python examples/ten_lines.py 127.0.0.1:50051"""

import sys

from perfcast_client import Client, EngineConfig, planner

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    engine = client.resolve(EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4))
    for itl_ms in (10, 20, 50):
        found = client.ask(planner.capacity(engine, isl=3000, osl=150, ttft_s=0.5, itl_s=itl_ms / 1000))
        print(f"ITL {itl_ms} ms: {found.rps:.2f} requests/s at batch {found.batch_total}, TTFT {found.ttft_s:.3f} s")
