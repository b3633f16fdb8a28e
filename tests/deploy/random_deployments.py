"""Random valid deployments: what a search could have chosen, on every backend and in every cluster."""

from __future__ import annotations

import random
from typing import Any

from perfcast_deploy.catalog import catalog
from perfcast_deploy.deployment import Cluster, Deployment, Predicted, Role, Workload

VERSIONS = {
    "vllm": ("0.12.0", "0.14.1", "0.16.0", "0.19.0", "0.20.1", "0.22.0", "0.24.0"),
    "sglang": ("0.5.4.post3", "0.5.6.post2", "0.5.8", "0.5.10.post1", "0.5.11", "0.5.16"),
    "trtllm": ("1.0.0", "1.2.0rc6.post1", "1.3.0rc5.post1", "1.3.0rc11", "1.3.0rc20", "1.3.0rc23"),
}
LANES = {"0.14.1": ("triton",), "0.24.0": ("triton", "flashinfer"), "0.5.11": ("fa3",), "0.5.16": ("fa3", "triton")}
BLOCKS = {"vllm": (16, 32, 64), "sglang": (1, 32, 64), "trtllm": (32, 64)}
MODELS = {
    False: ("Qwen/Qwen3-32B-FP8", "meta-llama/Meta-Llama-3.1-70B"),
    True: ("Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-V4-Pro"),
}


def random_deployment(rng: random.Random) -> Deployment:
    backend, is_moe = rng.choice(list(VERSIONS)), rng.random() < 0.5
    version = rng.choice(VERSIONS[backend])
    isl, osl = rng.choice((128, 1024, 4000, 8192)), rng.choice((1, 128, 500, 1000))
    system = rng.choice(list(catalog()["systems"]))
    per_node = catalog()["systems"][system]["gpus_per_node"]
    names = ("agg",) if rng.random() < 0.5 else ("prefill", "decode")
    nextn = rng.choice((0, 0, 1, 3))
    workload = Workload(isl=isl, osl=osl, prefix=rng.choice((0, 0, isl // 2)))
    return Deployment(
        model=rng.choice(MODELS[is_moe]),
        served_name="my-model" if backend != "trtllm" and rng.random() < 0.3 else "",
        backend=backend,
        version=version,
        system=system,
        is_moe=is_moe,
        roles=tuple(_role(rng, name, backend, version, is_moe, workload) for name in names),
        workload=workload,
        nextn=nextn,
        router=backend != "trtllm" and rng.random() < 0.3,
        port=rng.choice((8000, 8000, 9000)),
        trust_remote_code=rng.random() < 0.2,
        quant={"gemm": "fp8_block", "moe": "fp8_block"} if is_moe else {"gemm": "bfloat16"},
        predicted=Predicted(ttft_ms=194.378, tpot_ms=9.659, output_tokens_per_s=18325.0, profile="reference")
        if rng.random() < 0.5
        else Predicted(),
        cluster=_cluster(rng, per_node),
    )


def _role(rng: random.Random, name: str, backend: str, version: str, is_moe: bool, workload: Workload) -> Role:
    tp, dp, pp = rng.choice((1, 2, 4, 8)), 1, rng.choice((1, 1, 1, 2))
    if is_moe and rng.random() < 0.6:
        dp = rng.choice((2, 4, 8, 16))
        tp = 1 if backend == "trtllm" else rng.choice((1, 1, 2))
    wide = tp * dp
    ep = rng.choice([size for size in (1, 2, 4, 8, 16) if wide % size == 0]) if is_moe else 1
    if backend == "vllm":
        ep = wide if ep > 1 else 1
    batch = rng.choice((1, 2, 8, 31, 64, 256, 700))
    tokens = batch if name == "decode" else workload.isl + (batch if name == "agg" else 0)
    fields: dict[str, Any] = {}
    if backend == "sglang" and is_moe and rng.random() < 0.4:
        fields = {"moe_backend": "deep_gemm", "moe_all_to_all": "deepep"}
    elif backend == "trtllm" and is_moe and rng.random() < 0.4:
        fields = {"moe_backend": rng.choice(("CUTLASS", "WIDEEP"))}
    if rng.random() < 0.2 and version in LANES:
        fields["attention_backend"] = rng.choice(LANES[version])
    return Role(
        name=name,
        workers=rng.choice((1, 1, 2, 3, 5)),
        tp=tp,
        pp=pp,
        dp=dp,
        moe_ep=ep,
        moe_tp=wide // ep if is_moe else 1,
        max_batch=batch,
        max_tokens=tokens,
        max_seq_len=workload.isl + workload.osl + rng.choice((0, 0, 3000)),
        kv_fraction=rng.choice((0.85, 0.9, 0.92)),
        kv_dtype=rng.choice(("bfloat16", "fp8")),
        chunked_prefill=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.5,
        cuda_graphs=rng.random() < 0.9,
        tokens_per_block=rng.choice((None, *BLOCKS[backend])),
        **fields,
    )


def _cluster(rng: random.Random, per_node: int) -> Cluster:
    return Cluster(
        name=rng.choice(("perfcast", "chat-1")),
        namespace=rng.choice((None, "serving")),
        image=rng.choice((None, None, "registry.example/own:1")),
        pull_secret=rng.choice((None, "registry-key")),
        pvc=rng.choice((None, "models")),
        pvc_mount=rng.choice(("/model-cache", "/mnt/models")),
        transport=rng.choice(("nvlink", "ib", "efa")),
        gpus_per_node=per_node,
        env=rng.choice(({}, {"HF_HUB_OFFLINE": "1", "SPACED": "a b $c 'd'"})),
    )
