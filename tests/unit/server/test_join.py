"""Where a broken answer is taken up: ids and text on both sides of the cut agree, whatever the cut."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_model import build_tokenizer
from tokenizers.decoders import DecodeStream

from server.relay.join import MAX_TOKENS_BACK, CannotResume, Join, find_join
from server.relay.resumable import MAX_STOP_CHARS, MAX_STOPS

TEXT = "the quick brown fox — ünïcödé 🦊🦊 — jumps over the lazy dog"


def test_kept_ids_and_sent_text_meet_at_every_cut(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    prompt_ids, ids = tokenizer.encode("say it: ").ids, tokenizer.encode(TEXT).ids
    rng = random.Random(3)
    seen: set[tuple[bool, bool]] = set()
    for num_ids in range(len(ids) + 1):
        known = tokenizer.decode(ids[:num_ids]).rstrip("\ufffd")
        for stops in ([], ["fox!"], ["never", " "]):
            sent = known[: max(len(known) - rng.randrange(4), 0)]
            join = find_join(lambda part: tokenizer.decode(list(part)), prompt_ids, ids[:num_ids], sent, stops)
            kept = tokenizer.decode(ids[: join.num_kept]).rstrip("\ufffd")
            assert kept + join.overlap == sent + join.ahead
            assert TEXT.startswith(sent + join.ahead)
            assert not (join.ahead and join.overlap)
            assert not any(kept.endswith(stop[0]) for stop in stops if len(stop) > 1)
            seen.add((bool(join.ahead), bool(join.overlap)))
    assert seen >= {(False, False), (True, False), (False, True)}


def test_nothing_sent_keeps_nothing_or_what_was_not_shown(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ids = tokenizer.encode("🦊").ids

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part))

    assert find_join(decode, [5], [], "", []) == Join(0, "", "")
    assert find_join(decode, [5], ids[:2], "", []) == Join(0, "", ""), "half a character is made anew"


def test_text_that_ids_do_not_give_is_an_error(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT * 8).ids
    assert len(ids) > MAX_TOKENS_BACK
    with pytest.raises(CannotResume, match="token ids"):
        find_join(lambda part: tokenizer.decode(list(part)), [5], ids, "another text", [])


def test_stop_string_is_not_missed_because_it_begins_before_the_cut(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)

    def join(sent: str, known: str) -> Join:
        ids = tokenizer.encode(known).ids
        return find_join(lambda part: tokenizer.decode(list(part)), [5], ids, sent, ["END", "never"])

    with pytest.raises(CannotResume, match="stop string"):
        join("the E", "the E")
    with pytest.raises(CannotResume, match="stop string"):
        join("the E", "the EN")
    assert join("the E", "the EXY").ahead == "XY", "what was held back is known to go on otherwise"
    assert join("the E", "the EXE").ahead == "X", "and the last letter is made anew"


@pytest.mark.parametrize("text", ["ab \ufffd\nfox", "\ufffd\nfox", "fox\ufffd\ufffd\ufffdbar", "fox \ufffd🦊\ufffd\n"])
def test_engine_primed_with_what_is_kept_emits_nothing_of_it_again(tmp_path: Path, text: str) -> None:
    tokenizer = build_tokenizer(tmp_path)
    prompt_ids, ids = tokenizer.encode("say it: ").ids, tokenizer.encode(text).ids
    seen: set[int] = set()
    for num_ids in range(1, len(ids) + 1):
        stream = DecodeStream(ids=prompt_ids)
        known = "".join(stream.step(tokenizer, token) or "" for token in ids[:num_ids])
        for num_held in range(len(known) + 1):
            sent = known[: len(known) - num_held]
            join = find_join(
                lambda part: tokenizer.decode(list(part)), prompt_ids, ids[:num_ids], sent, ["\n" * (num_held + 1)]
            )
            next_engine = DecodeStream(ids=[*prompt_ids, *ids[: join.num_kept]])
            rest = "".join(next_engine.step(tokenizer, token) or "" for token in ids[join.num_kept :])
            assert rest.startswith(join.overlap)
            assert sent + join.ahead + rest.removeprefix(join.overlap) == text.rstrip("\ufffd")
            seen.add(num_ids - join.num_kept)
    assert max(seen) >= 3, "whole characters are gone back over"


def test_nothing_can_be_kept_after_a_prompt_that_ends_with_half_a_character(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    half = tokenizer.encode("say 🦊").ids[:-1]
    with pytest.raises(CannotResume, match="half a character"):
        find_join(lambda part: tokenizer.decode(list(part)), half, [], "", [])


def test_long_stop_strings_cost_no_more_than_the_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT).ids
    started_s = time.perf_counter()
    join = find_join(lambda part: tokenizer.decode(list(part)), [5], ids, TEXT, ["z" * 600_000] * 4)
    assert time.perf_counter() - started_s < 1.0, "slices of every length took minutes"
    assert join == Join(len(ids), "", "")


def test_most_and_longest_stop_strings_that_are_resumed_cost_little(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ids = tokenizer.encode("x" * (MAX_STOP_CHARS + MAX_TOKENS_BACK)).ids
    # Each place that is tried could begin the last one, only.
    stops = [*["x" * (MAX_STOP_CHARS - 1 - index) + "y" for index in range(MAX_STOPS - 1)], "x" * MAX_STOP_CHARS]
    started_s = time.perf_counter()
    with pytest.raises(CannotResume):
        find_join(lambda part: tokenizer.decode(list(part)), [5], ids, "x" * MAX_STOP_CHARS, stops)
    assert time.perf_counter() - started_s < 1.0
