"""The tables of figures that come with the package: YAML files of ``perfcast_systems``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from perfcast_systems import ROOT

from perfcast_engine.errors import DataCorrupt

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # for files of our own; it does not bound how deep they nest


def read_yaml(path: Path, what: str = "", loader: Any = yaml.SafeLoader) -> Any:
    """The content of a YAML file; DataCorrupt, naming ``what`` it is, when it cannot be read."""
    try:
        return yaml.load(path.read_text(), loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise DataCorrupt(f"{what}{path.name} cannot be read: {why}", file=str(path)) from error


@cache
def table(name: str) -> Any:
    """The content of ``name``.yaml, read once; not to be changed."""
    return read_yaml(ROOT / f"{name}.yaml", loader=FAST)
