"""Configuration: frozen pydantic models, TOML written by people, resolved JSON read by roles.

TOML files are merged left to right (tables deeply, lists replaced), then `--set a.b=value` overrides apply.
The launcher writes one resolved JSON per role; a role reads only that.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from wire.config_hints import Location, key_for, near_keys, table_at
from wire.errors import ConfigError

_MESSAGES = {
    "tuple_type": "a list is wanted, given whole: --set 'pool=[{id=\"a\", port=8100}]', for instance",
}
"""In place of pydantic's own, by the type of problem."""


class Config(BaseModel):
    """Base of every configuration class: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    keys_are_told_in: ClassVar[str] = "configs/README.md"
    """Where a person finds every key of these files."""

    @classmethod
    def build(cls, data: Mapping[str, Any], *, source: str) -> Self:
        """Validate `data`; raises ConfigError naming `source`, each bad key and its value."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [f"{source} is not a valid {cls.__name__}:"]
            for problem in error.errors():
                key = ".".join(str(part) for part in problem["loc"]) or "(top level)"
                what = cls._what_is_wrong(problem["type"], problem["loc"], problem["input"])
                what = what or problem["msg"].removeprefix("Value error, ")
                got = f" (got {problem['input']!r})" if problem["loc"] else ""
                lines.append(f"  {key}: {what}{got}")
            raise ConfigError("\n".join(lines)) from None

    @classmethod
    def _what_is_wrong(cls, kind: str, location: Location, value: Any) -> str:
        """A problem in our words, and what was probably meant; empty where pydantic's words will do."""
        key = ".".join(map(str, location))
        if kind == "extra_forbidden":
            near = near_keys(cls, location)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            return f"unknown key, {hint}see {cls.keys_are_told_in}"
        table = table_at(cls, location) if location else None
        if kind == "model_type" and table is not None:
            meant = key_for(table, value)
            hint = f"; did you mean {key}.{meant}?" if meant else ""
            return f"a table is expected, with keys of {', '.join(table.model_fields)}{hint}"
        if kind == "dict_type":
            return f"a table is expected, set key by key: {key}.KEY=VALUE"
        return _MESSAGES.get(kind, "")

    @classmethod
    def read_json(cls, path: Path) -> Self:
        """Read the resolved JSON of a role; raises ConfigError."""
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}; run `paceline plan` to write it anew") from error
        return cls.build(data, source=str(path))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of two tables: sub-tables merge, everything else (lists too) is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as a nested table. `value` is TOML where it parses as TOML, else a plain string.

    Raises ConfigError for what is neither: a list or a table whose quotes the shell took.
    """
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set takes key.path=value, got {text!r}")
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError) as error:
        if raw.lstrip().startswith(("[", "{")):
            raise ConfigError(
                f"--set {key}: {raw!r} is not TOML ({error}); texts need quotes, and the shell keeps them inside others: "
                "--set 'pool=[{id=\"a\", port=8100}]'"
            ) from error
        value = raw
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def load_tables(paths: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The merged tables of TOML files and `--set` overrides; raises ConfigError."""
    tables: dict[str, Any] = {}
    for path in paths:
        try:
            tables = merge(tables, tomllib.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        except (ValueError, RecursionError) as error:  # of numbers with thousands of digits too, and of endless brackets
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for text in overrides:
        tables = merge(tables, parse_override(text))
    return tables
