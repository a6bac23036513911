"""Head: the frozen output rows of a draft and the target rows of the same tokens.

Shape letters: U draft vocabulary, V target vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Head:
    """weight_UD scores the draft's output, target_UD the target's hidden state; the same tensor unless imported."""

    vocabulary: DraftVocabulary
    weight_UD: Tensor
    target_UD: Tensor

    @property
    def is_target_rows(self) -> bool:
        """Then the vocabulary may be chosen anew for each published draft."""
        return self.weight_UD is self.target_UD

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Head:
        """The same head for products in `dtype`; rows that are the target's stay one tensor."""
        weight_UD = self.weight_UD.to(device, dtype)
        return Head(self.vocabulary, weight_UD, weight_UD if self.is_target_rows else self.target_UD.to(device, dtype))

    @classmethod
    def of_target(cls, vocabulary: DraftVocabulary, head_VD: Tensor) -> Head:
        """Copies of the target's rows, in the target's dtype."""
        rows_UD = head_VD[vocabulary.ids_U].contiguous()
        return cls(vocabulary, rows_UD, rows_UD)

    @classmethod
    def imported(cls, vocabulary: DraftVocabulary, weight_UD: Tensor, head_VD: Tensor) -> Head:
        """A checkpoint's own rows; recognised where they are the target's after all, in either's dtype."""
        rows_UD = head_VD[vocabulary.ids_U].contiguous()
        if torch.equal(weight_UD.to(rows_UD.dtype), rows_UD) or torch.equal(weight_UD, rows_UD.to(weight_UD.dtype)):
            return cls(vocabulary, rows_UD, rows_UD)
        return cls(vocabulary, weight_UD.to(head_VD.dtype).contiguous(), rows_UD)
