"""Speculative sampling between two small Markov chains, right and wrong."""

from __future__ import annotations

from typing import Literal

import numpy as np

VOCAB = 6
END = 0
MAX_TOKENS = 8


def chain(seed: int) -> np.ndarray:
    """Next-token distribution of each token, [V, V]."""
    return np.random.default_rng(seed).dirichlet(np.ones(VOCAB), size=VOCAB)


def draw_answers(kind: Literal["plain", "exact", "wrong residual"], prompt: int, count: int, seed: int) -> list[list[int]]:
    """`exact`: Leviathan et al., ICML 2023, algorithm 1 with one proposal. `wrong residual`: on rejection drawn from p, not (p - q)+."""
    target_VV, draft_VV = chain(100), chain(101)
    generator = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        answer, last = [], 1 + prompt % (VOCAB - 1)
        while len(answer) < MAX_TOKENS:
            p_V, q_V = target_VV[last], draft_VV[last]
            if kind == "plain":
                last = int(generator.choice(VOCAB, p=p_V))
            else:
                last = int(generator.choice(VOCAB, p=q_V))
                if generator.random() >= p_V[last] / q_V[last]:
                    residual_V = np.maximum(p_V - q_V, 0.0) if kind == "exact" else p_V
                    last = int(generator.choice(VOCAB, p=residual_V / residual_V.sum()))
            answer.append(last)
            if last == END:
                break
        answers.append(answer)
    return answers
