"""Log-probabilities of chosen tokens without ever holding [tokens, vocabulary] logits for more than one chunk.

    log p(v) = z_v - logsumexp(z),  z = h W^T;     d/dz = onehot(v) - softmax(z)

The backward pass makes each chunk's logits again. W (the output head) is frozen and gets no gradient; if its dtype is
not the activations', it is converted a few MiB of rows at a time. On a GPU with both in 16 bits dz is rounded to that dtype
for its product with W, as a 16-bit trainer rounds it.

Legend: T tokens, K features, V vocabulary, S chosen ids per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .ranks import VocabCut

LOGITS_CHUNK_BYTES = 8 << 20  # bound on one chunk of fp32 logits, whatever `chunk` says
GPU_LOGITS_CHUNK_BYTES = 256 << 20  # the same on a GPU: 441 tokens of Qwen3's vocabulary, a full-speed GEMM
HEAD_PIECE_BYTES = 8 << 20


def selected_logprobs(
    hidden_TK: torch.Tensor,
    head_VK: torch.Tensor,
    ids_TS: torch.Tensor,
    *,
    chunk: int = 2048,
    cut: VocabCut | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T, S] fp32 of `ids_TS` and the entropy [T] fp32 (no gradient), both in nats.

    hidden_TK: any float dtype; the logits are rounded to it, as an engine's are. head_VK: any float dtype, frozen; the rows
    `cut` names where several ranks have parts of the vocabulary (every rank gets the whole result). ids_TS: int64. chunk:
    most tokens whose logits exist at once. T = 0 gives empty tensors.
    """
    return _SelectedLogprobs.apply(hidden_TK, head_VK, ids_TS, chunk, cut)


def _chunks(tokens: int, vocabulary: int, chunk: int, *, on_gpu: bool = False) -> Iterator[slice]:
    bound = GPU_LOGITS_CHUNK_BYTES if on_gpu else LOGITS_CHUNK_BYTES
    size = max(1, min(chunk, bound // (4 * max(1, vocabulary))))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _head_pieces(head_VK: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    rows = (
        max(1, head_VK.shape[0])
        if head_VK.dtype == dtype
        else max(1, HEAD_PIECE_BYTES // (head_VK.shape[1] * dtype.itemsize))
    )
    for start in range(0, head_VK.shape[0], rows):
        part = slice(start, min(start + rows, head_VK.shape[0]))
        yield part, head_VK[part].to(dtype)


def _logits(hidden: torch.Tensor, head_VK: torch.Tensor) -> torch.Tensor:
    out = torch.empty(hidden.shape[0], head_VK.shape[0], dtype=torch.float32, device=hidden.device)
    for part, rows in _head_pieces(head_VK, hidden.dtype):
        out[:, part] = hidden @ rows.t()
    return out


def _gather(logits: torch.Tensor, ids_TS: torch.Tensor, cut: VocabCut | None) -> torch.Tensor:
    """logits of `ids_TS`, 0 for those of other ranks."""
    if cut is None:
        return logits.gather(1, ids_TS)
    found = torch.zeros(ids_TS.shape, dtype=logits.dtype, device=logits.device)
    here, local = _own(ids_TS, logits.shape[1], cut)
    found[here] = logits.gather(1, local)[here] if logits.shape[1] else 0.0
    return found


def _own(ids_TS: torch.Tensor, rows: int, cut: VocabCut) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each id is among this rank's rows, its row or some row)."""
    local = ids_TS - cut.start
    return (local >= 0) & (local < rows), local.clamp(0, max(0, rows - 1))


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TK: torch.Tensor,
        head_VK: torch.Tensor,
        ids_TS: torch.Tensor,
        chunk: int,
        cut: VocabCut | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, device = hidden_TK.shape[0], hidden_TK.device
        rows = head_VK.shape[0] if cut is None else cut.widest
        chosen = torch.empty(ids_TS.shape, dtype=torch.float32, device=device)
        entropy, normaliser = torch.empty(tokens, device=device), torch.empty(tokens, device=device)
        for part in _chunks(tokens, rows, chunk, on_gpu=hidden_TK.is_cuda):
            logits = _logits(hidden_TK[part], head_VK)
            if cut is None:
                largest = logits.amax(-1, keepdim=True)
            else:  # a rank may have no rows at all
                largest = logits.new_full((logits.shape[0], 1), -torch.inf)
                largest = cut.group.max_(torch.cat([logits, largest], 1).amax(-1, keepdim=True))
            logits -= largest
            weights = logits.exp()  # the only other buffer of this size
            total, picked = weights.sum(-1), _gather(logits, ids_TS[part], cut)
            mean = weights.mul_(logits).sum(-1)
            if cut is not None:
                sums = cut.group.sum_(torch.cat([total[:, None], mean[:, None], picked], 1))
                total, mean, picked = sums[:, 0], sums[:, 1], sums[:, 2:]
            normaliser[part] = largest[:, 0] + total.log()
            chosen[part] = picked - total.log()[:, None]
            entropy[part] = total.log() - mean / total
        ctx.save_for_backward(hidden_TK, head_VK, ids_TS, normaliser)
        ctx.chunk, ctx.cut = chunk, cut
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TK, head_VK, ids_TS, normaliser = ctx.saved_tensors
        grad_TS, cut = grads[0], ctx.cut
        rounded = hidden_TK.is_cuda and head_VK.dtype == hidden_TK.dtype
        out = torch.zeros(hidden_TK.shape, dtype=hidden_TK.dtype if rounded else torch.float32, device=hidden_TK.device)
        for part in _chunks(hidden_TK.shape[0], head_VK.shape[0], ctx.chunk, on_gpu=hidden_TK.is_cuda):
            dz = _logits(hidden_TK[part], head_VK)
            dz.sub_(normaliser[part, None]).exp_().mul_(-grad_TS[part].sum(-1, keepdim=True))
            if cut is None:
                dz.scatter_add_(1, ids_TS[part], grad_TS[part])
            elif head_VK.shape[0]:
                here, local = _own(ids_TS[part], head_VK.shape[0], cut)
                dz.scatter_add_(1, local, grad_TS[part] * here)
            if rounded:
                out[part] = dz.to(head_VK.dtype) @ head_VK
                continue
            for columns, rows in _head_pieces(head_VK, torch.float32):
                out[part] += dz[:, columns] @ rows
        if cut is not None:
            cut.group.sum_(out)
        return out.to(hidden_TK.dtype), None, None, None, None
