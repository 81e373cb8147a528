"""Sliding-window attention with meta keys in Triton: FlashAttention's recurrence over the blocks a window
touches.

              meta | keys: BC columns a step
    queries   . .  | # # # # . . . .   #  seen: the last `window` positions (here 4), the query's too
    (BT rows  m .  | . # # # # . . .   m  a meta key (here the first 2), where the window does not reach
    of one    m m  | . . # # # # . .   .  not seen; blocks of these alone are never read
    program)  m m  | . . . # # # # .

A program of `_forward` or `_queries` owns BT rows and walks the columns; one of `_keys` owns BT columns and
walks the rows that see them.

Queries t of a piece sit at position t + offset of the keys (offset = keys before the piece). Meta keys come
apart, `[B, M, Hkv, D]` with their position relative to the piece's first query, and are seen where the window
does not reach them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.dispatch import check_packed
from relinear_kernels.sliding_window_attention_reference import WindowState, begin, extend
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import Pieces, block_of, cdiv, kept, pieces, put, sequence, tile, widest

ABSENT = 2**30  # the position of a meta key that is not there yet: no query is that far behind it


class Config(NamedTuple):
    """The sizes of a kernel's walk over its blocks.

    With 128 registers a thread four programs fit a multiprocessor. Though they spill, they wait less than two
    programs that do not.
    """

    rows: int  # rows of a block that is walked
    stages: int
    registers: int | None = None  # registers of a thread; None: as many as it takes


def config(dim: int, dtype: torch.dtype, meta: bool) -> tuple[int, Config, Config, Config]:
    """Rows of the block that a program owns, and how `_forward`, `_queries` and `_keys` walk the others."""
    if dtype == torch.float32:
        return 16, *(Config(16, 1),) * 3
    if dim <= 64:
        return 64, Config(64, 2), Config(64, 2), Config(32, 2, 128)
    return 64, Config(32, 2, 128), Config(32, 3 if meta else 2), Config(64, 1)


@triton.jit
def _meta_scores(pos, n, rows, M: tl.constexpr, W):
    """Which meta keys each query sees: those farther back than its window `[rows, 16]`."""
    i = tl.arange(0, 16)
    at = tl.load(pos + n * M + i, mask=i < M, other=1073741824)
    return rows[:, None] - at[None, :] >= W


@triton.jit(do_not_specialize=["T", "total", "offset"])
def _forward(
    q, k, v, mask, mk, mv, pos, o, lse, gamma, arg_at, weight, cu, blocks, T, total, offset, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write o and `lse`, the logarithm to base two of its denominator `[H, rows]`; all scores are to base
    two.

    With gamma, `lse` has the maximum of the scores instead, `arg_at` the key that attains it, and `weight`
    gamma times the sum relative to it.
    """
    scale *= 1.4426950408889634
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    g = h // (H // N)
    rows = block * BT + tl.arange(0, BT)
    qt = tile(q + (start * H + h) * D, rows, T, H, D)
    k += (begin * N + g) * D
    v += (begin * N + g) * D
    top = tl.full([BT], float("-inf"), tl.float32)
    den = tl.zeros([BT], tl.float32)
    arg = tl.full([BT], -1, tl.int32)
    acc = tl.zeros([BT, D], tl.float32)
    if M > 0:
        i = tl.arange(0, 16)
        at = (n.to(tl.int64) * M * N + g) * D
        ms = tl.dot(qt, tl.trans(tile(mk + at, i, M, N, D)), input_precision="ieee") * scale
        ms = tl.where(_meta_scores(pos, n, rows, M, W), ms, float("-inf"))
        top = tl.max(ms, 1)
        mp = tl.exp2(ms - tl.where(top == float("-inf"), 0.0, top)[:, None])
        den = tl.sum(mp, 1)
        acc = tl.dot(mp.to(qt.dtype), tile(mv + at, i, M, N, D), acc, input_precision="ieee")
    where = rows + offset
    for j in range(
        tl.maximum(block * BT + offset - W + 1, 0) // BC,
        (tl.minimum(block * BT + BT, T) + offset - 1) // BC + 1,
    ):
        cols = j * BC + tl.arange(0, BC)
        s = tl.dot(qt, tl.trans(tile(k, cols, Tk, N, D)), input_precision="ieee") * scale
        far = where[:, None] - cols[None, :]
        s = tl.where((far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :], s, float("-inf"))
        new = tl.max(s, 1)
        if arg_at is not None:
            arg = tl.where(new > top, tl.min(tl.where(s == new[:, None], cols[None, :], 2147483647), 1), arg)
        new = tl.maximum(top, new)
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        fade = tl.exp2(top - safe)
        den = den * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(qt.dtype), tile(v, cols, Tk, N, D), acc * fade[:, None], input_precision="ieee")
        top = new
    seen = den > 0
    put(
        o + (start * H + h) * D,
        acc * tl.where(seen, 1 / tl.where(seen, den, 1.0), 0.0)[:, None],
        rows,
        T,
        H,
        D,
    )
    if lse is not None:
        to = h * total + start + rows
        if gamma is not None:
            tl.store(lse + to, tl.where(seen, top, 0.0), mask=rows < T)
            tl.store(arg_at + to, arg, mask=rows < T)
            tl.store(weight + to, den * tl.load(gamma + h), mask=rows < T)
        else:
            tl.store(lse + to, tl.where(seen, top + tl.log2(tl.where(seen, den, 1.0)), 0.0), mask=rows < T)


@triton.jit(do_not_specialize=["T", "total", "offset"])
def _queries(
    q,
    k,
    v,
    mask,
    mk,
    mv,
    pos,
    o,
    lse,
    do,
    delta,
    gamma,
    arg_at,
    share,
    dq,
    dmk,
    dmv,
    cu,
    blocks,
    T,
    total,
    offset,
    W,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Write dq and `delta` of a block of queries, and the block's part of the meta keys' gradients, `[blocks,
    H, M, D]` float32.

    With gamma `delta` is given, do is already divided by the denominator, a key weighs gamma e^(s - maximum),
    and `share` is taken back from the key that attains the maximum.
    """
    turn = scale * 1.4426950408889634
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    g = h // (H // N)
    rows = block * BT + tl.arange(0, BT)
    here = (start * H + h) * D
    qt = tile(q + here, rows, T, H, D)
    dot = tile(do + here, rows, T, H, D)
    scalar = h * total + start + rows
    if gamma is not None:
        e = -tl.load(delta + scalar, mask=rows < T, other=0.0)
        r = tl.load(gamma + h)
        c = tl.load(share + scalar, mask=rows < T, other=0.0)
        arg = tl.load(arg_at + scalar, mask=rows < T, other=-1)
    else:
        e = tl.sum(dot.to(tl.float32) * tile(o + here, rows, T, H, D).to(tl.float32), 1)
        tl.store(delta + scalar, -e, mask=rows < T)
    top = tl.load(lse + scalar, mask=rows < T, other=0.0)
    k += (begin * N + g) * D
    v += (begin * N + g) * D
    acc = tl.zeros([BT, D], tl.float32)
    if M > 0:
        i = tl.arange(0, 16)
        at = (n.to(tl.int64) * M * N + g) * D
        mkt = tile(mk + at, i, M, N, D)
        mvt = tile(mv + at, i, M, N, D)
        far_off = _meta_scores(pos, n, rows, M, W) & (rows < T)[:, None]
        ms = tl.dot(qt, tl.trans(mkt), input_precision="ieee") * turn
        mp = tl.exp2(tl.where(far_off, ms - top[:, None], float("-inf")))
        mds = mp * (tl.dot(dot, tl.trans(mvt), input_precision="ieee") - e[:, None])
        acc = tl.dot(mds.to(qt.dtype), mkt, acc, input_precision="ieee")
        # the same transposed, formed anew: an accumulator is never a transposed left operand
        if dmk is not None:
            ts = tl.dot(mkt, tl.trans(qt), input_precision="ieee") * turn
            tp = tl.exp2(tl.where(tl.trans(far_off), ts - top[None, :], float("-inf")))
            tds = tp * (tl.dot(mvt, tl.trans(dot), input_precision="ieee") - e[None, :])
            to = tl.program_id(0).to(tl.int64) * (M * D)
            put(dmk + to, tl.dot(tds.to(qt.dtype), qt, input_precision="ieee") * scale, i, M, 1, D)
            put(dmv + to, tl.dot(tp.to(qt.dtype), dot, input_precision="ieee"), i, M, 1, D)
    if dq is not None:
        where = rows + offset
        for j in range(
            tl.maximum(block * BT + offset - W + 1, 0) // BC,
            (tl.minimum(block * BT + BT, T) + offset - 1) // BC + 1,
        ):
            cols = j * BC + tl.arange(0, BC)
            kt = tile(k, cols, Tk, N, D)
            s = tl.dot(qt, tl.trans(kt), input_precision="ieee") * turn
            far = where[:, None] - cols[None, :]
            seen = (far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :]
            p = tl.exp2(tl.where(seen, s - top[:, None], float("-inf")))
            ds = p * (tl.dot(dot, tl.trans(tile(v, cols, Tk, N, D)), input_precision="ieee") - e[:, None])
            if gamma is not None:
                ds = ds * r - tl.where(arg[:, None] == cols[None, :], c[:, None], 0.0)
            acc = tl.dot(ds.to(qt.dtype), kt, acc, input_precision="ieee")
        put(dq + here, acc * scale, rows, T, H, D)


@triton.jit(do_not_specialize=["T", "total", "offset"])
def _keys(
    q, k, v, mask, lse, delta, gamma, arg_at, share, do, dk, dv, cu, blocks, T, total, offset, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a block of keys, summed over the query heads that share it. `blocks` numbers blocks
    of keys."""
    turn = scale * 1.4426950408889634
    g = tl.program_id(0) % N
    n, block = block_of(tl.program_id(0) // N, T + offset, blocks, BT)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    rows = block * BT + tl.arange(0, BT)
    here = (begin * N + g) * D
    kt = tile(k + here, rows, Tk, N, D)
    vt = tile(v + here, rows, Tk, N, D)
    keep = kept(mask, begin, rows, Tk)
    ak = tl.zeros([BT, D], tl.float32)
    av = tl.zeros([BT, D], tl.float32)
    low = tl.maximum(block * BT - offset, 0) // BC
    high = tl.cdiv(tl.maximum(tl.minimum(block * BT + BT - 1 + W - offset, T), 0), BC)
    for i in range(0, (H // N) * tl.maximum(high - low, 0)):
        span = high - low
        h = g * (H // N) + i // span
        cols = (low + i % span) * BC + tl.arange(0, BC)
        qt = tile(q + (start * H + h) * D, cols, T, H, D)
        dot = tile(do + (start * H + h) * D, cols, T, H, D)
        scalar = h * total + start + cols
        top = tl.load(lse + scalar, mask=cols < T, other=0.0)
        e = tl.load(delta + scalar, mask=cols < T, other=0.0)
        far = cols[None, :] + offset - rows[:, None]
        seen = (far >= 0) & (far < W) & keep[:, None] & (cols < T)[None, :]
        s = tl.dot(kt, tl.trans(qt), input_precision="ieee") * turn
        p = tl.exp2(tl.where(seen, s - top[None, :], float("-inf")))
        if gamma is not None:
            p *= tl.load(gamma + h)
        av = tl.dot(p.to(kt.dtype), dot, av, input_precision="ieee")
        ds = p * (tl.dot(vt, tl.trans(dot), input_precision="ieee") + e[None, :])
        if gamma is not None:
            c = tl.load(share + scalar, mask=cols < T, other=0.0)
            arg = tl.load(arg_at + scalar, mask=cols < T, other=-1)
            ds -= tl.where(rows[:, None] == arg[None, :], c[None, :], 0.0)
        ak = tl.dot(ds.to(kt.dtype), qt, ak, input_precision="ieee")
    put(dk + here, ak * scale, rows, Tk, N, D)
    put(dv + here, av, rows, Tk, N, D)


class Near(NamedTuple):
    """The launches of a window's kernels: the cut into blocks, the sizes that all share, and the walk of
    each."""

    cut: Pieces
    shape: dict
    walks: tuple[dict, dict, dict]  # the walks of forward, queries, keys
    window: int
    scale: float
    gamma: Tensor | None = None  # [H]: the window beside a linear part, whose maximum is part of the function

    @classmethod
    def over(
        cls,
        q: Tensor,
        k: Tensor,
        window: int,
        scale: float,
        cu_seqlens: Tensor | None,
        gamma: Tensor | None = None,
        meta=False,
    ) -> "Near":
        """The walk over these tensors: sizes, blocks, and what each program reads."""
        block, *walks = config(q.shape[3], q.dtype, meta)
        shape = {"H": q.shape[2], "N": k.shape[2], "D": q.shape[3], "BT": block, "num_warps": 4}
        walks = tuple({"BC": w.rows, "num_stages": w.stages, "maxnreg": w.registers} for w in walks)
        return cls(pieces(q.shape[0], q.shape[1], cu_seqlens, block), shape, walks, window, scale, gamma)

    def _where(self, q: Tensor, k: Tensor) -> tuple:
        length = q.shape[1]
        return (
            self.cut.cu,
            self.cut.blocks,
            length,
            q.shape[0] * length,
            k.shape[1] - length,
            self.window,
            self.scale,
        )

    def forward(self, q, k, v, mask, meta=(None, None, None), training=True):
        """Return o, and what a backward pass needs of `_forward`: lse, arg and weight, `[H, B T]` each."""
        o, lse, arg, weight = torch.empty_like(q), None, None, None
        new = lambda dtype: torch.empty(q.shape[2], q.shape[0] * q.shape[1], device=q.device, dtype=dtype)  # noqa: E731
        if training or self.gamma is not None:
            lse = new(torch.float32)
        if self.gamma is not None:
            arg, weight = new(torch.int32), new(torch.float32)
        _forward[(self.cut.programs * q.shape[2],)](
            q,
            k,
            v,
            mask,
            *meta,
            o,
            lse,
            self.gamma,
            arg,
            weight,
            *self._where(q, k),
            M=_count(meta),
            **self.shape,
            **self.walks[0],
        )
        return o, lse, arg, weight

    def queries(
        self, q, k, v, mask, o, lse, do, delta, arg, share, dq, meta=(None, None, None), dmeta=(None, None)
    ) -> None:
        """Write dq and the meta keys' gradients. Without gamma write delta too."""
        _queries[(self.cut.programs * q.shape[2],)](
            q,
            k,
            v,
            mask,
            *meta,
            o,
            lse,
            do,
            delta,
            self.gamma,
            arg,
            share,
            dq,
            *dmeta,
            *self._where(q, k),
            M=_count(meta),
            **self.shape,
            **self.walks[1],
        )

    def keys(self, q, k, v, mask, lse, do, delta, arg, share) -> tuple[Tensor, Tensor]:
        """Return dk and dv, the gradients of keys and values."""
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        programs = (
            self.cut.programs if self.cut.cu is not None else q.shape[0] * cdiv(k.shape[1], self.shape["BT"])
        )
        _keys[(programs * k.shape[2],)](
            q,
            k,
            v,
            mask,
            lse,
            delta,
            self.gamma,
            arg,
            share,
            do,
            dk,
            dv,
            *self._where(q, k),
            **self.shape,
            **self.walks[2],
        )
        return dk, dv


def _count(meta) -> int:
    return 0 if meta[0] is None else meta[0].shape[1]


@traceable
class _Window(torch.autograd.Function):
    """Sliding-window attention with its gradients.

    With `first` the meta keys are the first so many keys of every sequence, and their gradients are added to
    those of k and v. autograd would make a tensor of zeros as large as k for each sequence, and add it.
    """

    @staticmethod
    def forward(ctx, q, k, v, meta_k, meta_v, mask, pos, first, window, scale, cu_seqlens):
        bounds = None if cu_seqlens is None or not first else cu_seqlens.tolist()
        if first:
            meta_k, meta_v = (_first(x, first, bounds) for x in (k, v))
        near, meta = (
            Near.over(q, k, window, scale, cu_seqlens, meta=meta_k is not None),
            (meta_k, meta_v, pos),
        )
        o, lse, *_ = near.forward(q, k, v, mask, meta, any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, *meta, mask, o, lse)
        ctx.near, ctx.first, ctx.bounds = near, first, bounds
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, *meta, mask, o, lse = ctx.saved_tensors
        near, cut, first = ctx.near, ctx.near.cut, ctx.first
        do, delta = do.contiguous(), torch.empty_like(lse)
        need_q, need_k, need_v, need_mk, need_mv = ctx.needs_input_grad[:5]
        dq, dmeta, dk, dv = torch.empty_like(q) if need_q else None, (None, None), None, None
        if need_mk or need_mv or first and (need_k or need_v):
            size = (cut.programs, q.shape[2], _count(meta), q.shape[3])
            dmeta = tuple(torch.empty(size, device=q.device, dtype=torch.float32) for _ in range(2))
        near.queries(q, k, v, mask, o, lse, do, delta, None, None, dq, meta, dmeta)
        if dmeta[0] is not None:
            dmeta = tuple(_per_sequence(x, cut.sequences, cut.blocks, k.shape[2]) for x in dmeta)
        if need_k or need_v:
            dk, dv = near.keys(q, k, v, mask, lse, do, delta, None, None)
        if first and dk is not None:
            _add_first(dk, dmeta[0], ctx.bounds)
            _add_first(dv, dmeta[1], ctx.bounds)
            dmeta = (None, None)
        return dq, dk, dv, *(None if d is None else d.to(q.dtype) for d in dmeta), *(None,) * 6


def _per_sequence(x, sequences: int, blocks, groups: int):
    """Sum the blocks' shares `[blocks, H, M, D]` within each sequence and each group of heads: `[N, M, Hkv,
    D]`."""
    programs, heads, meta, dim = x.shape
    x = x.view(programs, groups, heads // groups, meta, dim).sum(2)
    if blocks is None:
        x = x.view(sequences, -1, groups, meta, dim).sum(1)
    else:
        x = torch.stack([x[blocks[:, 0] == n].sum(0) for n in range(sequences)])
    return x.transpose(1, 2).contiguous()


def _first(x, meta: int, bounds: list[int] | None):
    """The first `meta` rows of every sequence, zero where a packed one (`bounds`) is shorter: `[N, M,
    ...]`."""
    if bounds is None:
        return x[:, :meta].contiguous()
    rows = [x[0, a : min(a + meta, b)] for a, b in zip(bounds, bounds[1:], strict=False)]
    return torch.stack([torch.cat([r, r.new_zeros(meta - len(r), *r.shape[1:])]) for r in rows])


def _add_first(x, rows, bounds: list[int] | None) -> None:
    """Add `rows` to the rows that `_first` takes, in place."""
    if bounds is None:
        x[:, : rows.shape[1]] += rows
    else:
        for row, a, b in zip(rows, bounds, bounds[1:], strict=False):
            x[0, a : min(a + len(row), b)] += row[: b - a]


def sliding_window_attention(
    q,
    k,
    v,
    *,
    window,
    meta=0,
    scale=None,
    key_mask=None,
    initial_state: WindowState | None = None,
    return_state=False,
    cu_seqlens=None,
    empty_state,
):
    """`relinear_kernels.sliding_window_attention` by the kernels of this module. Raises ValueError for shapes
    that do not fit together.

    `empty_state()` is the state before the first token; only called for where a state is needed.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1; got {window}")
    (batch, length, heads, dim), dtype = q.shape, v.dtype
    if heads % k.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {heads} query heads and {k.shape[2]} key heads"
        )
    if v.shape[-1] != dim:
        raise ValueError(
            f"sliding_window_attention on the Triton path takes v as wide as q and k; got {v.shape[-1]} and"
            f" {dim}"
        )
    q, k, v = (x.to(widest(q, k, v)) for x in (q, k, v))  # exact; the output has v's dtype
    scale = dim**-0.5 if scale is None else scale
    meta_k = meta_v = pos = after = None
    first = 0  # meta keys that are k's own
    keys, values, mask = k, v, key_mask
    if cu_seqlens is not None:
        check_packed(cu_seqlens, batch, length)
        first, sequences = meta, len(cu_seqlens) - 1
    elif initial_state is None and (key_mask is None or not (return_state or meta)):
        if return_state:
            after = begin(empty_state(), k, v)
        first, sequences = min(meta, length), batch
    else:
        state = empty_state() if initial_state is None else initial_state
        keys, values, mask, after = extend(state, k, v, key_mask)
        if meta:
            meta_k, meta_v = after.k[:, :meta], after.v[:, :meta]
            pos = torch.where(after.meta_age >= 0, length - 1 - after.meta_age, ABSENT).to(torch.int32)
    if first:
        pos = torch.arange(first, device=q.device, dtype=torch.int32).expand(sequences, -1)
    contiguous = lambda x: None if x is None else x.contiguous()  # noqa: E731
    o = apply(
        "_Window",
        q.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        contiguous(meta_k),
        contiguous(meta_v),
        contiguous(mask),
        contiguous(pos),
        first,
        window,
        scale,
        cu_seqlens,
    ).to(dtype)
    return (o, after) if return_state else o
