#!/usr/bin/env bash
set -euo pipefail
python3 -m sglang.bench_serving --base-url http://node-0:8000 --model Qwen/Qwen3-32B-FP8 --tokenizer Qwen/Qwen3-32B-FP8 --max-concurrency 208 --num-prompts 4160 --seed 100 --backend sglang-oai --output-file result.json --dataset-name generated-shared-prefix --gsp-num-groups 1 --gsp-prompts-per-group 4160 --gsp-system-prompt-len 500 --gsp-question-len 3500 --gsp-output-len 500
