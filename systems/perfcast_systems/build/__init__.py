"""Making packs: an AIConfigurator-layout tree of parquet files in, one pack per (system, backend, version) out."""
