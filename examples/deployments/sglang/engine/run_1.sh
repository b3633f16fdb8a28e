#!/usr/bin/env bash
# Starts everything that runs on one node; ends when the first process ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
NODE_HOST=node-1
ENGINE=sglang
ENGINE_VERSION=0.5.14
GPUS_PER_NODE=8
mkdir -p logs
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT INT TERM
echo "starting $ENGINE $ENGINE_VERSION on $NODE_HOST ($GPUS_PER_NODE GPUs)"

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NCCL_CUMEM_ENABLE=1 \
python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B-FP8 --served-model-name Qwen/Qwen3-32B-FP8 --host 0.0.0.0 --port 8102 --tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype fp8_e4m3 --context-length 4756 --max-running-requests 1 --max-prefill-tokens 4000 --chunked-prefill-size -1 --mem-fraction-static 0.901 --cuda-graph-max-bs 1 --disaggregation-transfer-backend nixl --disaggregation-mode prefill --disaggregation-bootstrap-port 9102 \
  > logs/prefill_1.log 2>&1 &

CUDA_VISIBLE_DEVICES=4,5,6,7 \
NCCL_CUMEM_ENABLE=1 \
python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B-FP8 --served-model-name Qwen/Qwen3-32B-FP8 --host 0.0.0.0 --port 8103 --tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype fp8_e4m3 --context-length 4756 --max-running-requests 52 --max-prefill-tokens 52 --chunked-prefill-size -1 --mem-fraction-static 0.901 --cuda-graph-max-bs 52 --disaggregation-transfer-backend nixl --disaggregation-mode decode --disaggregation-bootstrap-port 9103 \
  > logs/decode_1.log 2>&1 &
wait -n
