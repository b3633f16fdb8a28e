"""Formulas of the model tables: Python expressions over named figures and nothing else, compiled once."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from perfcast_engine.errors import DataCorrupt

Names = dict[str, Any]
FUNCTIONS: Mapping[str, Any] = {
    "min": min,
    "max": max,
    "sum": sum,
    "int": int,
    "float": float,
    "round": round,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "log2": np.log2,  # of arrays
}


def parse(formula: Any, text: bool = False) -> ast.expr:
    """The syntax tree of one formula. What is no text stands for itself; with ``text``, so does a text, but for figures
    in braces. DataCorrupt for what is no formula."""
    if isinstance(formula, list):
        return ast.Tuple([ast.Constant(member) for member in formula], ast.Load())
    if not isinstance(formula, str):
        return ast.Constant(formula)
    try:
        tree = ast.parse(f"f{formula!r}" if text else formula, mode="eval").body
    except SyntaxError as error:
        raise DataCorrupt(f"no formula: {formula!r}") from error
    for node in ast.walk(tree):
        if getattr(node, "id", getattr(node, "attr", "")).startswith("_"):
            raise DataCorrupt(f"a formula may not name what starts with an underscore: {formula!r}")
    return tree


class _Replace(ast.NodeTransformer):
    def __init__(self, by: Mapping[str, ast.expr]) -> None:
        self.by = by

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.by.get(node.id, node)


def record(fields: Mapping[str, ast.expr], local: Mapping[str, ast.expr], when: ast.expr | None = None) -> CodeType:
    """Code for a dict of ``fields``, in which the names of ``local`` stand for those formulas; for None where ``when``
    does not hold."""
    values = [_Replace(local).visit(value) for value in fields.values()]
    tree: ast.expr = ast.Dict([ast.Constant(name) for name in fields], values)
    return _code(tree if when is None else ast.IfExp(when, tree, ast.Constant(None)))


@lru_cache(maxsize=None, typed=True)
def compiled(formula: Any) -> CodeType:
    return _code(parse(formula))


def _code(tree: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(tree)), "<formula>", "eval")


def value(code: CodeType, names: Names, local: Names | None = None) -> Any:
    """What ``code`` comes to over ``local`` figures and, behind them, ``names``."""
    return eval(code, names, local)


def scope(**names: Any) -> Names:
    """Names for formulas: the given ones and FUNCTIONS, no built-in ones."""
    return {"__builtins__": {}, **FUNCTIONS, **names}


def let(figures: Mapping[str, Any], names: Names) -> Names:
    """``names`` with ``figures`` added to them, each a formula over those before it."""
    for name, formula in figures.items():
        names[name] = value(compiled(formula), names)
    return names
