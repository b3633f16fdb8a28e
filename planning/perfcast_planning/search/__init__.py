"""Searches: parallel mappings, sweeps over them, Pareto fronts, picks (spec/06 sections 8-11)."""
