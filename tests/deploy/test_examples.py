"""The files in examples/deployments are what the generator writes today."""

from __future__ import annotations

from pathlib import Path

from perfcast_deploy.bundle import read, validate
from perfcast_deploy.describe import TARGETS

from examples.deployments.generate import HERE, examples, table


def test_every_engine_and_target_is_shown_or_refused() -> None:
    made, refused = examples()
    assert set(made) | set(refused) == {
        f"{engine}/{target}" for engine in ("trtllm", "vllm", "sglang") for target in TARGETS
    }
    assert sorted(refused) == [
        *("sglang/fpm", "sglang/llm-d-kustomize"),
        *("trtllm/fpm", "trtllm/llm-d-helm", "trtllm/llm-d-kustomize"),
    ]


def test_examples_are_in_step() -> None:
    made, _ = examples()
    for folder, bundle in made.items():
        assert read(HERE / folder) == dict(bundle.files), f"{folder}: run python examples/deployments/generate.py"
    assert table(made) in (HERE / "README.md").read_text()
    shown = {str(path.parent.relative_to(HERE)) for path in HERE.rglob("perfcast.json")}
    assert shown == set(made)


def test_examples_say_where_their_rows_come_from() -> None:
    for manifest in HERE.rglob("perfcast.json"):
        deployment = validate(read(Path(manifest).parent))
        assert deployment.predicted.profile == "corrected"
        assert deployment.gpus == 32 or manifest.parent.name == "fpm"
