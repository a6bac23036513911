"""Hints: which known key a person who wrote an unknown one, or a value in a table's place, probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

MAX_NAMED = 3
"""Keys of one name that are worth listing; a name that more tables have says nothing."""

Location = Sequence[str | int]
"""Of a value: keys, and places in lists."""


def near_keys(model: type[BaseModel], location: Location) -> list[str]:
    """Known keys like an unknown one: the nearest of its table, else those of its very name elsewhere; may be empty."""
    *above, key = map(str, location)
    table = table_at(model, location[:-1])
    if table is None:
        return []
    if near := get_close_matches(key, table.model_fields, n=1):
        return [".".join([*above, near[0]])]
    namesakes = [path for path in _paths(model) if path.rpartition(".")[2] == key]
    return namesakes if len(namesakes) <= MAX_NAMED else []


def key_for(table: type[BaseModel], value: Any) -> str | None:
    """The first key of a table that takes a value, None where none does."""
    return next((name for name in table.model_fields if _takes(table, name, value)), None)


def table_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """What describes the table at a place; None where none does."""
    table: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, str):
            field = table.model_fields.get(part) if table is not None else None
            table = _table_in(field.annotation) if field is not None else None
    return table


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The table an annotation speaks of, in a union or a list too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for one in get_args(annotation) if (table := _table_in(one)) is not None), None)


def _paths(model: type[BaseModel]) -> Iterator[str]:
    """Every key of a configuration, dotted."""
    for name, field in model.model_fields.items():
        yield name
        if (table := _table_in(field.annotation)) is not None:
            yield from (f"{name}.{path}" for path in _paths(table))


def _takes(table: type[BaseModel], name: str, value: Any) -> bool:
    try:
        # Unless strict, true is a number and a text as well.
        table.model_validate({name: value}, strict=isinstance(value, bool) or None)
    except ValidationError as error:
        # Others may be missing, and rules over several keys are not this one's.
        return all(problem["loc"] and problem["loc"][0] != name for problem in error.errors())
    return True
