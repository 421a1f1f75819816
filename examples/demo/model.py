"""A small byte-level transformer: what any decoder-only language model is, minus the size.

Invariant: everything that training changes is in `state_dict()`, and the only randomness is dropout's, drawn from
torch's global generator. So model, optimizer and `tierd.RngState` are all that a resume needs of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
_DROPOUT = 0.1
_HEAD = 32  # width of one attention head


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each behind a norm and with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, _HEAD).permute(2, 0, 3, 1, 4)
        dropout = _DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte. `width` is a multiple of 32; the output shares the input's embedding."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.token.weight  # tied: tierd stores it once
        for weight in (self.token.weight, self.place.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (batch, length, 256) for bytes of shape (batch, length)."""
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per byte, in nats."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
