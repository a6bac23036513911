"""TeacherCache: the target's predictions at each remembered request, made once and used on every pass.

Rows before the first completion row are prompt: nothing is learned there, so nothing is computed.

Shape letters: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafter.head import Head
from drafter.teacher import TeacherRows, teach
from learner.request import CapturedRequest


class TeacherCache:
    """By request key. Rows made for another vocabulary are made anew."""

    def __init__(self, *, temperature: float) -> None:
        self._temperature = temperature
        self._rows: dict[str, TeacherRows] = {}

    def rows(self, request: CapturedRequest, head: Head) -> TeacherRows:
        """TeacherRows aligned with the request's rows; prompt rows hold zeros."""
        cached = self._rows.get(request.key)
        if cached is None or cached.vocabulary_sha256 != head.vocabulary.sha256:
            cached = self._rows[request.key] = self._make(request, head)
        num_prompt = request.rows.positions_T.numel() - cached.entropy_T.numel()
        return replace(
            cached,
            expected_TD=torch.nn.functional.pad(cached.expected_TD.float(), (0, 0, num_prompt, 0)),
            entropy_T=torch.nn.functional.pad(cached.entropy_T, (num_prompt, 0)),
            best_T=torch.nn.functional.pad(cached.best_T, (num_prompt, 0)),
        )

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._rows.pop(key, None)

    def _make(self, request: CapturedRequest, head: Head) -> TeacherRows:
        rows = request.rows
        first = int((rows.positions_T < rows.num_prompt_tokens).sum())
        made = teach(rows.hidden_TD[first:], head, temperature=self._temperature)
        return replace(made, expected_TD=made.expected_TD.bfloat16())
