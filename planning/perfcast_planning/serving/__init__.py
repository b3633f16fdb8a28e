"""Serving models above the engine step: static, aggregated, disaggregated, encoders, AFD (spec/06 2-7, 12)."""
