"""DraftCore: the trainable part of an EAGLE-3 draft and its unrolled training forward.

Draft position p reads the target's features at p and the embedding of token p+1, and predicts token p+2. Depth s of
anchor p reads token p+1+s and the draft's own output of depth s-1, at rotary position p+s. This is what vLLM does when
it serves (llama_eagle3.py, llm_base_proposer.py); `drafter.reference` writes it down token by token.

Shape letters: T rows, A anchors, D hidden, X aux layers times D, V target vocabulary, H heads, J key/value heads, E head
width, I width of the attention input (2 D). Parameter names are those of the checkpoint vLLM loads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter.attention import attend
from drafter.batch import Batch
from drafter.geometry import DraftGeometry
from drafter.rope import Rope, rotate


class RmsNorm(nn.Module):
    """Root-mean-square norm, in float32 whatever comes in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The four projections; the input is embedding and hidden state side by side."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        wide, bias = 2 * geometry.hidden_size, geometry.attention_bias
        self.q_proj = nn.Linear(wide, geometry.num_heads * geometry.head_dim, bias=bias)
        self.k_proj = nn.Linear(wide, geometry.num_kv_heads * geometry.head_dim, bias=bias)
        self.v_proj = nn.Linear(wide, geometry.num_kv_heads * geometry.head_dim, bias=bias)
        self.o_proj = nn.Linear(geometry.num_heads * geometry.head_dim, geometry.hidden_size, bias=bias)


class Mlp(nn.Module):
    """The gated feed-forward of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(geometry.hidden_size, geometry.intermediate_size, bias=False)
        self.up_proj = nn.Linear(geometry.hidden_size, geometry.intermediate_size, bias=False)
        self.down_proj = nn.Linear(geometry.intermediate_size, geometry.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The weights of the one decoder layer; `DraftCore` says how they are used."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        size, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.hidden_norm = RmsNorm(size, eps)
        self.self_attn = Attention(geometry)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = Mlp(geometry)


class DraftCore(nn.Module):
    """fc, one layer and the output norm, in float32. Embedding and head are the target's and are passed in, frozen."""

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.rope = Rope(geometry)
        self.fc = nn.Linear(geometry.aux_size, geometry.hidden_size, bias=False)
        self.midlayer = MidLayer(geometry)
        self.norm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        if geometry.norm_before_fc:
            self.input_norm = RmsNorm(geometry.aux_size, geometry.rms_norm_eps)
        if geometry.fc_norm:
            norms = [RmsNorm(geometry.hidden_size, geometry.rms_norm_eps) for _ in range(geometry.num_aux)]
            self.fc_norm = nn.ModuleList(norms)

    def combine(self, aux_TX: Tensor) -> Tensor:
        """Features [T, D] of captured aux rows."""
        if self.geometry.norm_before_fc:
            aux_TX = self.input_norm(aux_TX)
        if self.geometry.fc_norm:
            chunks = aux_TX.chunk(self.geometry.num_aux, dim=-1)
            aux_TX = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        features_TD: Tensor = self.fc(aux_TX.to(self.fc.weight.dtype))
        return features_TD.float()

    def layer_input(self, embeds_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [T, 2D], residual [T, D]); embeds are normalised already."""
        normed_TD = self.midlayer.hidden_norm(hidden_TD)
        residual_TD = normed_TD if self.geometry.norm_before_residual else hidden_TD
        return torch.cat((embeds_TD, normed_TD), dim=-1), residual_TD

    def layer_output(self, attended_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(normed output for the head, hidden state for the next depth), both [T, D]."""
        hidden_TD = residual_TD + self.midlayer.self_attn.o_proj(attended_TD)
        prenorm_TD = hidden_TD + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden_TD))
        output_TD = self.norm(prenorm_TD)
        return output_TD, output_TD if self.geometry.norm_output else prenorm_TD

    def unroll(self, batch: Batch, embedding_VD: Tensor, depth: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Outputs [A, D] for the head, one per depth; rows of anchors that are not valid at a depth mean nothing.

        Rows without loss (the prompt) only get keys and values. `dtype` is that of the matrix products.
        """
        with torch.autocast(batch.aux_TX.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return self._unroll(batch, embedding_VD, depth)

    def _unroll(self, batch: Batch, embedding_VD: Tensor, depth: int) -> list[Tensor]:
        geometry, attention = self.geometry, self.midlayer.self_attn
        key_shape = (-1, geometry.num_kv_heads, geometry.head_dim)
        embeds_TD = self.midlayer.input_layernorm(embedding_VD[batch.next_tokens_T.clamp(min=0)])
        input_TI, residual_TD = self.layer_input(embeds_TD, self.combine(batch.aux_TX))
        keys_TJE = rotate(attention.k_proj(input_TI).view(key_shape), self.rope.table(batch.positions_T))
        values_TJE = attention.v_proj(input_TI).view(key_shape)
        anchors_A = batch.anchors_A
        input_AI, residual_AD = input_TI[anchors_A], residual_TD[anchors_A]
        positions_A = batch.positions_T[anchors_A]
        last_row = batch.positions_T.numel() - 1
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs: list[Tensor] = []
        hidden_AD = residual_AD
        for step in range(depth):
            table = self.rope.table(positions_A + step)
            if step > 0:
                embeds_AD = embeds_TD[(anchors_A + step).clamp(max=last_row)]
                input_AI, residual_AD = self.layer_input(embeds_AD, hidden_AD)
                own_keys.append(rotate(attention.k_proj(input_AI).view(key_shape), table))
                own_values.append(attention.v_proj(input_AI).view(key_shape))
            queries_AHE = rotate(attention.q_proj(input_AI).view(-1, geometry.num_heads, geometry.head_dim), table)
            attended_AD = attend(queries_AHE, keys_TJE, values_TJE, own_keys, own_values, batch)
            output_AD, hidden_AD = self.layer_output(attended_AD, residual_AD)
            outputs.append(output_AD)
        return outputs
