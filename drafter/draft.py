"""Draft: a trainable core and its frozen head, and the tensors vLLM loads them from.

Shape letters: U draft vocabulary, V target vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.geometry import DraftGeometry
from drafter.head import Head
from drafter.model import DraftCore
from drafter.target import TargetParts
from drafter.vocabulary import DraftVocabulary
from wire.errors import ArtifactError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEAD_NAME = "lm_head.weight"
MAP_NAME = "d2t"
_IGNORED = ("t2d", "embed_tokens.weight")
_ALIASES = (("model.", ""), ("layers.0.", "midlayer."))
"""Other spellings of a name's beginning, outermost first."""


@dataclass(frozen=True)
class Draft:
    """All that is published of a draft, in memory."""

    core: DraftCore
    head: Head


def draft_tensors(draft: Draft) -> dict[str, Tensor]:
    """Checkpoint tensors in the geometry's dtype; never embed_tokens: vLLM shares the target's."""
    dtype = DTYPES[draft.core.geometry.dtype]
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in draft.core.state_dict().items()}
    tensors[HEAD_NAME] = draft.head.weight_UD.to(dtype).contiguous()
    tensors[MAP_NAME] = draft.head.vocabulary.offsets_U.contiguous()
    return tensors


def draft_from_tensors(tensors: Mapping[str, Tensor], geometry: DraftGeometry, target: TargetParts, *, who: str) -> Draft:
    """Build a draft from checkpoint tensors, `midlayer.*` or `layers.0.*`; raises ArtifactError naming what is wrong."""
    named = {_canonical(name): value for name, value in tensors.items()}
    _refuse_own_embedding(named, target, who)
    core = DraftCore(geometry)
    expected = {name: tuple(value.shape) for name, value in core.state_dict().items()}
    expected[HEAD_NAME] = (geometry.draft_vocab_size, geometry.hidden_size)
    expected[MAP_NAME] = (geometry.draft_vocab_size,)
    problems = [f"{name} is missing" for name in expected if name not in named]
    problems += [f"{name} is unknown" for name in named if name not in expected and name not in _IGNORED]
    for name, shape in expected.items():
        value = named.get(name)
        if value is None:
            continue
        if tuple(value.shape) != shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, needed {shape}")
        elif name != MAP_NAME and not (value.is_floating_point() and bool(value.isfinite().all())):
            problems.append(f"{name} is not all finite numbers")
        elif name == MAP_NAME and value.is_floating_point():
            problems.append(f"{name} has dtype {value.dtype}, needed integers")
    if problems:
        raise ArtifactError(f"{who} is not a usable EAGLE-3 draft: {'; '.join(problems)}")
    core.load_state_dict({name: named[name].float() for name in core.state_dict()})
    vocabulary = DraftVocabulary.from_offsets(named[MAP_NAME].to(torch.int64), geometry.vocab_size)
    return Draft(core, Head.imported(vocabulary, named[HEAD_NAME], target.head_VD))


def _canonical(name: str) -> str:
    for alias, ours in _ALIASES:
        if name.startswith(alias):
            name = ours + name[len(alias) :]
    return name


def _refuse_own_embedding(named: Mapping[str, Tensor], target: TargetParts, who: str) -> None:
    own_VD = named.get("embed_tokens.weight")
    if own_VD is None:
        return
    reference_VD = target.embedding_VD
    if own_VD.shape != reference_VD.shape or not torch.allclose(own_VD.float(), reference_VD.float(), atol=1e-2, rtol=1e-2):
        raise ArtifactError(f"{who} brings its own token embedding; only drafts that share the target's are supported")
