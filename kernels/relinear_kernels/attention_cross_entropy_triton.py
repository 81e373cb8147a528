"""The cross-entropy of linear attention against softmax in Triton: FlashAttention's recurrence, with no T x T
matrix in memory.

                 keys j: BC columns a step
    queries i    [p a][p a][p a]         p_ij softmax's weight, a_ij = phi_q_i . phi_k_j, in registers
    (BT rows     [p a][p a][p a]  ->     four walks: the row sums; the loss; the gradient of phi_q by rows;
    a program)   [p a][p a][p a]         that of phi_k by columns

With a_ij = phi_q_i . phi_k_j, den_i = sum_j a_ij and u_i the sum of p_ij over the weights that are not
clamped,

    d loss_i / d a_ij = u_i / den_i - p_ij / a_ij (0 where the weight is clamped).

Exponential features come as logarithms. Each token's exponentials are then relative to its largest, which
cancels for a query; a key's is its `shift` m_j: the weights are a_ij exp(m_j - lse_i), with lse_i found as a
softmax's, by a running maximum of log a_ij + m_j.

Tiles of p and a are formed anew wherever they are needed: for the row sums, then for the loss (what is
clamped depends on the row's sum), for the gradient of phi_q by blocks of queries and for that of phi_k by
blocks of keys. One program writes each number: no atomics, so equal inputs give equal bits. Features and what
belongs to a row lie head-major, `[B, H, T, ..]`, as `linear_features` makes them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.attention_cross_entropy_reference import FLOOR
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import (
    block_of,
    cdiv,
    kept,
    nothing,
    put,
    reciprocal,
    sequence,
    tile,
    widest,
)


def config(dim: int, features: int, log: bool = False) -> dict:
    """Rows of a block, columns of a step, warps and pipeline stages, chosen so that no register spills.

    A product of float32 wants both operands along what is summed over, so a step's features pass through
    registers into a transposed copy.
    """
    return {
        "BT": 64,
        "BC": 32,
        "num_warps": 4 if dim + features <= (128 if log else 192) else 8,
        "num_stages": 2,
    }


@triton.jit
def _head(i, T, H: tl.constexpr, BT: tl.constexpr):
    """Return program i's head and sequence, the number of the sequence's first position, the head's first row
    in `[B, H, T]`, and the block."""
    n, block = block_of(i // H, T, None, BT)
    start, _ = sequence(n, T, None)
    return i % H, n, start, start * H + i % H * T, block


@triton.jit
def _seen(rows, cols, mask, start, T):
    """The distance from each key to a query, and whether the query sees it."""
    far = rows[:, None] - cols[None, :]
    return far, (far >= 0) & kept(mask, start, cols, T)[None, :]


@triton.jit
def _of_queries(lse_at, over_at, share_at, g_at, i, at, T):
    """Load what the forward pass kept of queries i (lse, over, share), and the gradient of their loss."""
    inside = i < T
    lse = tl.load(lse_at + at + i, mask=inside, other=0.0)
    over = tl.load(over_at + at + i, mask=inside, other=0.0)
    share = tl.load(share_at + at + i, mask=inside, other=0.0)
    return lse, over, share, tl.load(g_at + at + i, mask=inside, other=0.0)


@triton.jit
def _scores(x, y, near, scale):
    """The teacher's scores, -inf where not seen."""
    return tl.where(near, tl.dot(x, tl.trans(y), input_precision="tf32") * scale, float("-inf"))


@triton.jit
def _products(x, y, seen):
    """The products of the features, zero where not seen."""
    return tl.where(seen, tl.dot(x, tl.trans(y), input_precision="tf32"), 0.0)


@triton.jit
def _raised(shift, at, i, T):
    """Load the shifts of keys i; None where features come without shifts."""
    m = None
    if shift is not None:
        m = tl.load(shift + at + i, mask=i < T, other=0.0)
    return m


@triton.jit
def _share(over, m):
    """The factor that turns products of features into weights: 1 / den, or exp(m - lse) with shifts m,
    bounded so that 0 times it is 0."""
    if m is not None:
        over = tl.exp(tl.minimum(m - over, 80.0))
    return over


@triton.jit
def _gradient(s, a, lse, over, share, g, seen, m, floor):
    """The gradient of the products `a` of a tile, from what was kept of its queries and the shifts of its
    keys."""
    over = _share(over, m)
    if m is not None:
        share *= over
        seen = seen & (a > 0)
    live = seen & (a * over >= floor)
    return tl.where(seen, g * (share - tl.where(live, tl.exp(s - lse) / tl.where(live, a, 1.0), 0.0)), 0.0)


@triton.jit(do_not_specialize=["T", "W"])
def _forward(
    q, k, phi_q, phi_k, mask, shift, loss, lse_at, over_at, share_at, T, W, scale, floor,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the loss of a block of queries and what a backward pass reads, each `[B, H, T]`: log-sum-exp of
    the scores, 1 / den and u / den.

    With shifts the last two are the log-sum-exp of the weights, and u.
    """
    h, n, start, at, block = _head(tl.program_id(0), T, H, BT)
    rows = block * BT + tl.arange(0, BT)
    qt = tile(q + (start * H + h) * D, rows, T, H, D)
    fq = tile(phi_q + at * F, rows, T, 1, F)
    k += (start * N + h // (H // N)) * D
    phi_k += at * F
    top = tl.full([BT], float("-inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    den = tl.zeros([BT], tl.float32)
    highest = tl.full([BT], float("-inf"), tl.float32)
    for j in range(0, (block + 1) * (BT // BC)):
        cols = j * BC + tl.arange(0, BC)
        far, seen = _seen(rows, cols, mask, start, T)
        a = _products(fq, tile(phi_k, cols, T, 1, F), seen)
        m = _raised(shift, at, cols, T)
        if m is not None:
            log = tl.where(a > 0, tl.log(tl.where(a > 0, a, 1.0)) + m[None, :], float("-inf"))
            higher = tl.maximum(highest, tl.max(log, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            den = den * tl.exp(highest - base) + tl.sum(tl.exp(log - base[:, None]), 1)
            highest = higher
        else:
            den += tl.sum(a, 1)
        s = _scores(qt, tile(k, cols, T, N, D), seen & (far < W), scale)
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(s - safe[:, None]), 1)
        top = new
    lse = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    if shift is not None:
        over = tl.where(den > 0, highest + tl.log(tl.where(den > 0, den, 1.0)), 0.0)
    else:
        over = reciprocal(den)
    value = tl.zeros([BT], tl.float32)
    unclamped = tl.zeros([BT], tl.float32)
    for j in range(0, (block + 1) * (BT // BC)):
        cols = j * BC + tl.arange(0, BC)
        far, seen = _seen(rows, cols, mask, start, T)
        m = _raised(shift, at, cols[None, :], T)
        weight = _products(fq, tile(phi_k, cols, T, 1, F), seen) * _share(over[:, None], m)
        p = tl.exp(_scores(qt, tile(k, cols, T, N, D), seen & (far < W), scale) - lse[:, None])
        value -= tl.sum(p * tl.log(tl.maximum(weight, floor)), 1)
        unclamped += tl.sum(tl.where(weight >= floor, p, 0.0), 1)
    inside = rows < T
    tl.store(loss + at + rows, value, mask=inside)
    tl.store(lse_at + at + rows, lse, mask=inside)
    tl.store(over_at + at + rows, over, mask=inside)
    if shift is not None:
        share = unclamped
    else:
        share = tl.where(nothing(den), 0.0, unclamped * over)
    tl.store(share_at + at + rows, share, mask=inside)


@triton.jit(do_not_specialize=["T", "W"])
def _queries(
    q, k, phi_q, phi_k, mask, shift, lse_at, over_at, share_at, g_at, dphi_q, T, W, scale, floor,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of phi_q of a block of queries."""
    h, n, start, at, block = _head(tl.program_id(0), T, H, BT)
    rows = block * BT + tl.arange(0, BT)
    qt = tile(q + (start * H + h) * D, rows, T, H, D)
    fq = tile(phi_q + at * F, rows, T, 1, F)
    lse, over, share, g = _of_queries(lse_at, over_at, share_at, g_at, rows[:, None], at, T)
    k += (start * N + h // (H // N)) * D
    acc = tl.zeros([BT, F], tl.float32)
    for j in range(0, (block + 1) * (BT // BC)):
        cols = j * BC + tl.arange(0, BC)
        far, seen = _seen(rows, cols, mask, start, T)
        fk = tile(phi_k + at * F, cols, T, 1, F)
        a = _products(fq, fk, seen)
        s = _scores(qt, tile(k, cols, T, N, D), seen & (far < W), scale)
        m = _raised(shift, at, cols[None, :], T)
        acc = tl.dot(_gradient(s, a, lse, over, share, g, seen, m, floor), fk, acc, input_precision="tf32")
    put(dphi_q + at * F, acc, rows, T, 1, F)


@triton.jit(do_not_specialize=["T", "W"])
def _keys(
    q, k, phi_q, phi_k, mask, shift, lse_at, over_at, share_at, g_at, dphi_k, T, W, scale, floor,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of phi_k of a block of keys.

    All tiles are formed transposed, so that an accumulator is never the transposed left operand of a product.
    """
    h, n, start, at, block = _head(tl.program_id(0), T, H, BT)
    rows = block * BT + tl.arange(0, BT)
    kt = tile(k + (start * N + h // (H // N)) * D, rows, T, N, D)
    fk = tile(phi_k + at * F, rows, T, 1, F)
    keep = kept(mask, start, rows, T)[:, None]
    m = _raised(shift, at, rows[:, None], T)
    q += (start * H + h) * D
    acc = tl.zeros([BT, F], tl.float32)
    for i in range(block * (BT // BC), tl.cdiv(T, BC)):
        cols = i * BC + tl.arange(0, BC)
        far = cols[None, :] - rows[:, None]
        seen = (far >= 0) & keep & (cols < T)[None, :]
        fq = tile(phi_q + at * F, cols, T, 1, F)
        lse, over, share, g = _of_queries(lse_at, over_at, share_at, g_at, cols[None, :], at, T)
        a = _products(fk, fq, seen)
        s = _scores(kt, tile(q, cols, T, H, D), seen & (far < W), scale)
        acc = tl.dot(_gradient(s, a, lse, over, share, g, seen, m, floor), fq, acc, input_precision="tf32")
    put(dphi_k + at * F, acc, rows, T, 1, F)


@traceable
class _CrossEntropy(torch.autograd.Function):
    """The loss `[B, H, T]` of q and k `[B, T, H or Hkv, D]` and head-major features `[B, H, T, F]`."""

    @staticmethod
    def forward(ctx, q, k, phi_q, phi_k, mask, shift, window, scale):
        batch, heads, length, features = phi_q.shape
        shape = {
            "H": heads,
            "N": k.shape[2],
            "D": q.shape[3],
            "F": features,
            **config(q.shape[3], features, shift is not None),
        }
        grid = (batch * heads * cdiv(length, shape["BT"]),)
        loss, lse, over, share = (
            torch.empty(batch, heads, length, device=q.device, dtype=torch.float32) for _ in range(4)
        )
        _forward[grid](
            q, k, phi_q, phi_k, mask, shift, loss, lse, over, share, length, window, scale, FLOOR, **shape
        )
        ctx.save_for_backward(q, k, phi_q, phi_k, mask, shift, lse, over, share)
        ctx.launch = grid, (length, window, scale, FLOOR), shape
        return loss

    @staticmethod
    def backward(ctx, g):
        grid, numbers, shape = ctx.launch
        saved, g, gradients = ctx.saved_tensors, g.contiguous(), [None, None]
        for i, kernel in enumerate((_queries, _keys)):
            if ctx.needs_input_grad[2 + i]:
                gradients[i] = torch.empty_like(saved[2 + i])
                kernel[grid](*saved, g, gradients[i], *numbers, **shape)
        return None, None, *gradients, None, None, None, None


def attention_cross_entropy(
    q, k, phi_q, phi_k, log: bool = False, *, scale: float, window: int | None, key_mask: Tensor | None
) -> Tensor:  # fmt: skip
    """`relinear_kernels.attention_cross_entropy` by the kernels of this module. Raises ValueError for shapes
    that do not fit together."""
    op, heads = "attention_cross_entropy", q.shape[2]
    if heads % k.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {heads} query heads and {k.shape[2]} key heads"
        )
    if phi_q.shape != phi_k.shape or phi_q.shape[:3] != q.shape[:3]:
        want = f"[B={q.shape[0]}, T={q.shape[1]}, H={heads}, F]"
        raise ValueError(
            f"{op} takes features phi_q and phi_k of {want}; got {list(phi_q.shape)} and {list(phi_k.shape)}"
        )
    q, k = (x.detach().to(widest(q, k)).contiguous() for x in (q, k))
    phi_q, phi_k = (x.transpose(1, 2).contiguous() for x in (phi_q, phi_k))
    shift = None
    if log:  # the shift that is subtracted is added elsewhere or cancels, so it needs no gradient
        shift = phi_k.detach().amax(-1)
        phi_q, phi_k = (phi_q - phi_q.detach().amax(-1, keepdim=True)).exp(), (phi_k - shift[..., None]).exp()
    mask = None if key_mask is None else key_mask.contiguous()
    window = q.shape[1] if window is None else window
    return apply("_CrossEntropy", q, k, phi_q, phi_k, mask, shift, window, scale).transpose(1, 2)
