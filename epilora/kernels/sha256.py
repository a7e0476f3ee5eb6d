"""SHA-256 of many equally long pieces at once (FIPS 180-4), one piece a lane.

    digests[i] = SHA-256( the i-th LEAF_BYTES bytes of the input, the last piece filled up with zeros )

Tree digests (`epilora.adapters.tree_digest`) are made of these. Every output bit has one fixed order of operations, so the
result is hashlib's, whatever the launch. About 25 integer operations a byte: an H200 has room for some 500 GB/s.

Legend: L pieces (lanes), W 32-bit words of a piece.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
import triton
import triton.language as tl

LEAF_BYTES = 4096
DIGEST_BYTES = 32
_BLOCK_L = 128
_START = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)


def sha256_leaves_ref(data: torch.Tensor, leaf_bytes: int = LEAF_BYTES) -> torch.Tensor:
    """`sha256_leaves` by hashlib. data: uint8 [bytes], any device. Returns uint8 [L, 32] on it."""
    raw = data.cpu().numpy().tobytes()
    raw += bytes(-len(raw) % leaf_bytes)
    joined = b"".join(hashlib.sha256(raw[at : at + leaf_bytes]).digest() for at in range(0, len(raw), leaf_bytes))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(-1, DIGEST_BYTES).to(data.device)


def _round_constants() -> list[int]:
    """First 32 bits of the fractional parts of the cube roots of the first 64 primes."""
    primes: list[int] = []
    candidate = 2
    while len(primes) < 64:
        if all(candidate % prime for prime in primes):
            primes.append(candidate)
        candidate += 1
    constants = []
    for prime in primes:
        root = round((prime << 96) ** (1 / 3))
        while root**3 > prime << 96:
            root -= 1
        while (root + 1) ** 3 <= prime << 96:
            root += 1
        constants.append(root & 0xFFFFFFFF)
    return constants


@cache
def _table(device: torch.device, leaf_bytes: int) -> torch.Tensor:
    """[64 round constants, 8 starting values, 16 words of the padding block] as int32."""
    padding = [0x80000000] + [0] * 13 + [0, leaf_bytes * 8]
    words = [*_round_constants(), *_START, *padding]
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32, device=device)


@triton.jit
def _rotate(x, n: tl.constexpr):
    return (x >> n) | (x << (32 - n))


@triton.jit
def _swap_bytes(x):
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def _round(a, b, c, d, e, f, g, h, word, k_ptr):
    s1 = _rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)
    t1 = h + s1 + ((e & f) ^ (~e & g)) + tl.load(k_ptr).to(tl.uint32, bitcast=True) + word
    s0 = _rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)
    return t1 + s0 + ((a & b) ^ (a & c) ^ (b & c)), a, b, c, d + t1, e, f, g


@triton.jit
def _extend(old, after_1, after_9, after_14):
    """The message word 16 places after `old`."""
    s0 = _rotate(after_1, 7) ^ _rotate(after_1, 18) ^ (after_1 >> 3)
    s1 = _rotate(after_14, 17) ^ _rotate(after_14, 19) ^ (after_14 >> 10)
    return old + s0 + after_9 + s1


@triton.jit
def _word(ptr, offset, mask):
    return _swap_bytes(tl.load(ptr + offset, mask=mask, other=0).to(tl.uint32, bitcast=True))


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, table_ptr
):
    """One 64-byte block into the state."""
    a, b, c, d, e, f, g, h = h0, h1, h2, h3, h4, h5, h6, h7
    for group in range(4):
        k_ptr = table_ptr + group * 16
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w0, k_ptr)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w1, k_ptr + 1)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w2, k_ptr + 2)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w3, k_ptr + 3)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w4, k_ptr + 4)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w5, k_ptr + 5)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w6, k_ptr + 6)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w7, k_ptr + 7)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w8, k_ptr + 8)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w9, k_ptr + 9)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w10, k_ptr + 10)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w11, k_ptr + 11)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w12, k_ptr + 12)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w13, k_ptr + 13)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w14, k_ptr + 14)
        a, b, c, d, e, f, g, h = _round(a, b, c, d, e, f, g, h, w15, k_ptr + 15)
        w0 = _extend(w0, w1, w9, w14)
        w1 = _extend(w1, w2, w10, w15)
        w2 = _extend(w2, w3, w11, w0)
        w3 = _extend(w3, w4, w12, w1)
        w4 = _extend(w4, w5, w13, w2)
        w5 = _extend(w5, w6, w14, w3)
        w6 = _extend(w6, w7, w15, w4)
        w7 = _extend(w7, w8, w0, w5)
        w8 = _extend(w8, w9, w1, w6)
        w9 = _extend(w9, w10, w2, w7)
        w10 = _extend(w10, w11, w3, w8)
        w11 = _extend(w11, w12, w4, w9)
        w12 = _extend(w12, w13, w5, w10)
        w13 = _extend(w13, w14, w6, w11)
        w14 = _extend(w14, w15, w7, w12)
        w15 = _extend(w15, w0, w8, w13)
    return h0 + a, h1 + b, h2 + c, h3 + d, h4 + e, h5 + f, h6 + g, h7 + h


@triton.jit(do_not_specialize=["num_words", "num_leaves"])  # one build for every length: it takes seconds
def _sha256_leaves_kernel(data_ptr, out_ptr, table_ptr, num_words, num_leaves, W: tl.constexpr, BLOCK_L: tl.constexpr):
    leaf = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)  # [BLOCK_L]
    zero = tl.zeros((BLOCK_L,), tl.uint32)
    h0 = zero + tl.load(table_ptr + 64).to(tl.uint32, bitcast=True)
    h1 = zero + tl.load(table_ptr + 65).to(tl.uint32, bitcast=True)
    h2 = zero + tl.load(table_ptr + 66).to(tl.uint32, bitcast=True)
    h3 = zero + tl.load(table_ptr + 67).to(tl.uint32, bitcast=True)
    h4 = zero + tl.load(table_ptr + 68).to(tl.uint32, bitcast=True)
    h5 = zero + tl.load(table_ptr + 69).to(tl.uint32, bitcast=True)
    h6 = zero + tl.load(table_ptr + 70).to(tl.uint32, bitcast=True)
    h7 = zero + tl.load(table_ptr + 71).to(tl.uint32, bitcast=True)
    for block in range(W // 16):
        at = leaf * W + block * 16
        w0 = _word(data_ptr, at, at < num_words)
        w1 = _word(data_ptr, at + 1, at + 1 < num_words)
        w2 = _word(data_ptr, at + 2, at + 2 < num_words)
        w3 = _word(data_ptr, at + 3, at + 3 < num_words)
        w4 = _word(data_ptr, at + 4, at + 4 < num_words)
        w5 = _word(data_ptr, at + 5, at + 5 < num_words)
        w6 = _word(data_ptr, at + 6, at + 6 < num_words)
        w7 = _word(data_ptr, at + 7, at + 7 < num_words)
        w8 = _word(data_ptr, at + 8, at + 8 < num_words)
        w9 = _word(data_ptr, at + 9, at + 9 < num_words)
        w10 = _word(data_ptr, at + 10, at + 10 < num_words)
        w11 = _word(data_ptr, at + 11, at + 11 < num_words)
        w12 = _word(data_ptr, at + 12, at + 12 < num_words)
        w13 = _word(data_ptr, at + 13, at + 13 < num_words)
        w14 = _word(data_ptr, at + 14, at + 14 < num_words)
        w15 = _word(data_ptr, at + 15, at + 15 < num_words)
        h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
            h0,
            h1,
            h2,
            h3,
            h4,
            h5,
            h6,
            h7,
            w0,
            w1,
            w2,
            w3,
            w4,
            w5,
            w6,
            w7,
            w8,
            w9,
            w10,
            w11,
            w12,
            w13,
            w14,
            w15,
            table_ptr,
        )
    one = zero + tl.load(table_ptr + 72).to(tl.uint32, bitcast=True)  # the padding block is the same for every leaf
    bits = zero + tl.load(table_ptr + 87).to(tl.uint32, bitcast=True)
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        h0,
        h1,
        h2,
        h3,
        h4,
        h5,
        h6,
        h7,
        one,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        bits,
        table_ptr,
    )
    mask = leaf < num_leaves
    out = out_ptr + leaf * 8
    tl.store(out, _swap_bytes(h0).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 1, _swap_bytes(h1).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 2, _swap_bytes(h2).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 3, _swap_bytes(h3).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 4, _swap_bytes(h4).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 5, _swap_bytes(h5).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 6, _swap_bytes(h6).to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 7, _swap_bytes(h7).to(tl.int32, bitcast=True), mask=mask)


def sha256_leaves(data: torch.Tensor, leaf_bytes: int = LEAF_BYTES) -> torch.Tensor:
    """SHA-256 of every `leaf_bytes` bytes of `data`.

    data: uint8 [bytes], contiguous, on a GPU (in the interpreter: anywhere). Returns uint8 [L, 32] on its device,
    L = bytes / leaf_bytes rounded up; nothing is launched for 0 bytes. leaf_bytes: a multiple of 64. Raises TypeError,
    ValueError.
    """
    if data.dtype is not torch.uint8:
        raise TypeError(f"sha256_leaves: data is {data.dtype}; give a uint8 view")
    if data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"sha256_leaves: shape {tuple(data.shape)}, stride {data.stride()}; give contiguous [bytes]")
    if leaf_bytes < 64 or leaf_bytes % 64:
        raise ValueError(f"sha256_leaves: leaf_bytes={leaf_bytes}; allowed are multiples of 64")
    leaves = -(-data.numel() // leaf_bytes)
    if data.numel() % 4 or data.data_ptr() % 4:  # the kernel reads whole words
        words = torch.zeros(-(-data.numel() // 4) * 4, dtype=torch.uint8, device=data.device)
        words[: data.numel()] = data
        data = words
    out = torch.empty(leaves, DIGEST_BYTES, dtype=torch.uint8, device=data.device)
    if leaves:
        _sha256_leaves_kernel[(triton.cdiv(leaves, _BLOCK_L),)](
            data.view(torch.int32),
            out.view(torch.int32),
            _table(data.device, leaf_bytes),
            data.numel() // 4,
            leaves,
            W=leaf_bytes // 4,
            BLOCK_L=_BLOCK_L,
            num_warps=4,
        )
    return out
