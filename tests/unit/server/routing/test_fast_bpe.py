"""The fast tokenizer against the one engines use."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from server.routing import fast_bpe
from server.routing.fast_bpe import MAX_CHARS, FastBpe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog; it's what they'll do, isn't it?",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(100):\n\tprint(i)",
    "déjà vu 日本語 größer 🙂🙂 x² ½",
] * 3
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL,
            show_progress=False,
        ),
    )
    return tokenizer


def gpt2() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def split_by(pattern: str) -> Tokenizer:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(pre_tokenizers.Sequence([words, level]))  # type: ignore[list-item]


def qwen() -> Tokenizer:
    tokenizer = split_by(QWEN_WORDS)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def cl100k() -> Tokenizer:
    return split_by(CL100K_WORDS)


def by_hand(merges: list[tuple[str, str]], without: str = "") -> Tokenizer:
    alphabet = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in without]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def random_text(draw: random.Random) -> str:
    pieces = [*"abthe019 '\n\t.,;é日🙂\u0301\u00a0\u2003ñß", *SPECIAL, "<|im_", "  ", "'re", "'LL", "hello", "1234", "\r\n"]
    return "".join(
        draw.choice(pieces) if draw.random() < 0.9 else chr(draw.randrange(0x20, 0x3000)) for _ in range(draw.randrange(1, 40))
    )


@pytest.mark.parametrize("make", [gpt2, qwen, cl100k])
def test_random_texts_get_the_ids_of_the_engines_tokenizer(make: Callable[[], Tokenizer]) -> None:
    tokenizer, draw = make(), random.Random(1)
    fast = FastBpe.of(tokenizer)
    assert fast is not None
    num_encoded = 0
    for number in range(3000):
        text = random_text(draw)
        if number % 2:
            text = text.encode("ascii", "ignore").decode()
        ids = fast.encode(text)
        assert ids is None or ids == tokenizer.encode(text, add_special_tokens=False).ids
        num_encoded += ids is not None
    assert num_encoded >= 1500


def test_an_empty_text_has_no_ids() -> None:
    fast = FastBpe.of(gpt2())
    assert fast is not None
    assert fast.encode("") == []


def test_text_that_normalizing_may_change_is_left_to_the_engines_tokenizer() -> None:
    fast = FastBpe.of(qwen())
    assert fast is not None
    assert fast.encode("e\u0301") is None
    assert fast.encode("plain") is not None


def test_very_long_texts_are_left_to_the_engines_tokenizer() -> None:
    fast = FastBpe.of(gpt2())
    assert fast is not None
    assert fast.encode(" " * MAX_CHARS + "x") is None
    assert fast.encode(" " * (MAX_CHARS - 1) + "x") == gpt2().encode(" " * (MAX_CHARS - 1) + "x").ids


def test_a_byte_without_a_token_is_left_to_the_engines_tokenizer() -> None:
    tokenizer = by_hand([("h", "e")], without="Ã")
    fast = FastBpe.of(tokenizer)
    assert fast is not None
    assert fast.encode("he é") is None
    assert fast.encode("he e") == tokenizer.encode("he e").ids


def test_what_is_no_unicode_text_is_an_error() -> None:
    fast = FastBpe.of(gpt2())
    assert fast is not None
    with pytest.raises(UnicodeError):
        fast.encode("a\ud800b")


def test_tokenizers_that_disagree_on_their_own_vocabulary_are_not_taken() -> None:
    assert FastBpe.of(by_hand([("a", "b"), ("b", "c"), ("ab", "c")])) is not None
    # "abc" never comes to be here: "bc" is merged first, and nothing merges "a" with it.
    assert FastBpe.of(by_hand([("b", "c"), ("a", "b"), ("ab", "c")])) is None


@pytest.mark.parametrize("make", [gpt2, qwen, cl100k])
def test_every_tokenizer_is_tried_on_its_words_as_texts_that_are_not_left_to_the_other(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    agree = fast_bpe._agree

    def noted(fast: FastBpe, tokenizer: Tokenizer, text: str) -> bool:
        tried.append(text)
        assert fast.encode(text) is not None
        return agree(fast, tokenizer, text)

    monkeypatch.setattr(fast_bpe, "_agree", noted)
    assert FastBpe.of(make()) is not None
    assert all(word in tried[0] for word in ("quick", " return", "<|im_start|>", "\n\n"))


def test_a_token_that_the_merges_never_make_of_its_own_text_is_noticed_wherever_it_is_hidden() -> None:
    # "qht" is "q" and "ht" to the engine. Behind other tokens and behind spaces "q" is taken by what stands before it.
    assert by_hand(hidden := [("h", "t"), ("Ġ", "q"), ("h", "q"), ("q", "h"), ("qh", "t")]).encode("qht").tokens == ["q", "ht"]
    assert FastBpe.of(by_hand(hidden)) is None
    assert FastBpe.of(by_hand([("q", "h"), *hidden[:3], hidden[4]])) is not None


def test_a_model_that_takes_whole_words_before_merges_is_not_taken() -> None:
    tokenizer = by_hand([("a", "b"), ("ab", "c")])
    tokenizer.model = models.BPE(vocab=tokenizer.get_vocab(), merges=[("a", "b"), ("ab", "c")], ignore_merges=True)
    assert FastBpe.of(tokenizer) is None


def test_ids_that_do_not_follow_the_merges_are_not_taken() -> None:
    tokenizer = by_hand([("a", "b"), ("c", "d")])
    vocabulary = tokenizer.get_vocab()
    vocabulary["ab"], vocabulary["cd"] = vocabulary["cd"], vocabulary["ab"]
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[("a", "b"), ("c", "d")])
    assert FastBpe.of(tokenizer) is None


def test_added_tokens_that_take_more_than_their_text_are_not_taken() -> None:
    for odd in (AddedToken("<x>", lstrip=True), AddedToken("<x>", rstrip=True), AddedToken("<x>", single_word=True)):
        tokenizer = gpt2()
        tokenizer.add_tokens([odd])
        assert FastBpe.of(tokenizer) is None
    tokenizer = gpt2()
    tokenizer.add_special_tokens(["<|im_end|>x"])
    assert FastBpe.of(tokenizer) is None


def test_added_tokens_that_are_looked_for_after_others_are_not_taken() -> None:
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("x<", normalized=True)])
    # The engine's tokenizer finds "<|im_end|>" first, though "x<" begins before it.
    assert tokenizer.encode("x<|im_end|>").tokens == ["x", "<|im_end|>"]
    assert FastBpe.of(tokenizer) is None


def test_words_cut_by_other_patterns_are_not_taken() -> None:
    # The first matches nothing, on which tiktoken panics; the second is one that tiktoken cannot read.
    for pattern in (r"\s*", r"(?~abc)|\s+", QWEN_WORDS + r"|\p{M}"):
        assert FastBpe.of(split_by(pattern)) is None


@pytest.mark.parametrize("make", [gpt2, cl100k])
def test_every_character_is_of_the_kind_that_the_engines_tokenizer_takes_it_for(make: Callable[[], Tokenizer]) -> None:
    # A letter is in one word with "a", a digit with "1", what is neither nor a space with "!": only there it is merged with it.
    tokenizer = by_hand([(kind, letter) for kind in "a1!" for letter in sorted(pre_tokenizers.ByteLevel.alphabet())])
    tokenizer.pre_tokenizer = make().pre_tokenizer
    fast = FastBpe.of(tokenizer)
    assert fast is not None
    places = [*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x20000)]
    for start in range(0, len(places), 500):
        text = "".join(f"a{chr(place)} 1{chr(place)} !{chr(place)}\n" for place in places[start : start + 500])
        assert fast.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_other_kinds_of_tokenizers_are_not_taken() -> None:
    prefixed, metaspace, lower = gpt2(), gpt2(), gpt2()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    lower.normalizer = normalizers.Lowercase()
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    no_steps, no_tokens = gpt2(), Tokenizer(models.BPE())
    no_steps.pre_tokenizer = pre_tokenizers.Sequence([])
    no_tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for tokenizer in (prefixed, metaspace, lower, words, no_steps, no_tokens, Tokenizer(models.BPE())):
        assert FastBpe.of(tokenizer) is None
