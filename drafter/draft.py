"""Draft: a trainable core and its frozen head, and the tensors vLLM loads them from.

Shape letters: U draft vocabulary, V target vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_ROUNDING = 2.0**-7
"""Relative; twice what rounding to bfloat16 does."""
_SMALLEST = 1e-6
"""Absolute; what float16 makes of numbers near zero."""
_ROWS_AT_ONCE = 8192


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
    core = DraftCore(geometry)
    expected = {name: tuple(value.shape) for name, value in core.state_dict().items()}
    expected[HEAD_NAME] = (geometry.draft_vocab_size, geometry.hidden_size)
    expected[MAP_NAME] = (geometry.draft_vocab_size,)
    problems = [f"{name} is missing" for name in expected if name not in named]
    problems += [f"{name} is unknown" for name in named if name not in expected and name not in _IGNORED]
    problems += [
        problem
        for name, shape in expected.items()
        if name in named
        for problem in _problems(name, named[name], shape, geometry)
    ]
    if problems:
        raise ArtifactError(f"{who} is not a usable EAGLE-3 draft: {'; '.join(problems)}")
    _refuse_own_embedding(named, target, who)
    vocabulary = _vocabulary(named, geometry.vocab_size, who)
    core.load_state_dict({name: named[name].float() for name in core.state_dict()})
    return Draft(core, Head.imported(vocabulary, named[HEAD_NAME], target.head_VD))


def _problems(name: str, value: Tensor, shape: tuple[int, ...], geometry: DraftGeometry) -> Iterator[str]:
    if tuple(value.shape) != shape:
        yield f"{name} has shape {tuple(value.shape)}, needed {shape}"
    elif name == MAP_NAME:
        if value.is_floating_point() or value.dtype == torch.bool:
            yield f"{name} has dtype {value.dtype}, needed integers"
    elif value.dtype not in DTYPES.values():
        yield f"{name} has dtype {value.dtype}, needed one of {', '.join(DTYPES)}; quantised drafts are not supported"
    elif not bool(value.to(DTYPES[geometry.dtype]).isfinite().all()):
        yield f"{name} is not all finite numbers in {geometry.dtype}"


def _vocabulary(named: Mapping[str, Tensor], vocab_size: int, who: str) -> DraftVocabulary:
    """The map, checked against `t2d` [V], a mask over target ids, where a trainer left one."""
    offsets_U, mask_V = named[MAP_NAME].to(torch.int64), named.get("t2d")
    if mask_V is not None:
        ids_U = torch.arange(offsets_U.numel()) + offsets_U
        masked_U = mask_V.reshape(-1).nonzero().flatten()
        if mask_V.numel() != vocab_size or not torch.equal(ids_U.sort().values, masked_U):
            hint = "d2t holds target ids" if torch.equal(offsets_U.sort().values, masked_U) else "the two differ"
            raise ArtifactError(
                f"{who}: d2t (target id minus draft id) and t2d (a mask over {vocab_size} target ids) name different tokens: "
                f"{hint}; mend the checkpoint"
            )
    try:
        return DraftVocabulary.from_offsets(offsets_U, vocab_size)
    except ArtifactError as error:
        raise ArtifactError(f"{who}: d2t holds no offsets of this target: {error}") from error


def _canonical(name: str) -> str:
    for alias, ours in _ALIASES:
        if name.startswith(alias):
            name = ours + name[len(alias) :]
    return name


def _refuse_own_embedding(named: Mapping[str, Tensor], target: TargetParts, who: str) -> None:
    """A copy of the target's embedding may have been rounded to another dtype; vLLM shares the target's with the draft."""
    own_VD, reference_VD = named.get("embed_tokens.weight"), target.embedding_VD
    if own_VD is None:
        return
    if own_VD.shape != reference_VD.shape:
        how = f"of shape {tuple(own_VD.shape)}, the target's is {tuple(reference_VD.shape)}"
    elif (token := _first_other_row(own_VD, reference_VD)) is not None:
        how = f"whose row of token {token} is not the target's"
    else:
        return
    raise ArtifactError(f"{who} brings its own token embedding, {how}; only drafts that share the target's are supported")


def _first_other_row(own_VD: Tensor, reference_VD: Tensor) -> int | None:
    """In pieces: as a whole an embedding in float32 can take more memory than the draft."""
    for start in range(0, len(own_VD), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        own, reference = own_VD[rows].float(), reference_VD[rows].float()
        others = (~torch.isclose(own, reference, rtol=_ROUNDING, atol=_SMALLEST)).any(dim=1).nonzero()
        if len(others):
            return start + int(others[0])
    return None
