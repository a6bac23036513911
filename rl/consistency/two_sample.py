"""Does speculation change what is drawn? Permutation tests of rollouts with it against rollouts without it.

If it changes nothing, which of the answers to a prompt were drawn with speculation is a coin's choice: the observed difference is
then one of those that shuffling the labels within each prompt gives. That makes the p-value exact at every sample size, however
the tokens of one answer hang together (Good, "Permutation tests", 1994; kernel form: Gretton et al., JMLR 13, 2012).

Shape letters: N answers to one prompt, F features of them, P permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rl.consistency.rescored import Floats
from wire.errors import RolloutError

Answer = Sequence[int]
Feature = tuple[str, int, int]
_BLOCK = 16_384
"""Features that are counted at a time: what holds memory to so many numbers per answer."""
_TIE = 1e-12
"""Of the largest difference there could be; sums in another order must not count as a larger difference."""


@dataclass(frozen=True)
class TwoSample:
    statistic: float
    p_value: float
    """How often a difference as large comes about where there is none; the smallest possible is 1 / (num_permutations + 1)."""
    num_permutations: int


def same_distribution(
    on: Sequence[Sequence[Answer]], off: Sequence[Sequence[Answer]], *, seed: int, num_permutations: int = 2000
) -> TwoSample:
    """on[i], off[i]: token ids of the answers to prompt i, end token included. Raises RolloutError where a side lacks some.

    The statistic is sum over prompts and features f of (on_f / n_on - off_f / n_off)^2 / (on_f + off_f): chi-square of the counts
    of tokens by position, of neighbouring tokens and of lengths.
    """
    _require_pairs(on, off)
    generator = np.random.default_rng(seed)
    observed, largest, shuffled_P = 0.0, 0.0, np.zeros(num_permutations)
    for with_it, without in zip(on, off, strict=True):
        kernel_NN = _kernel([*with_it, *without])
        signs_N = _signs(len(with_it), len(without))
        observed += float(signs_N @ kernel_NN @ signs_N)
        largest += float(np.abs(signs_N) @ kernel_NN @ np.abs(signs_N))
        signs_PN = generator.permuted(np.tile(signs_N, (num_permutations, 1)), axis=1)
        shuffled_P += ((signs_PN @ kernel_NN) * signs_PN).sum(-1)
    return _result(observed, largest, shuffled_P)


def same_mean(on: Sequence[float], off: Sequence[float], *, seed: int, num_permutations: int = 2000) -> TwoSample:
    """One number per rollout, such as its mean |d log p|; the statistic is the distance of the two means. Raises RolloutError."""
    _require_pairs([on], [off])
    generator = np.random.default_rng(seed)
    values_N = np.asarray([*on, *off], np.float64)
    signs_N = _signs(len(on), len(off))
    signs_PN = generator.permuted(np.tile(signs_N, (num_permutations, 1)), axis=1)
    largest = float(np.abs(signs_N) @ np.abs(values_N))
    return _result(abs(float(signs_N @ values_N)), largest, np.abs(signs_PN @ values_N))


def features(answer: Answer) -> list[Feature]:
    """What is counted of an answer."""
    places = [("at", position, token) for position, token in enumerate(answer)]
    pairs = [("pair", before, after) for before, after in pairwise(answer)]
    return [*places, *pairs, ("length", len(answer), 0)]


def _kernel(answers: Sequence[Answer]) -> Floats:
    """[N, N]: sum over features of how often one answer has it times how often the other, over how often all of them have it.

    In blocks of features: long answers have many, and few in common.
    """
    index: dict[Feature, int] = {}
    found = [(row, index.setdefault(each, len(index))) for row, answer in enumerate(answers) for each in features(answer)]
    rows, columns = np.asarray(found, np.int64).T
    kernel_NN = np.zeros((len(answers), len(answers)))
    for begin in range(0, len(index), _BLOCK):
        is_here = (columns >= begin) & (columns < begin + _BLOCK)
        counts_NF = np.zeros((len(answers), min(_BLOCK, len(index) - begin)))
        np.add.at(counts_NF, (rows[is_here], columns[is_here] - begin), 1.0)
        kernel_NN += (counts_NF / counts_NF.sum(0)) @ counts_NF.T
    return kernel_NN


def _signs(num_on: int, num_off: int) -> Floats:
    """[N]: what to multiply with so that a sum becomes the difference of the two means."""
    return np.concatenate([np.full(num_on, 1.0 / num_on), np.full(num_off, -1.0 / num_off)])


def _result(observed: float, largest: float, shuffled_P: Floats) -> TwoSample:
    num_larger = int((shuffled_P >= observed - _TIE * largest).sum())
    return TwoSample(observed, (1 + num_larger) / (1 + shuffled_P.size), shuffled_P.size)


def _require_pairs(on: Sequence[Sequence[object]], off: Sequence[Sequence[object]]) -> None:
    if not on or len(on) != len(off):
        raise RolloutError(f"{len(on)} prompts with speculation, {len(off)} without; draw from the same prompts, at least one")
    for index, (with_it, without) in enumerate(zip(on, off, strict=True)):
        if not with_it or not without:
            raise RolloutError(
                f"prompt {index} has {len(with_it)} answers with speculation and {len(without)} without; draw both"
            )
