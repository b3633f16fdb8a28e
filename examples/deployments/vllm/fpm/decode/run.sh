#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/fpm_env.sh"
ulimit -l unlimited || true
export NCCL_CUMEM_ENABLE=1
export DYN_FPM_BENCHMARK_OUTPUT_PATH=/results/benchmark.json
export DYN_FPM_WORKER_ID="${DYN_FPM_WORKER_ID:-${FPM_RUN_ID:-fpm}-node${FPM_NODE_RANK}}"
engine=(python3 -m dynamo.vllm --model Qwen/Qwen3-32B-FP8 --served-model-name Qwen/Qwen3-32B-FP8 --tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype fp8 --max-model-len 4756 --max-num-seqs 13 --max-num-batched-tokens 13 --gpu-memory-utilization 0.92 --enable-chunked-prefill --enable-prefix-caching --benchmark-mode decode --dump-config-to /results/resolved-config-node0.json --benchmark-output-path /results/benchmark.json)
engine=("${engine[@]//__FPM_NODE_RANK__/$FPM_NODE_RANK}")
if (( FPM_NODE_COUNT > 1 && FPM_DATA_PARALLEL_SIZE > 1 )); then
  first=$((FPM_NODE_RANK * FPM_LOCAL_DATA_PARALLEL_SIZE))
  engine+=(--data-parallel-size-local "$FPM_LOCAL_DATA_PARALLEL_SIZE" --data-parallel-start-rank "$first")
  engine+=(--data-parallel-address "$FPM_MASTER_ADDR" --data-parallel-rpc-port 29510 --data-parallel-hybrid-lb)
elif (( FPM_NODE_COUNT > 1 )); then
  engine+=(--nnodes "$FPM_NODE_COUNT" --node-rank "$FPM_NODE_RANK")
  engine+=(--master-addr "$FPM_MASTER_ADDR" --master-port 29500)
  if (( FPM_NODE_RANK > 0 )); then engine+=(--headless); fi
fi
exec "${engine[@]}"
