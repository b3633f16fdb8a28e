"""Writing helpers of the targets: YAML by PyYAML, shell words by shlex, the few templates by Jinja2."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Block style; texts of several lines as literal blocks; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    # YAML 1.1 readers take a bare y or n for a boolean; PyYAML does not know that form
    style = "|" if "\n" in data else "'" if data in ("y", "Y", "n", "N") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _mapping(dumper: yaml.SafeDumper, data: Mapping[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items())


_Dumper.add_representer(str, _text)
for _kind in (dict, MappingProxyType):
    _Dumper.add_representer(_kind, _mapping)


def yaml_text(*documents: Any) -> str:
    """Documents as YAML in the order of their keys."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=4096)


def manifest_text(*documents: Any) -> str:
    """``yaml_text`` without the fields that are None."""
    return yaml_text(*map(_pruned, documents))


def _pruned(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _pruned(value) for name, value in tree.items() if value is not None}
    return [_pruned(value) for value in tree] if isinstance(tree, list) else tree


@cache
def _environment() -> Any:
    import jinja2  # late, so that a server starts at once

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perfcast_deploy"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["words"] = shlex.join
    environment.filters["word"] = shlex.quote
    return environment


def render(template: str, **values: Any) -> str:
    """One of the package's templates; missing values are errors."""
    text: str = _environment().get_template(template).render(**values)
    return text


def env_list(env: Mapping[str, str]) -> list[dict[str, str]]:
    """Container environment of a mapping."""
    return [{"name": name, "value": str(value)} for name, value in env.items()]


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` over ``base``: mappings merge deeply, everything else is replaced."""
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
