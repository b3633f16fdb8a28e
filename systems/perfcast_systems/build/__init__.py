"""Making packs: an AIConfigurator-layout tree of parquet files in, one pack per (system, backend, version) out."""

from perfcast_systems.build.make import build_packs
from perfcast_systems.build.tree import BuildError

__all__ = ["BuildError", "build_packs"]
