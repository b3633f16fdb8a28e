#!/usr/bin/env bash
# Sourced by run.sh: what is collected, and this pod's rank in the group.
export FPM_NODE_COUNT=1
export FPM_DATA_PARALLEL_SIZE=1
export FPM_LOCAL_DATA_PARALLEL_SIZE=1
export FPM_BENCHMARK_MODE=prefill
export FPM_BENCHMARK_OUTPUT_PATH=/results/benchmark.json
export FPM_WAIT_TIMEOUT_SECONDS=7800
export FPM_RESULT_SCHEMA_VERSION=2
rank="${FPM_NODE_RANK:-${LWS_WORKER_INDEX:-${GROVE_PCLQ_POD_INDEX:-}}}"
leader="${FPM_MASTER_ADDR:-${LWS_LEADER_ADDRESS:-}}"
if [[ -z "$leader" && -n "${GROVE_PCLQ_NAME:-}" && -n "${GROVE_HEADLESS_SERVICE:-}" ]]; then
  leader="${GROVE_PCLQ_NAME}-0.${GROVE_HEADLESS_SERVICE}"
fi
if (( FPM_NODE_COUNT == 1 )) && [[ -z "$rank$leader" ]]; then
  rank=0
  leader=127.0.0.1
fi
if ! [[ "$rank" =~ ^[0-9]+$ ]] || (( rank >= FPM_NODE_COUNT )) || [[ -z "$leader" ]]; then
  echo "no rank and leader found: set FPM_NODE_RANK and FPM_MASTER_ADDR, or run under LeaderWorkerSet or Grove" >&2
  exit 2
fi
export FPM_NODE_RANK="$rank" FPM_MASTER_ADDR="$leader"
