#!/usr/bin/env bash
# Starts everything that runs on one node; ends when the first process ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
NODE_HOST=node-2
ENGINE=vllm
ENGINE_VERSION=0.24.0
GPUS_PER_NODE=8
mkdir -p logs
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT INT TERM
echo "starting $ENGINE $ENGINE_VERSION on $NODE_HOST ($GPUS_PER_NODE GPUs)"

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NCCL_CUMEM_ENABLE=1 \
VLLM_NIXL_SIDE_CHANNEL_HOST=node-2 \
VLLM_NIXL_SIDE_CHANNEL_PORT=10256 \
vllm serve Qwen/Qwen3-32B-FP8 --served-model-name Qwen/Qwen3-32B-FP8 --host 0.0.0.0 --port 8104 --tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype fp8 --max-model-len 4756 --max-num-seqs 13 --max-num-batched-tokens 13 --gpu-memory-utilization 0.92 --enable-chunked-prefill --enable-prefix-caching --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' \
  > logs/decode_3.log 2>&1 &

CUDA_VISIBLE_DEVICES=4,5,6,7 \
NCCL_CUMEM_ENABLE=1 \
VLLM_NIXL_SIDE_CHANNEL_HOST=node-2 \
VLLM_NIXL_SIDE_CHANNEL_PORT=10320 \
vllm serve Qwen/Qwen3-32B-FP8 --served-model-name Qwen/Qwen3-32B-FP8 --host 0.0.0.0 --port 8105 --tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype fp8 --max-model-len 4756 --max-num-seqs 13 --max-num-batched-tokens 13 --gpu-memory-utilization 0.92 --enable-chunked-prefill --enable-prefix-caching --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' \
  > logs/decode_4.log 2>&1 &
wait -n
