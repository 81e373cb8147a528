"""One token of linear attention in one launch: a program per sequence and head reads its state, updates it in place and answers."""

import torch
import triton
import triton.language as tl

from relinear_kernels.linear_attention_reference import EPS, LinearState
from relinear_kernels.triton_common import check_triton, widest


@triton.jit
def _logits(x, w, b, D: tl.constexpr, F: tl.constexpr):
    """x W + b of one vector, as a row `[1, F]`."""
    if w is not None:
        d = tl.arange(0, D)
        m = tl.load(w + d[:, None] * F + tl.arange(0, F)[None, :]).to(tl.float32)
        y = tl.sum(tl.load(x + d).to(tl.float32)[:, None] * m, 0)[None, :]
    else:
        y = tl.load(x + tl.arange(0, F)).to(tl.float32)[None, :]
    if b is not None:
        y += tl.load(b + tl.arange(0, F)).to(tl.float32)[None, :]
    return y


@triton.jit
def _vector_features(y, FEATURE: tl.constexpr, SIGN: tl.constexpr):
    """phi of one row, `[F]`: of +y or, for a two-sided map's second half, of -y."""
    if FEATURE == "softmax_pm":
        y = SIGN * y
        p = tl.exp(y - tl.max(y, 1)[:, None])
        p = tl.maximum(p / tl.sum(p, 1)[:, None], 1e-12)
    elif FEATURE == "relu":
        p = tl.maximum(y, 0.0)
    elif FEATURE == "elu":
        p = tl.where(y > 0, 1 + y, tl.exp(tl.minimum(y, 0.0)))
    else:
        p = y
    return tl.sum(p, 0)


@triton.jit
def _decode(
    q, k, v, wq, wk, bq, bk, decay, s, z, o, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    n = pid // H
    f = tl.arange(0, F)
    c = tl.arange(0, V)
    kv = n * N + h // (H // N)
    if wq is not None:
        wq += h * (D * F)
        wk += h * (D * F)
    if bq is not None:
        bq += h * F
    if bk is not None:
        bk += h * F
    x = _logits(q + pid * D, wq, bq, D, F)
    y = _logits(k + kv * D, wk, bk, D, F)
    value = tl.load(v + kv * V + c).to(tl.float32)
    keep = 1.0
    if decay is not None:
        keep = tl.exp(tl.load(decay + pid))
    out = tl.zeros([V], tl.float32)
    den = 0.0
    for half in tl.static_range(P):
        phi_q = _vector_features(x, FEATURE, 1 - 2 * half)
        phi_k = _vector_features(y, FEATURE, 1 - 2 * half)
        at = (pid * P + half) * F
        total = tl.load(z + at + f) * keep + phi_k
        tl.store(z + at + f, total)
        den += tl.sum(phi_q * total, 0)
        where = s + at * V + f[:, None] * V + c[None, :]
        state = tl.load(where) * keep + phi_k[:, None] * value[None, :]
        tl.store(where, state)
        out += tl.sum(phi_q[:, None] * state, 0)
    if NORMALIZE:
        out /= tl.maximum(den, eps)
    tl.store(o + pid * V + c, out.to(o.dtype.element_ty))


def decode_step(
    q, k, v, w_q=None, w_k=None, *, state: LinearState, feature="softmax_pm", b_q=None, b_k=None, log_decay=None, normalize=True, eps=EPS
):  # fmt: skip
    """`relinear_kernels.decode_step` by the kernel of this module. Raises ValueError naming what it supports."""
    batch, length, heads, dim = q.shape
    groups, value_dim = v.shape[2:]
    if length != 1:
        raise ValueError(f"decode_step takes one token; got {length}")
    if heads % groups:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads")
    q, k, v, dtype = *(x.to(widest(q, k, v)) for x in (q, k, v)), v.dtype
    width = dim if w_q is None else w_q.shape[-1]
    check_triton("decode_step", feature, width, q=q, k=k, v=v)
    if not (state.kv.dtype == state.z.dtype == torch.float32 and state.kv.is_contiguous() and state.z.is_contiguous()):
        raise ValueError(f"decode_step updates a contiguous float32 state in place; got {state.kv.dtype}, {state.z.dtype}")
    halves = 2 if feature == "softmax_pm" else 1
    if state.kv.shape != (batch, heads, halves * width, value_dim):
        raise ValueError(f"the state must be {[batch, heads, halves * width, value_dim]}; got {list(state.kv.shape)}")
    decay = None
    if log_decay is not None:
        if log_decay.shape not in ((heads,), (batch, 1, heads)):
            raise ValueError(f"log_decay must be [H={heads}] or [B={batch}, T=1, H={heads}]; got {list(log_decay.shape)}")
        decay = log_decay.float().expand(batch, 1, heads).contiguous()
    dense = lambda x: None if x is None else x.contiguous()  # noqa: E731
    o = torch.empty(batch, 1, heads, value_dim, device=q.device, dtype=dtype)
    _decode[(batch * heads,)](
        q.contiguous(), k.contiguous(), v.contiguous(), dense(w_q), dense(w_k), dense(b_q), dense(b_k), decay, state.kv, state.z, o, eps,
        H=heads, N=groups, D=dim, V=value_dim, F=width, P=halves, FEATURE=feature, NORMALIZE=normalize,
        num_warps=8 if width * value_dim > 4096 else 4,
    )  # fmt: skip
    return o
