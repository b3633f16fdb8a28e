"""Operators: one module a kind, each a frozen dataclass of shapes that prices arrays of points against a database."""
