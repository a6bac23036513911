"""Routing by load alone, until `server.routing.router` is here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import Raw

from server.fleet import Engine, Fleet


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...] | None = None
    salt: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    engine: Engine
    prefill: Engine | None
    path: str
    reason: str
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0


class Prompts:
    async def read(self, path: str, fields: Mapping[str, Raw]) -> Prompt:
        return Prompt()


class Router:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, prompt: Prompt, exclude: Collection[Engine] = ()) -> Route | None:
        engine = self._fleet.choose(exclude)
        if engine is None:
            return None
        prefills = [one for one in self._fleet.engines if one.kind == "prefill" and one.takes_requests]
        if prefills and engine.kind == "decode":
            return Route(engine, prefills[0], "remote_prefill", "by default")
        return Route(engine, None, "combined", "by default")
