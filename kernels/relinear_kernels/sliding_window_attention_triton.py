"""Sliding-window attention with meta keys in Triton: FlashAttention's recurrence over the blocks a window touches.

Queries t of a piece sit at position t + offset of the keys (offset = keys before the piece). Meta keys come apart, `[B, M, Hkv, D]`
with their position relative to the piece's first query, and are seen where the window does not reach them.
"""

import torch
import triton
import triton.language as tl

from relinear_kernels.sliding_window_attention_reference import WindowState, extend
from relinear_kernels.triton_common import block_of, cdiv, check_packed, check_triton, kept, pieces, put, sequence, tile, widest

ABSENT = 2**30  # the position of a meta key that is not there: no query is that far behind it
META = 16  # meta keys of one tile


def config(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows of a block, warps, pipeline stages."""
    if dtype == torch.float32:
        return 16, 4, 1
    return 64, 4, 2


@triton.jit
def _meta_scores(pos, n, rows, M: tl.constexpr, W):
    """Where each meta key stands and which of these queries see it (beyond their window)."""
    i = tl.arange(0, 16)
    at = tl.load(pos + n * M + i, mask=i < M, other=1073741824)
    return rows[:, None] - at[None, :] >= W


@triton.jit(do_not_specialize=["T", "offset"])
def _forward(
    q, k, v, mask, mk, mv, pos, o, lse, cu, blocks, T, offset, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
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
    acc = tl.zeros([BT, D], tl.float32)
    if M > 0:
        i = tl.arange(0, 16)
        at = (n.to(tl.int64) * M * N + g) * D
        ms = tl.dot(qt, tl.trans(tile(mk + at, i, M, N, D)), input_precision="ieee") * scale
        ms = tl.where(_meta_scores(pos, n, rows, M, W), ms, float("-inf"))
        top = tl.max(ms, 1)
        mp = tl.exp(ms - tl.where(top == float("-inf"), 0.0, top)[:, None])
        den = tl.sum(mp, 1)
        acc = tl.dot(mp.to(qt.dtype), tile(mv + at, i, M, N, D), acc, input_precision="ieee")
    where = rows + offset
    for j in range(tl.maximum(block * BT + offset - W + 1, 0) // BT, (block * BT + offset + BT - 1) // BT + 1):
        cols = j * BT + tl.arange(0, BT)
        s = tl.dot(qt, tl.trans(tile(k, cols, Tk, N, D)), input_precision="ieee") * scale
        far = where[:, None] - cols[None, :]
        s = tl.where((far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        fade = tl.exp(top - safe)
        den = den * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(qt.dtype), tile(v, cols, Tk, N, D), acc * fade[:, None], input_precision="ieee")
        top = new
    seen = den > 0
    put(o + (start * H + h) * D, acc * tl.where(seen, 1 / tl.where(seen, den, 1.0), 0.0)[:, None], rows, T, H, D)
    if lse is not None:
        total = tl.where(seen, top + tl.log(tl.where(seen, den, 1.0)), 0.0)
        tl.store(lse + (start + rows) * H + h, total, mask=rows < T)


@triton.jit(do_not_specialize=["T", "offset"])
def _queries(
    q, k, v, mask, mk, mv, pos, o, lse, do, delta, dq, dmk, dmv, cu, blocks, T, offset, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """delta and dq of a block of queries, and the block's share of the meta keys' gradients, `[blocks, H, M, D]` float32."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    g = h // (H // N)
    rows = block * BT + tl.arange(0, BT)
    here = (start * H + h) * D
    qt = tile(q + here, rows, T, H, D)
    dot = tile(do + here, rows, T, H, D)
    e = tl.sum(dot.to(tl.float32) * tile(o + here, rows, T, H, D).to(tl.float32), 1)
    scalar = (start + rows) * H + h
    tl.store(delta + scalar, e, mask=rows < T)
    total = tl.load(lse + scalar, mask=rows < T, other=0.0)
    k += (begin * N + g) * D
    v += (begin * N + g) * D
    acc = tl.zeros([BT, D], tl.float32)
    if M > 0:
        i = tl.arange(0, 16)
        at = (n.to(tl.int64) * M * N + g) * D
        mkt = tile(mk + at, i, M, N, D)
        mvt = tile(mv + at, i, M, N, D)
        far_off = _meta_scores(pos, n, rows, M, W) & (rows < T)[:, None]
        ms = tl.dot(qt, tl.trans(mkt), input_precision="ieee") * scale
        mp = tl.where(far_off, tl.exp(ms - total[:, None]), 0.0)
        mds = mp * (tl.dot(dot, tl.trans(mvt), input_precision="ieee") - e[:, None]) * scale
        acc = tl.dot(mds.to(qt.dtype), mkt, acc, input_precision="ieee")
        if dmk is not None:  # the same transposed, formed anew: an accumulator is never a transposed left operand
            ts = tl.dot(mkt, tl.trans(qt), input_precision="ieee") * scale
            tp = tl.where(tl.trans(far_off), tl.exp(ts - total[None, :]), 0.0)
            tds = tp * (tl.dot(mvt, tl.trans(dot), input_precision="ieee") - e[None, :]) * scale
            to = tl.program_id(0).to(tl.int64) * (M * D)
            put(dmk + to, tl.dot(tds.to(qt.dtype), qt, input_precision="ieee"), i, M, 1, D)
            put(dmv + to, tl.dot(tp.to(qt.dtype), dot, input_precision="ieee"), i, M, 1, D)
    if dq is not None:
        where = rows + offset
        for j in range(tl.maximum(block * BT + offset - W + 1, 0) // BT, (block * BT + offset + BT - 1) // BT + 1):
            cols = j * BT + tl.arange(0, BT)
            kt = tile(k, cols, Tk, N, D)
            s = tl.dot(qt, tl.trans(kt), input_precision="ieee") * scale
            far = where[:, None] - cols[None, :]
            seen = (far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :]
            p = tl.where(seen, tl.exp(tl.where(seen, s - total[:, None], 0.0)), 0.0)
            ds = p * (tl.dot(dot, tl.trans(tile(v, cols, Tk, N, D)), input_precision="ieee") - e[:, None]) * scale
            acc = tl.dot(ds.to(qt.dtype), kt, acc, input_precision="ieee")
        put(dq + here, acc, rows, T, H, D)


@triton.jit(do_not_specialize=["T", "offset"])
def _keys(
    q, k, v, mask, lse, delta, do, dk, dv, cu, blocks, T, offset, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share it. `blocks` cuts the keys."""
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
    low = tl.maximum(block * BT - offset, 0) // BT
    high = tl.cdiv(tl.maximum(tl.minimum(block * BT + BT - 1 + W - offset, T), 0), BT)
    for i in range(0, (H // N) * tl.maximum(high - low, 0)):
        span = high - low
        h = g * (H // N) + i // span
        cols = (low + i % span) * BT + tl.arange(0, BT)
        qt = tile(q + (start * H + h) * D, cols, T, H, D)
        dot = tile(do + (start * H + h) * D, cols, T, H, D)
        scalar = (start + cols) * H + h
        total = tl.load(lse + scalar, mask=cols < T, other=0.0)
        e = tl.load(delta + scalar, mask=cols < T, other=0.0)
        far = cols[None, :] + offset - rows[:, None]
        seen = (far >= 0) & (far < W) & keep[:, None] & (cols < T)[None, :]
        s = tl.dot(kt, tl.trans(qt), input_precision="ieee") * scale
        p = tl.where(seen, tl.exp(tl.where(seen, s - total[None, :], 0.0)), 0.0)
        av = tl.dot(p.to(kt.dtype), dot, av, input_precision="ieee")
        ds = p * (tl.dot(vt, tl.trans(dot), input_precision="ieee") - e[None, :]) * scale
        ak = tl.dot(ds.to(kt.dtype), qt, ak, input_precision="ieee")
    put(dk + here, ak, rows, Tk, N, D)
    put(dv + here, av, rows, Tk, N, D)


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, meta_k, meta_v, mask, pos, window, scale, cu_seqlens):
        batch, length, heads, dim = q.shape
        groups, offset = k.shape[2], k.shape[1] - length
        block, warps, stages = config(dim, q.dtype)
        cut = pieces(batch, length, cu_seqlens, block, block)
        o = torch.empty_like(q)
        lse = torch.empty(batch, length, heads, device=q.device, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        meta = 0 if meta_k is None else meta_k.shape[1]
        shape = {"H": heads, "N": groups, "D": dim, "BT": block, "num_warps": warps, "num_stages": stages}
        _forward[(cut.programs * heads,)](
            q, k, v, mask, meta_k, meta_v, pos, o, lse, cut.cu, cut.blocks, length, offset, window, scale, M=meta, **shape
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, meta_k, meta_v, mask, pos, o, lse, cut.cu, cut.blocks)
        ctx.shape, ctx.window, ctx.scale, ctx.programs, ctx.sequences = shape, window, scale, cut.programs, cut.sequences
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, meta_k, meta_v, mask, pos, o, lse, cu, blocks = ctx.saved_tensors
        shape, (batch, length, heads, dim), groups = ctx.shape, q.shape, k.shape[2]
        offset, do, delta = k.shape[1] - length, do.contiguous(), torch.empty_like(lse)
        need_q, need_k, need_v, need_mk, need_mv = ctx.needs_input_grad[:5]
        dq = torch.empty_like(q) if need_q else None
        dmk = dmv = None
        meta = 0 if meta_k is None else meta_k.shape[1]
        if need_mk or need_mv:
            dmk = torch.empty(ctx.programs, heads, meta, dim, device=q.device, dtype=torch.float32)
            dmv = torch.empty_like(dmk)
        _queries[(ctx.programs * heads,)](
            q, k, v, mask, meta_k, meta_v, pos, o, lse, do, delta, dq, dmk, dmv, cu, blocks, length, offset, ctx.window, ctx.scale,
            M=meta, **shape,
        )  # fmt: skip
        if dmk is not None:
            dmk, dmv = (_per_sequence(x, ctx.sequences, blocks, groups).to(q.dtype) for x in (dmk, dmv))
        dk = dv = None
        if need_k or need_v:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            programs = ctx.programs if cu is not None else batch * cdiv(k.shape[1], shape["BT"])
            _keys[(programs * groups,)](
                q, k, v, mask, lse, delta, do, dk, dv, cu, blocks, length, offset, ctx.window, ctx.scale, **shape
            )  # fmt: skip
        return dq, dk, dv, dmk, dmv, None, None, None, None, None


def _per_sequence(x, sequences: int, blocks, groups: int):
    """Sum the blocks' shares `[blocks, H, M, D]` within each sequence and each group of heads: `[N, M, Hkv, D]`."""
    programs, heads, meta, dim = x.shape
    x = x.view(programs, groups, heads // groups, meta, dim).sum(2)
    if blocks is None:
        x = x.view(sequences, -1, groups, meta, dim).sum(1)
    else:
        x = torch.stack([x[blocks[:, 0] == n].sum(0) for n in range(sequences)])
    return x.transpose(1, 2).contiguous()


def _first(x, bounds, meta: int):
    """The first `meta` rows of every packed sequence, zero where a sequence is shorter: `[N, M, ...]`."""
    rows = [x[0, a : min(a + meta, b)] for a, b in zip(bounds, bounds[1:], strict=False)]
    return torch.stack([torch.cat([r, r.new_zeros(meta - len(r), *r.shape[1:])]) for r in rows])


def sliding_window_attention(
    q, k, v, *, window, meta=0, scale=None, key_mask=None, initial_state: WindowState | None = None, return_state=False,
    cu_seqlens=None, empty_state,
):  # fmt: skip
    """`relinear_kernels.sliding_window_attention` by the kernels of this module. Raises ValueError naming what they support.

    `empty_state()` is the state before the first token; only called for where a state is needed.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1; got {window}")
    if meta > META:
        raise ValueError(f"sliding_window_attention on the Triton path takes at most {META} meta tokens; got {meta}")
    (batch, length, heads, dim), dtype = q.shape, v.dtype
    if heads % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {k.shape[2]} key heads")
    if v.shape[-1] != dim:
        raise ValueError(f"sliding_window_attention on the Triton path takes v as wide as q and k; got {v.shape[-1]} and {dim}")
    q, k, v = (x.to(widest(q, k, v)) for x in (q, k, v))  # exact; the output has v's dtype
    check_triton("sliding_window_attention", q=q, k=k, v=v)
    scale = dim**-0.5 if scale is None else scale
    meta_k = meta_v = pos = after = None
    keys, values, mask = k, v, key_mask
    if cu_seqlens is not None:
        check_packed(cu_seqlens, batch, length)
        if initial_state is not None or return_state or key_mask is not None:
            raise ValueError("sliding_window_attention takes cu_seqlens without key_mask, initial_state or return_state")
        if meta:
            bounds = cu_seqlens.tolist()
            meta_k, meta_v = _first(k, bounds, meta), _first(v, bounds, meta)
            pos = torch.arange(meta, device=q.device, dtype=torch.int32).expand(len(bounds) - 1, -1)
    elif initial_state is None and not return_state and (not meta or key_mask is None):
        if meta:
            meta_k, meta_v = k[:, :meta], v[:, :meta]
            meta = meta_k.shape[1]
            pos = torch.arange(meta, device=q.device, dtype=torch.int32).expand(batch, -1)
    else:
        state = empty_state() if initial_state is None else initial_state
        keys, values, mask, after = extend(state, k, v, key_mask)
        if meta:
            meta_k, meta_v = after.meta_k.to(q.dtype), after.meta_v.to(q.dtype)
            pos = torch.where(after.meta_age >= 0, length - 1 - after.meta_age, ABSENT).to(torch.int32)
    contiguous = lambda x: None if x is None else x.contiguous()  # noqa: E731
    o = _Window.apply(
        q.contiguous(), keys.contiguous(), values.contiguous(), contiguous(meta_k), contiguous(meta_v), contiguous(mask),
        contiguous(pos), window, scale, cu_seqlens,
    ).to(dtype)  # fmt: skip
    return (o, after) if return_state else o
