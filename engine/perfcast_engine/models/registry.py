"""The registry: models that are known by name (spec/05 section 14)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfcast_systems import ROOT

from perfcast_engine.config import EngineConfig
from perfcast_engine.errors import DataCorrupt, Reason, UnknownName
from perfcast_engine.models.spec import ModelSpec, from_record

BUNDLED = ROOT / "models.json"


@dataclass(frozen=True, slots=True)
class Registry:
    """Models by id."""

    models: Mapping[str, ModelSpec]

    @classmethod
    def load(cls, path: Path = BUNDLED) -> Registry:
        """Read a registry file; DataCorrupt when it is not one."""
        try:
            records = json.loads(path.read_text())["models"]
            specs = [from_record(record) for record in records]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataCorrupt(f"model registry {path}: {error}", path=str(path)) from error
        return cls({spec.id: spec for spec in specs})

    def get(self, id: str) -> ModelSpec:
        """The model called ``id``; UnknownName with the nearest ids."""
        if id not in self.models:
            hint = f"; {len(self.models)} are known by name, any other is asked for by its config.json"
            raise UnknownName("model", id, self.models, Reason.UNKNOWN_MODEL, hint)
        return self.models[id]

    def spec(self, config: EngineConfig) -> ModelSpec:
        """The model of ``config``, known by name or inline, with the layers that are asked for."""
        spec = config.model if isinstance(config.model, ModelSpec) else self.get(config.model)
        return spec.with_layers(config.layers)
