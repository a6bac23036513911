"""FastBpe: text to token ids by `tiktoken`, for the byte-level BPE tokenizers that it can express.

Engines tokenize with `tokenizers`, so that is what is right. It is also what a first byte waited for longest: a prompt of 500
characters that comes after a pause, with the processor's caches gone cold, takes it 0.5 ms and `tiktoken` 0.17 ms.

`tiktoken` merges the two neighbours whose bytes together are the token of the lowest id; `tokenizers` merges pairs, in the order
of a list. Both come to the same where ids follow that list, each token is made by one pair, and the list makes each token of its
own text: then two neighbours that are a token together are its pair. All that is looked at, and how text is cut into words is
tried on the tokenizer's own vocabulary. Whatever is out of the ordinary is left to `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import tiktoken
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

MAX_CHARS = 50_000
"""Of a text encoded here; the regular expressions of `tiktoken` give up on runs of spaces that are much longer."""
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's, which the ByteLevel pre-tokenizer applies by itself (openai/gpt-2, src/encoder.py)."""
_LATER_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_WORDS = (_LATER_WORDS % r"\p{N}", _LATER_WORDS % r"\p{N}{1,3}")
"""Qwen2's, and that of cl100k_base (openai/tiktoken, tiktoken_ext/openai_public.py) as Llama 3 and others write it. No others are
taken: on a match of nothing `tiktoken` panics, and the two read some regular expressions differently."""
_PROBE_CHARS = 16_000


class FastBpe:
    """One tokenizer's ids, without those its post-processor adds."""

    def __init__(self, encoding: tiktoken.Encoding, num_ids: int, *, needs_ascii: bool) -> None:
        self._encoding = encoding
        self._num_ids = num_ids
        self._needs_ascii = needs_ascii

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FastBpe | None:
        """None where the tokenizer is of another kind, or the two disagree."""
        parts = json.loads(tokenizer.to_str())
        pattern = _pattern(parts)
        special = _special_ids(tokenizer)
        ranks = _ranks(tokenizer, parts["model"], special.values()) if pattern and special is not None else None
        if pattern is None or special is None or not ranks:
            return None
        words = [*special, *(token.decode(errors="replace") for token in ranks)]
        num_ids = max([*ranks.values(), *special.values()]) + 1
        # `tiktoken` cannot be without a byte; `tokenizers` skips those it has no token for.
        missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in ranks]
        ranks |= {byte: num_ids + place for place, byte in enumerate(missing)}
        encoding = tiktoken.Encoding("target", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        needs_ascii = parts["normalizer"] is not None
        fast = cls(encoding, num_ids, needs_ascii=needs_ascii)
        return fast if all(_agree(fast, tokenizer, text) for text in _probes(words, needs_ascii=needs_ascii)) else None

    def encode(self, text: str) -> list[int] | None:
        """None where `tokenizers` must be asked; raises UnicodeError for what is no Unicode text."""
        if len(text) > MAX_CHARS or (self._needs_ascii and not text.isascii()):
            return None
        text.encode()
        ids = self._encoding.encode(text, allowed_special="all")
        return ids if max(ids, default=0) < self._num_ids else None


def _pattern(parts: Mapping[str, Any]) -> str | None:
    """The regular expression that cuts text into words; None where more than that is done to it."""
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        return None
    whole = parts["pre_tokenizer"] or {}
    steps = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    match steps[:-1]:
        case []:
            return _WORDS if last["use_regex"] else None
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}]:
            return pattern if pattern in _SPLIT_WORDS and not last["use_regex"] else None
    return None


def _special_ids(tokenizer: Tokenizer) -> dict[str, int] | None:
    """By text; None where a token takes more than its own text, begins with another one, or is looked for after others."""
    added = tokenizer.get_added_tokens_decoder()
    texts = sorted(token.content for token in added.values())
    overlap = any(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    is_in_turns = len({token.normalized for token in added.values()}) > 1
    if overlap or is_in_turns or any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    return {token.content: token_id for token_id, token in added.items()}


def _ranks(tokenizer: Tokenizer, model: Mapping[str, Any], special_ids: Collection[int]) -> dict[bytes, int] | None:
    """Token ids by bytes; None where merging by them is not merging by the list of pairs (this file's first lines)."""
    plain = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    if model["type"] != "BPE" or any(affixes) or any(model.get(name) not in (None, value) for name, value in plain.items()):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    merged = [vocabulary["".join(pair)] for pair in model["merges"]]
    if merged != sorted(set(merged)):
        return None
    taken = set(special_ids)
    units = {token: token_id for token, token_id in vocabulary.items() if token_id not in taken}
    if {token_id for token, token_id in units.items() if len(token) > 1} != set(merged):
        return None
    if any(len(tokenizer.model.tokenize(token)) != 1 for token in units):
        return None
    try:
        return {bytes(_BYTES[unit] for unit in token): token_id for token, token_id in units.items()}
    except KeyError:
        return None


def _byte_units() -> dict[str, int]:
    """Bytes by the letters that byte-level vocabularies write them with: printable ones by their own, the others in order."""
    letters = sorted(ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in own.values()]
    return own | dict(zip([letter for letter in letters if ord(letter) >= 256], others, strict=True))


_BYTES = _byte_units()


def _probes(words: list[str], *, needs_ascii: bool) -> Iterator[str]:
    """Texts of all words, or of those in ASCII, one after another and with spaces between them."""
    tried = [word for word in words if word.isascii()] if needs_ascii else words
    for gap in ("", " "):
        text = gap.join(tried)
        yield from (text[start : start + _PROBE_CHARS] for start in range(0, len(text), _PROBE_CHARS))


def _agree(fast: FastBpe, tokenizer: Tokenizer, text: str) -> bool:
    ids = fast.encode(text)
    return ids is None or ids == tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
