"""Measurements with commands of their own; no test asserts a time."""
