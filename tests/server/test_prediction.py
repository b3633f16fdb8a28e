"""The Prediction service over loopback, held against the engine in this process."""

from __future__ import annotations

import numpy as np
import pytest
from perfcast_client import Client, DecodeStep, DecodeTrajectory, EngineConfig, Mixed, Prefill
from perfcast_engine.config import EngineConfig as OwnConfig
from perfcast_engine.config import ParallelConfig
from perfcast_engine.predictor import Engine, Predictor

from tests.server.running import Running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)


@pytest.fixture(scope="module")
def client(served: Running):
    with Client(served.address) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = OwnConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", parallel=ParallelConfig(tp=4))
    return Predictor().engine(config)


def test_a_resolved_engine_says_what_was_left_open(client: Client, engine: Engine) -> None:
    resolved = client.resolve(CONFIG)
    assert resolved.handle == engine.handle
    assert resolved.stamp.version == engine.config.version != "current"
    assert resolved.gpus_total == 4
    assert resolved.config.database_mode == "silicon"
    assert resolved.modes == {"gemm": "fp8_block", "moe": "fp8_block", "kv_cache": "fp8", "fmha": "fp8", "comm": "half"}


def test_resolving_the_resolved_configuration_gives_the_same_handle(client: Client) -> None:
    resolved = client.resolve(CONFIG)
    assert client.resolve(resolved.config).handle == resolved.handle
    assert client.resolve(resolved.handle) == resolved


@pytest.mark.parametrize(
    ("step", "call", "arguments"),
    [
        (Prefill(8, 4096), "prefill", (8, 4096)),
        (Prefill(2, 4096, prefix=1024, imbalance=1.25), "prefill", (2, 4096, 1024, 1.25)),
        (DecodeStep(64, 4096, 512), "decode_step", (64, 4096, 512)),
        (DecodeTrajectory(16, 2048, 300), "decode", (16, 2048, 300)),
        (DecodeTrajectory(16, 2048, 300, beam_width=2, stride=8), "decode", (16, 2048, 300, 2, 8)),
        (Mixed(2048, 32, 4096, 512), "mixed", (2048, 32, 4096, 512)),
        (Mixed(8192, 32, 4096, 512, prefix=128), "mixed", (8192, 32, 4096, 512, 128)),
    ],
)
def test_a_step_is_the_engine_s_with_and_without_its_operators(
    client: Client, engine: Engine, step, call, arguments
) -> None:
    own = getattr(engine.steps, call)(*arguments)
    told = client.predict(CONFIG, step, operators=True)
    assert told.latency_ms == pytest.approx(own.ms[0], rel=1e-12)
    assert client.predict(CONFIG, step).latency_ms == pytest.approx(own.ms[0], rel=1e-12)
    assert sum(operator.latency_ms for operator in told.operators) == pytest.approx(told.latency_ms, rel=1e-9)
    shares = told.provenance
    assert shares.silicon_share + shares.empirical_share + shares.sol_share + shares.estimated_share + (
        shares.mixed_share
    ) == pytest.approx(1.0)
    assert told.engine.handle == engine.handle


def test_columns_are_the_scalar_steps(client: Client) -> None:
    batch, isl = np.array([1, 2, 4, 8]), np.array([128, 1000, 4096, 77])
    told = client.predict_many(CONFIG, Prefill(batch, isl), operators=True, provenance=True)
    alone = [client.predict(CONFIG, Prefill(int(b), int(s))).latency_ms for b, s in zip(batch, isl, strict=True)]
    assert told.latency_ms.tolist() == pytest.approx(alone, rel=1e-12)
    assert sum(told.operators.values()).tolist() == pytest.approx(alone)
    assert sum(told.shares.values()).tolist() == pytest.approx([1.0] * 4)


def test_a_single_value_holds_for_all_points(client: Client) -> None:
    told = client.predict_many(CONFIG, DecodeStep(np.arange(1, 6), 4096, 128))
    assert len(told) == 5
    assert told.latency_ms[2] == client.predict(CONFIG, DecodeStep(3, 4096, 128)).latency_ms


def test_large_columns_go_through_the_thread_pool(client: Client) -> None:
    batch = np.arange(1, 10_001)
    told = client.predict_many(CONFIG, DecodeStep(batch, 1024, 128))
    assert len(told) == 10_000
    assert np.isfinite(told.latency_ms).all() and (told.latency_ms > 0).all()


def test_a_stream_answers_in_order_and_survives_a_refused_step(client: Client) -> None:
    with client.stream(CONFIG) as stream:
        steps = [Prefill(1, n) for n in (100, 200, 300)]
        assert list(stream.predict_all_ms(steps)) == [client.predict(CONFIG, step).latency_ms for step in steps]
        with pytest.raises(ValueError, match="isl_tokens"):
            stream.predict_ms(Prefill(1, 0))
        assert stream.predict_ms(Prefill(1, 100)) == client.predict(CONFIG, Prefill(1, 100)).latency_ms


def test_an_inline_config_json_is_answered_like_the_registered_model(client: Client) -> None:
    config_json = """{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}"""
    config = EngineConfig(model="mine", config_json=config_json, system="h200_sxm", backend="vllm", tp=2)
    resolved = client.resolve(config)
    assert resolved.model_family == "LLAMA"
    assert client.predict(resolved, Prefill(1, 1024)).latency_ms > 0
