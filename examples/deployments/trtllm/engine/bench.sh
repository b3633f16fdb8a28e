#!/usr/bin/env bash
set -euo pipefail
python3 -m tensorrt_llm.serve.scripts.benchmark_serving --base-url http://node-0:8000 --model Qwen/Qwen3-32B-FP8 --tokenizer Qwen/Qwen3-32B-FP8 --max-concurrency 224 --num-prompts 4480 --seed 100 --backend openai --endpoint /v1/completions --dataset-name random --random-input-len 3500 --random-output-len 500 --random-prefix-len 500 --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --save-result --result-filename result.json --random-ids
