from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from wire.config import Config, load_tables, merge, parse_override
from wire.errors import ConfigError


class Inner(Config):
    rate: float = Field(1.0, ge=0.0, le=1.0)
    names: tuple[str, ...] = ()


class Outer(Config):
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    spare: Inner | None = None
    free: dict[str, Any] = Field(default_factory=dict)
    count: int = 1


def test_tables_merge_and_lists_are_replaced() -> None:
    assert merge({"a": {"x": 1, "l": [1, 2]}, "b": 1}, {"a": {"y": 2, "l": [3]}}) == {"a": {"x": 1, "y": 2, "l": [3]}, "b": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a.b=true", {"a": {"b": True}}),
        ("a.b=[1, 2]", {"a": {"b": [1, 2]}}),
        ("a=plain words", {"a": "plain words"}),
        ('a="1"', {"a": "1"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=", {"a": ""}),
    ],
)
def test_overrides_parse_as_toml_else_as_text(text: str, expected: dict[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set takes"):
        parse_override(text)


def test_later_files_win_and_overrides_come_last(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("count = 1\n[inner]\nrate = 0.1\nnames = ['a', 'b']\n")
    second.write_text("[inner]\nrate = 0.2\n")
    tables = load_tables([first, second], ["count=5"])
    assert Outer.build(tables, source="test") == Outer(count=5, inner=Inner(rate=0.2, names=("a", "b")))


def test_an_unknown_key_is_named_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"cfg\.toml is not a valid Outer:\n  inner\.rat: .*got 0\.5"):
        Outer.build({"inner": {"rat": 0.5}}, source="cfg.toml")


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Outer.build(data, source="x")
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        ({"inner": {"rat": 0.5}}, "did you mean inner.rate?"),
        ({"inners": [{"name": ["a"]}]}, "did you mean inners.0.names?"),
        ({"spare": {"ratio": 1}}, "did you mean spare.rate?"),
        ({"iner": {"rate": 0.5}}, "did you mean inner?"),
        ({"rate": 0.5}, "did you mean inner.rate or inners.rate or spare.rate?"),
    ],
)
def test_an_unknown_key_comes_with_the_known_one_it_is_like(data: dict[str, Any], meant: str) -> None:
    assert meant in refusal(data)


def test_nothing_is_guessed_for_a_key_like_none() -> None:
    assert "did you mean" not in refusal({"inner": {"zzz": 1}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": 0.5}, "inner: a table is expected, with keys of rate, names; did you mean inner.rate? (got 0.5)"),
        ({"inner": ["a"]}, "inner: a table is expected, with keys of rate, names; did you mean inner.names? (got ['a'])"),
        ({"inner": "fast"}, "inner: a table is expected, with keys of rate, names (got 'fast')"),
        ({"spare": 0.5}, "spare: a table is expected, with keys of rate, names; did you mean spare.rate? (got 0.5)"),
        ({"inners": [0.5]}, "inners.0: a table is expected, with keys of rate, names; did you mean inners.0.rate? (got 0.5)"),
        ({"free": 3}, "free: a table is expected, set key by key: free.KEY=VALUE (got 3)"),
    ],
)
def test_a_value_in_the_place_of_a_table_comes_with_the_key_that_takes_it(data: dict[str, Any], message: str) -> None:
    assert f"  {message}" in refusal(data)


def test_true_is_taken_for_no_number() -> None:
    assert "did you mean" not in refusal({"inner": True})


def test_every_bad_value_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer.build({"inner": {"rate": 2.0}, "count": "many"}, source="x")
    assert "inner.rate" in str(caught.value)
    assert "count" in str(caught.value)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("a = = 1")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_tables([path])
    with pytest.raises(ConfigError, match="cannot read"):
        load_tables([tmp_path / "absent.toml"])


def test_resolved_json_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "role.json"
    config = Outer(count=3, inner=Inner(rate=0.5, names=("n",)))
    path.write_text(config.model_dump_json())
    assert Outer.read_json(path) == config


def test_unreadable_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paceline plan"):
        Outer.read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("text", ["pool=[{id=a, port=1}]", "a.b={x: 1}"])
def test_a_list_or_table_whose_quotes_the_shell_took_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="texts need quotes"):
        parse_override(text)
