#!/usr/bin/env bash
# Starts everything that runs on one node; ends when the first process ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
NODE_HOST=node-1
ENGINE=trtllm
ENGINE_VERSION=1.3.0rc20
GPUS_PER_NODE=8
mkdir -p logs
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT INT TERM
echo "starting $ENGINE $ENGINE_VERSION on $NODE_HOST ($GPUS_PER_NODE GPUs)"

CUDA_VISIBLE_DEVICES=0,1 \
NCCL_CUMEM_ENABLE=1 \
trtllm-serve Qwen/Qwen3-32B-FP8 --backend pytorch --host 0.0.0.0 --port 8103 --extra_llm_api_options prefill_config.yaml \
  > logs/prefill_2.log 2>&1 &

CUDA_VISIBLE_DEVICES=2,3 \
NCCL_CUMEM_ENABLE=1 \
trtllm-serve Qwen/Qwen3-32B-FP8 --backend pytorch --host 0.0.0.0 --port 8104 --extra_llm_api_options prefill_config.yaml \
  > logs/prefill_3.log 2>&1 &

CUDA_VISIBLE_DEVICES=4,5,6,7 \
NCCL_CUMEM_ENABLE=1 \
trtllm-serve Qwen/Qwen3-32B-FP8 --backend pytorch --host 0.0.0.0 --port 8105 --extra_llm_api_options decode_config.yaml \
  > logs/decode_1.log 2>&1 &
wait -n
