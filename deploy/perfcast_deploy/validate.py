"""Checks of generated documents against schemas kept as data, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import yaml
from perfcast_engine.errors import EngineError, InvalidField

from perfcast_deploy.catalog import data_file

MAX_DEPTH, MAX_NODES = 64, 200_000
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _validator(kind: str) -> Any:
    import jsonschema  # late, so that a server starts at once

    schemas = data_file("schemas.yaml")
    schema: dict[str, Any] = {"type": "object", "$defs": schemas["$defs"], **schemas["kinds"][kind]}
    if kind not in ("HelmValues", "Kustomization"):
        required = ["apiVersion", "kind", "metadata"]
        schema = {
            **schema,
            "required": required,
            "properties": {**schema["properties"], "metadata": {"$ref": "#/$defs/metadata"}},
        }
    return jsonschema.Draft202012Validator(schema)


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Files of others can lack or twist anything: what trips over their shape is InvalidField, naming ``what``."""
    try:
        yield
    except EngineError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InvalidField(what, f"has an unexpected shape: {type(error).__name__}: {error}", "shape") from error


def read_yaml(name: str, text: str) -> list[dict[str, Any]]:
    """The documents of a file; InvalidField, naming it, for damaged YAML and for what aliases would blow up."""
    try:
        documents = [document for document in yaml.load_all(text, LOADER) if document is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidField(name, f"is no YAML: {' '.join(str(error).split())[:300]}", "yaml") from error
    _check_size(name, documents)
    if not all(isinstance(document, dict) for document in documents):
        raise InvalidField(name, "holds something other than mappings", "shape")
    return documents


def _check_size(name: str, tree: Any) -> None:
    """Aliases make a small text a large tree: everything that walks it would."""
    level, nodes = [tree], 0
    for _ in range(MAX_DEPTH):
        parents = [node for node in level if isinstance(node, dict | list)]
        nodes += sum(map(len, parents))
        if nodes > MAX_NODES or not parents:
            level = parents
            break
        level = [child for node in parents for child in (node.values() if isinstance(node, dict) else node)]
    if level:
        raise InvalidField(name, "is nested or repeated beyond all measure", "size")


def problems(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(file and path, what is wrong) of everything that a schema knows; engine files and scripts are passed over."""
    for name, text in files.items():
        if not name.endswith((".yaml", ".yml")) or name.endswith("_config.yaml") or name == "front.yaml":
            continue
        for document in read_yaml(name, text):
            kind = document.get("kind") or ("HelmValues" if "modelArtifacts" in document else None)
            if kind not in data_file("schemas.yaml")["kinds"]:
                yield name, f"unknown kind {kind!r}"
                continue
            for error in _validator(str(kind)).iter_errors(document):
                path = "/".join(map(str, error.absolute_path))
                yield f"{name}:{kind}/{path}", error.message


def require_valid(files: Mapping[str, str]) -> None:
    """Raise with the first problem, if any."""
    for where, message in problems(files):
        raise InvalidField(where, message[:300], "schema")


def read_json(name: str, text: str) -> Any:
    """JSON without the non-numbers that Python would let through; InvalidField, naming the file, for anything else."""

    def refuse(token: str) -> Any:
        raise InvalidField(name, f"holds {token}, which is no number", "range")

    try:
        return json.loads(text, parse_constant=refuse)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidField(name, f"is no JSON: {error}", "json") from error
