"""LoLCATs' hybrid in Triton: softmax inside the window, linear attention on everything older, one shared
denominator.

    query t:  k_0 ............ k_(t-window) | k_(t-window+1) ............. k_t
              linear: phi(q_t) S            | softmax: gamma exp(s - maximum)
              o_t = (linear numerator + softmax numerator) / (linear denominator + softmax denominator)

No kernels of its own. The window's kernels give its softmax, the exact maximum (the linear weights beside it
are not shifted) and the key that attains it; the linear ones walk the keys `window` positions late and put
both parts over one denominator. In the backward pass the window's weights are gamma e^(s - maximum) / den,
and the maximum takes its share from the key that attains it (the first, where several do): sum over the
window of p dA = weight (dO . O_window - dO . O) / den, known without another pass.
"""

import torch

from relinear_kernels.hybrid_attention_reference import HybridState
from relinear_kernels.linear_attention_reference import (
    LinearState,
    per_query_head,
    per_state_head,
    state_heads,
)
from relinear_kernels.linear_attention_triton import Walk, both
from relinear_kernels.projection_triton import Side, gradients, group_sum, project
from relinear_kernels.sliding_window_attention_reference import begin, extend
from relinear_kernels.sliding_window_attention_triton import Near
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import prepared


@traceable
class _Hybrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_q, w_k, gamma, mask, s0, z0, feature, window, scale, keep_state, cu_seqlens):
        batch, offset = len(q), k.shape[1] - q.shape[1]
        walk = Walk.over(q, v, w_q, feature, cu_seqlens, offset, offset - window)
        near = Near.over(q, k, window, scale, cu_seqlens, gamma.float().contiguous())
        y_q, y_k = (q, k) if w_q is None else project(q, k, w_q, w_k, feature=feature)
        close, *of_window = near.forward(q, k, v, mask)
        end = walk.final(q.device) if keep_state else None
        states = walk.states(y_k, v, begin=None if s0 is None else (s0, z0), end=end, mask=mask)
        den = walk.scalars(batch, q.device) if any(ctx.needs_input_grad) else None
        o = walk.outputs(
            y_q,
            y_k,
            v,
            torch.empty_like(q),
            states,
            normalize=True,
            mask=mask,
            den=den,
            near=close,
            near_den=of_window[2],
        )
        s_end, z_end = end or (None, None)
        ctx.save_for_backward(
            q, k, v, w_q, w_k, y_q, y_k, gamma, mask, *states, s_end, z_end, s0, o, den, close, *of_window
        )
        ctx.walk, ctx.near = walk, near._replace(gamma=None)
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        (
            q,
            k,
            v,
            w_q,
            w_k,
            y_q,
            y_k,
            gamma,
            mask,
            s,
            z,
            s_end,
            z_end,
            s0,
            o,
            den,
            close,
            top,
            arg,
            weight,
        ) = ctx.saved_tensors
        walk, near = ctx.walk, ctx.near._replace(gamma=gamma.float().contiguous())
        need_q, need_k, need_v, need_wq, need_wk, need_g, _, need_s0, need_z0 = ctx.needs_input_grad[:9]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        do, delta, share = walk.numerators(do, o, den, close, weight)
        of_window = (do, delta, arg, share)
        d_gamma = (share.view(len(gamma), -1).sum(1) / near.gamma).to(gamma.dtype) if need_g else None
        side_q = side_k = dq = dk = dv = ds0 = dz0 = None
        if need_q:
            dq = torch.empty_like(q)
            near.queries(q, k, v, mask, o, top, *of_window, dq)
        if need_q or need_wq:
            dy = walk.maps(y_q, y_k, do, v, (s, z), mask=mask, row_scalar=delta)
            side_q = Side(dy, q, w_q, None, (need_q, need_wq, False), onto=dq)
        if need_k or need_v:
            dk, dv = near.keys(q, k, v, mask, top, *of_window)
        if need_k or need_v or need_wk or need_s0 or need_z0:
            end = ds0, dz0 = (
                (torch.empty_like(s0), s0.new_empty(s0.shape[:-1])) if need_s0 or need_z0 else (None, None)
            )
            columns = {"reverse": True}
            begin = both(ds_end, dz_end, s_end, z_end)
            states = walk.states(
                y_q, do, begin=begin, end=None if ds0 is None else end, scalar=delta, **columns
            )
            columns |= {"row_mask": mask}
            if need_v and dv.shape == q.shape[:1] + dv.shape[1:2] + q.shape[2:]:
                walk.outputs(y_k, y_q, do, dv, states, near=dv, **columns)
            elif need_v:  # the linear part comes per query head; keys that are no query's yet get nothing
                far = v.new_zeros(*v.shape[:2], *q.shape[2:])
                dv += group_sum(walk.outputs(y_k, y_q, do, far, states, **columns), v)
            if need_k or need_wk:
                dy = walk.maps(y_k, y_q, v, do, states, scalar=delta, **columns)
                side_k = Side(dy, k, w_k, None, (need_k, need_wk, False), onto=dk)
        (dq, dw_q, _), (dk, dw_k, _) = gradients(side_q, side_k)
        return (dq, dk, dv, dw_q, dw_k, d_gamma, None, ds0, dz0, *(None,) * 5)


def hybrid_attention(
    q,
    k,
    v,
    w_q=None,
    w_k=None,
    *,
    feature="softmax_pm",
    window,
    window_factor,
    scale=None,
    key_mask=None,
    initial_state=None,
    return_state=False,
    cu_seqlens=None,
    empty_ring,
):
    """`relinear_kernels.hybrid_attention` by the kernels of this module. Raises ValueError for shapes that do
    not fit together.

    `empty_ring()` is the ring before the first token; only called for where a state is returned without one
    given.
    """
    dim, dtype, heads, states = q.shape[-1], v.dtype, q.shape[2], state_heads(w_k, q.shape[2])
    if v.shape[-1] != dim:
        raise ValueError(
            f"hybrid_attention on the Triton path takes v as wide as q and k; got {v.shape[-1]} and {dim}"
        )
    q, k, v, w_q, w_k, *_ = prepared(q, k, v, w_q, w_k, cu_seqlens=cu_seqlens)
    scale = dim**-0.5 if scale is None else scale
    keys, values, mask, ring, s0, z0 = k, v, key_mask, None, None, None
    if initial_state is None and key_mask is None:
        ring = begin(empty_ring(), k, v) if return_state else None
    elif initial_state is not None or return_state:
        keys, values, mask, ring = extend(
            empty_ring() if initial_state is None else initial_state.ring, k, v, key_mask
        )
        if initial_state is not None:
            s0, z0, _ = (x.contiguous() for x in per_query_head(initial_state.linear, heads))
    o, s, z = apply(
        "_Hybrid",
        q,
        keys.contiguous(),
        values.contiguous(),
        w_q,
        w_k,
        window_factor,
        None if mask is None else mask.contiguous(),
        s0,
        z0,
        feature,
        window,
        scale,
        return_state,
        cu_seqlens,
        keep=12,
        outputs=(True, return_state, return_state),
    )
    o = o.to(dtype)
    return (
        (o, HybridState(ring, per_state_head(LinearState(s, z, torch.full_like(z, -torch.inf)), states)))
        if return_state
        else o
    )
