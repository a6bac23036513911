"""The KV index against a slow, obvious one, and its bounds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from server.routing.blocks import reusable_tokens
from server.routing.index import KvIndex
from wire.kv_blocks import prompt_chain

BLOCK = 4
UNBOUNDED = 1 << 20


@dataclass
class PlainIndex:
    """Per engine: every stored prefix as a tuple, with its number of copies."""

    copies: dict[str, dict[tuple, int]] = field(default_factory=dict)

    def store(self, engine: str, prefix: tuple) -> None:
        held = self.copies.setdefault(engine, {})
        held[prefix] = held.get(prefix, 0) + 1

    def remove(self, engine: str, prefix: tuple) -> None:
        held = self.copies[engine]
        held[prefix] -= 1
        if held[prefix] == 0:
            del held[prefix]

    def count_held(self, engine: str, salt: str | None, tokens: list[int]) -> int:
        held = self.copies.get(engine, {})
        count = 0
        while (count + 1) * BLOCK <= len(tokens) and (salt, *tokens[: (count + 1) * BLOCK]) in held:
            count += 1
        return count


class FakeEngine:
    """Names blocks in its own way and publishes what it does to both indexes."""

    def __init__(self, name: str, index: KvIndex, plain: PlainIndex) -> None:
        self.name, self.index, self.plain = name, index, plain

    def hash_of(self, prefix: tuple) -> int:
        return hash((self.name, prefix))

    def store(self, salt: str | None, tokens: list[int], first: int, last: int) -> bool:
        prefixes = [(salt, *tokens[: (block + 1) * BLOCK]) for block in range(first, last)]
        parent = self.hash_of((salt, *tokens[: first * BLOCK])) if first else None
        keys = [[salt] if salt and block == 0 else None for block in range(first, last)]
        hashes = [self.hash_of(prefix) for prefix in prefixes]
        known = self.index.store(self.name, hashes, parent, tokens[first * BLOCK : last * BLOCK], BLOCK, keys)
        for prefix in prefixes if known else ():
            self.plain.store(self.name, prefix)
        return known

    def remove(self, prefix: tuple) -> None:
        self.index.remove(self.name, [self.hash_of(prefix)])
        self.plain.remove(self.name, prefix)

    def clear(self) -> None:
        self.index.clear(self.name)
        self.plain.copies.pop(self.name, None)


def random_prompt(rng: random.Random) -> tuple[str | None, list[int]]:
    """Few symbols and few salts, so that prompts share prefixes often."""
    salt = rng.choice([None, None, "a", "b"])
    return salt, [rng.choice([1, 1, 1, 2, 70_000]) for _ in range(rng.randrange(0, 8 * BLOCK))]


@pytest.mark.parametrize("seed", range(6))
def test_the_index_agrees_with_an_obvious_one(seed: int) -> None:
    rng = random.Random(seed)
    index, plain = KvIndex(UNBOUNDED), PlainIndex()
    engines = [FakeEngine(name, index, plain) for name in ("e0", "e1", "e2")]
    num_hits = num_removed = 0
    for _ in range(1500):
        engine = rng.choice(engines)
        salt, tokens = random_prompt(rng)
        held = plain.copies.get(engine.name, {})
        action = rng.random()
        if action < 0.6:
            num_blocks = len(tokens) // BLOCK
            known = plain.count_held(engine.name, salt, tokens)
            first = rng.randrange(0, min(known, num_blocks) + 1)
            assert engine.store(salt, tokens, first, num_blocks)
        elif action < 0.95 and held:
            engine.remove(rng.choice(sorted(held, key=repr)))
            num_removed += 1
        elif action > 0.995:
            engine.clear()
        salt, tokens = random_prompt(rng)
        for other in engines:
            expected = plain.count_held(other.name, salt, tokens)
            assert index.count_held(other.name, prompt_chain(tokens, BLOCK, salt)) == expected
            num_hits += expected > 0
        assert index.num_blocks == sum(len(blocks) for blocks in plain.copies.values())
    assert num_hits > 500
    assert num_removed > 100


@pytest.mark.parametrize("seed", range(4))
def test_a_bounded_index_never_claims_what_an_unbounded_one_does_not(seed: int) -> None:
    rng = random.Random(seed)
    index, plain = KvIndex(12), PlainIndex()
    shadow = KvIndex(UNBOUNDED)
    engine, other = FakeEngine("e0", index, plain), FakeEngine("e0", shadow, PlainIndex())
    num_hits = 0
    for _ in range(600):
        salt, tokens = random_prompt(rng)
        engine.store(salt, tokens, 0, len(tokens) // BLOCK)
        other.store(salt, tokens, 0, len(tokens) // BLOCK)
        assert index.num_blocks <= 12
        names = prompt_chain(tokens, BLOCK, salt)
        held = index.count_held("e0", names)
        assert held <= shadow.count_held("e0", names)
        num_hits += held > 0
    assert num_hits > 300


def test_a_used_prefix_outlives_newer_ones_nobody_asks_for() -> None:
    index = KvIndex(8)
    hot = list(range(4 * BLOCK))
    index.store("e0", [1, 2, 3, 4], None, hot, BLOCK)
    names = prompt_chain(hot, BLOCK, None)
    for number in range(20):
        index.store("e0", [100 + number], None, [900 + number] * BLOCK, BLOCK)
        assert index.count_held("e0", names) == 4
    assert index.num_blocks == 8


def test_the_end_of_a_chain_is_forgotten_before_its_start() -> None:
    index = KvIndex(4)
    tokens = list(range(4 * BLOCK))
    index.store("e0", [1, 2, 3, 4], None, tokens, BLOCK)
    index.store("e1", [1], None, [9] * BLOCK, BLOCK)
    assert index.count_held("e0", prompt_chain(tokens, BLOCK, None)) == 3


def test_what_follows_a_forgotten_block_is_cleaned_up() -> None:
    index = KvIndex(3)
    index.store("e0", [1], None, [1] * BLOCK, BLOCK)
    index.store("e0", [2, 3], 1, [2] * BLOCK + [3] * BLOCK, BLOCK)
    index.store("e1", [1], None, [1] * BLOCK, BLOCK)
    # The first block of e0 was the oldest; both blocks after it go with it.
    assert index.num_held("e0") == 0
    assert index.num_blocks == 1


def test_children_of_a_removed_block_count_again_once_it_is_back() -> None:
    index = KvIndex(UNBOUNDED)
    tokens = list(range(3 * BLOCK))
    index.store("e0", [1, 2, 3], None, tokens, BLOCK)
    names = prompt_chain(tokens, BLOCK, None)
    index.remove("e0", [1])
    assert index.count_held("e0", names) == 0
    index.store("e0", [1], None, tokens[:BLOCK], BLOCK)
    assert index.count_held("e0", names) == 3


def test_a_block_stored_twice_is_held_until_removed_twice() -> None:
    index = KvIndex(UNBOUNDED)
    for _ in range(2):
        index.store("e0", [1], None, [5] * BLOCK, BLOCK)
    names = prompt_chain([5] * BLOCK, BLOCK, None)
    index.remove("e0", [1])
    assert index.count_held("e0", names) == 1
    index.remove("e0", [1])
    assert index.count_held("e0", names) == 0
    index.remove("e0", [1])
    assert index.num_blocks == 0


def test_blocks_after_an_unknown_parent_are_refused() -> None:
    index = KvIndex(UNBOUNDED)
    assert not index.store("e0", [2], 1, [5] * BLOCK, BLOCK)
    assert index.num_blocks == 0


def test_salts_and_block_sizes_keep_chains_apart() -> None:
    index = KvIndex(UNBOUNDED)
    tokens = [5] * 8
    index.store("e0", [1, 2], None, tokens, 4, [["tenant"], None])
    assert index.count_held("e0", prompt_chain(tokens, 4, "tenant")) == 2
    assert index.count_held("e0", prompt_chain(tokens, 4, None)) == 0
    assert index.count_held("e0", prompt_chain(tokens, 4, "other")) == 0
    assert index.count_held("e0", prompt_chain(tokens, 8, "tenant")) == 0


@pytest.mark.parametrize(
    ("num_held", "num_tokens", "speculative", "expected"),
    [
        (3, 13, False, 12),
        (3, 12, False, 8),
        (3, 13, True, 8),
        (3, 12, True, 4),
        (1, 100, True, 0),
        (0, 100, True, 0),
        (0, 0, True, 0),
        (9, 1, False, 0),
    ],
)
def test_reusable_tokens_leave_out_what_the_engine_computes_anyway(
    num_held: int, num_tokens: int, speculative: bool, expected: int
) -> None:
    assert reusable_tokens(num_held, num_tokens, 4, speculative=speculative) == expected


def test_holders_of_a_block_are_those_that_hold_all_before_it_too() -> None:
    index = KvIndex(UNBOUNDED)
    token_ids = list(range(3 * BLOCK))
    names = prompt_chain(token_ids, BLOCK, None)
    for engine_id in ("a", "b"):
        assert index.store(engine_id, [1, 2, 3], None, token_ids, BLOCK)
    index.remove("b", [2])
    assert index.holders(names[2]) == {"a": names}
    assert index.holders(names[0]) == {"a": names[:1], "b": names[:1]}
    assert index.holders(prompt_chain(token_ids, BLOCK, "salt")[0]) == {}
