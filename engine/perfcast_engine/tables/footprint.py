"""Bytes that structures take, found by following what they refer to."""

from __future__ import annotations

import gc
import sys
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import numpy as np

CODE = (type, ModuleType, CodeType, BuiltinFunctionType, Enum)
FLOAT = sys.getsizeof(0.5)


def footprint(root: object, seen: set[int], apart: tuple[type, ...] = ()) -> int:
    """Bytes of ``root`` and all behind it, once each, but for code, for what is of the types ``apart``, and for what
    is ``seen``, which grows. An object with ``nbytes`` says itself what it takes."""
    total, left = 0, [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (*CODE, *apart)):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray) and each.base is not None:
            left.append(each.base)
        elif isinstance(each, memoryview):
            left.append(each.obj)
        elif (counted := getattr(each, "nbytes", None)) is not None:
            total += counted
        elif isinstance(each, FunctionType):
            left += each.__closure__ or ()
        elif isinstance(each, list) and _is_of_numbers(each):
            total += sys.getsizeof(each) + FLOAT * len(each)
        elif isinstance(each, list) and each and _is_of_numbers(each[0]):  # long ones are of equal parts
            total += sys.getsizeof(each) + len(each) * (sys.getsizeof(each[0]) + FLOAT * len(each[0]))
        else:
            total += sys.getsizeof(each)
            left += gc.get_referents(each)
    return total


def _is_of_numbers(each: object) -> bool:
    return isinstance(each, list | tuple) and bool(each) and type(each[0]) is float
