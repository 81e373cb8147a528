"""Linear attention: its definition (quadratic), its chunked form (the CPU path) and its state.

    out_t = sum_{i<=t} exp(G_t - G_i) (phi(q_t) . phi(k_i)) v_i   / the same sum without v_i
    (normalize=True)

with G the running sum of ``log_decay``. LoLCATs Eq. 3 to 5; Katharopoulos et al. 2020; with decay SUPRA Eq. 6
and Lizard Eq. 1. Not causal (encoders: Hedgehog Eq. 2 over all keys), every query sees every key, and there
is neither decay nor state.

A state belongs to a query head, since the papers' keys meet a matrix of each query head. Where `w_k` (and
what fades) has one of each key head, the queries of a group read the same features and share one state: heads
below are written M, the state's.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from relinear_kernels.features import ACTIVATIONS, EXPONENTIAL, check_feature, exp, project

CHUNK = 64
# keys of a chunk share a reference per feature; fewer keys spread less, and lose less below it
EXPONENTIAL_CHUNK = 16


class LinearState(NamedTuple):
    """The state after a prefix, in float32; its size is fixed from the first token on."""

    kv: Float[Tensor, "B M F D"]  # sum_i exp(G_T - G_i) phi(k_i) v_i^T e^-shift
    z: Float[Tensor, "B M F"]  # sum_i exp(G_T - G_i) phi(k_i) e^-shift
    # per feature, the running maximum exponential keys are held relative to; -inf without one
    shift: Float[Tensor, "B M F"]


def linear_state(
    batch: int, heads: int, features: int, dim: int, device=None, dtype=torch.float32
) -> LinearState:
    """The state before the first token. `dtype` is that of keys and values; sums are at least float32."""
    held = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
    return LinearState(
        torch.zeros(batch, heads, features, dim, **held),
        torch.zeros(batch, heads, features, **held),
        torch.full((batch, heads, features), -torch.inf, **held),
    )


def check_sums(state: LinearState | None) -> None:
    """Raises ValueError for sums in less than float32."""
    if state is not None and state.kv.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"a linear state is held in float32; got {state.kv.dtype}: what a token adds that is small beside"
            " its sum is lost in rounding, 27 % of an output after 4,096 tokens without decay in bfloat16"
        )


def state_heads(w_k: Tensor | None, heads: int) -> int:
    """The number of states: one for each of the keys' matrices."""
    return heads if w_k is None else w_k.shape[0]


def per_query_head(x, heads: int, dim: int = 1):
    """A tensor with heads along `dim`, or a state, for every query head: those of a group share what is one
    of their key head."""
    if isinstance(x, LinearState):
        return LinearState(*(per_query_head(part, heads) for part in x))
    return x if x is None or x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def per_state_head(state: LinearState, heads: int) -> LinearState:
    """One state for each of `heads`, from states of every query head that are equal within a group. In memory
    of its own: a view would keep all."""
    return LinearState(*(x[:, :: x.shape[1] // heads].contiguous() for x in state))


def blocks(length: int, size: int) -> tuple[int, int, int]:
    """Return (positions of a block, number of blocks, padding of the last one).

    There are as few blocks of at most `size` positions as hold `length`, and they are as small as that number
    allows.
    """
    n = -(-length // size)
    even = -(-length // n)
    return even, n, n * even - length


def _accumulate(x: Tensor) -> Tensor:
    """x in float32, in which sums are taken; a float64 x, as tests have it, unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def normaliser(den: Tensor) -> Tensor:
    """The denominator: the sum of a row's weights as it is, of any size and sign, so that the weights sum to
    1 whatever the features' scale.

    Only a sum that is zero as far as its dtype can tell becomes 1: that of a query that sees no key, or none
    with which it shares a feature.
    """
    dtype = torch.finfo(den.dtype)
    return den.masked_fill(den.abs() < dtype.tiny / dtype.eps, 1.0)


def pair_decay(log_decay: Float[Tensor, "... T"]) -> Float[Tensor, "... T T"]:
    """The log decay of every pair: at [t, i] the sum of those behind i up to t, and 0 where i is not before
    t.

    Every pair has a sum of its own. The difference of two running sums would have the rounding of all that
    comes before both, which is all that is left of it after a huge decay, and no value after one of minus
    infinity.
    """
    each = log_decay[..., None, :].expand(*log_decay.shape, log_decay.shape[-1])  # [.., i, t]
    return each.triu(1).cumsum(-1).transpose(-1, -2)


def every_decay(
    log_decay: Tensor | None, batch: int, length: int, heads: int, states: int
) -> Float[Tensor, "B T M"] | None:
    """The decay of every token and state. Raises ValueError for a `log_decay` of any other shape than
    [states] or [B, T, states]."""
    if log_decay is None:
        return None
    if log_decay.shape not in ((states,), (batch, length, states)):
        name = "H" if states == heads else "Hkv"
        raise ValueError(
            f"log_decay must be [{name}={states}] or [B={batch}, T={length}, {name}={states}]; got"
            f" {list(log_decay.shape)}"
        )
    return log_decay if log_decay.ndim == 3 else log_decay.expand(batch, length, states)


def _features(q, k, w_q, w_k, b_q, b_k, feature, key_mask, chunk, shift):
    """phi_q and phi_k ``[B, H, T, F]``, and for exponential maps the maximum that each chunk's keys are
    relative to ``[B, H, N, F]``, else None.

    T is a multiple of `chunk` here.
    """
    heads = q.shape[2]
    x, y = project(q, w_q, b_q, heads), project(k, w_k, b_k, heads)
    valid = None if key_mask is None else key_mask[:, None, :, None]
    if feature in ACTIVATIONS:
        phi_q, phi_k = ACTIVATIONS[feature](x), ACTIVATIONS[feature](y)
        return phi_q, phi_k if valid is None else phi_k * valid, None
    x, y = EXPONENTIAL[feature](x), EXPONENTIAL[feature](y)
    if valid is not None:
        y = y.masked_fill(~valid, -torch.inf)
    # exp(x_f + y_f) = exp(x_f + m_f) exp(y_f - m_f): each feature's keys are held relative to their largest
    # so far, one reference per chunk, never smaller than the chunk before, so that the state only ever
    # shrinks when it is rescaled. What q's row maximum takes away cancels on normalisation.
    top = y.detach().unflatten(2, (-1, chunk)).amax(3)
    first = top[:, :, :1] if shift is None else torch.maximum(top[:, :, :1], shift.detach()[:, :, None])
    reference = torch.cat([first, top[:, :, 1:]], 2).cummax(2).values
    anchor = torch.where(reference.isinf(), torch.zeros_like(reference), reference).repeat_interleave(
        chunk, 2
    )
    x = x + anchor
    phi_q, phi_k = exp(x - x.detach().amax(-1, keepdim=True)), exp(y - anchor)
    return phi_q, phi_k, reference


def linear_features(
    q, k, w_q=None, w_k=None, *, feature="softmax_pm", b_q=None, b_k=None
) -> tuple[Float[Tensor, "B T H F"], Float[Tensor, "B T H F"], bool]:
    """Return (phi_q, phi_k, is_log), at least float32 and head-major in memory. Of exponential features they
    are logarithms, `is_log` being True."""
    log, heads = check_feature(feature) in EXPONENTIAL, q.shape[2]
    act = (EXPONENTIAL if log else ACTIVATIONS)[feature]
    phi_q, phi_k = (
        act(project(_accumulate(x), w, b, heads)).transpose(1, 2)
        for x, w, b in ((q, w_q, b_q), (k, w_k, b_k))
    )
    return phi_q, phi_k, log


def _log_products(x: Float[Tensor, "B H T F"], y: Float[Tensor, "B H T F"]) -> Float[Tensor, "B H T T"]:
    """log sum_f exp(x_tf + y_if), less a constant of each row t. It takes one product, and no tensor of T x T
    x F.

    Each token's exponentials are relative to its largest one. If the largest features of t and i differ, the
    sum is far smaller than the product of their largest. float64 holds that down to 1e-300; trained maps do
    reach the 1e-38 at which float32 ends.
    """
    dtype, x, y = x.dtype, x.double(), y.double()
    top = y.detach().amax(-1)
    sums = (x - x.detach().amax(-1, keepdim=True)).exp() @ (y - top[..., None]).exp().transpose(-1, -2)
    # not the tiniest number, whose reciprocal nearly overflows
    return (sums.clamp(min=1e-300).log() + top[:, :, None]).to(dtype)


def linear_attention_weights(
    q,
    k,
    w_q=None,
    w_k=None,
    *,
    feature="softmax_pm",
    b_q=None,
    b_k=None,
    log_decay=None,
    normalize=True,
    key_mask=None,
    causal=True,
) -> Float[Tensor, "B H T T"]:
    """The T x T matrix linear attention implies, row = query. The definition; quadratic in T, for analysis
    and as the tests' oracle."""
    check_feature(feature)
    check_causal(causal, log_decay=log_decay)
    q, k = _accumulate(q), _accumulate(k)
    batch, length, heads, _ = q.shape
    reach = torch.ones(length, length, dtype=torch.bool, device=q.device)
    reach = reach.tril() if causal else reach
    if feature in ACTIVATIONS:
        phi_q, phi_k, _ = _features(q, k, w_q, w_k, b_q, b_k, feature, key_mask, length, None)
        a = phi_q @ phi_k.transpose(-1, -2)
    elif not normalize:
        raise ValueError(
            "exponential features need normalize=True: their sums have no common scale otherwise"
        )
    else:
        act = EXPONENTIAL[feature]
        logits = _log_products(act(project(q, w_q, b_q, heads)), act(project(k, w_k, b_k, heads)))
        seen = reach if key_mask is None else reach & key_mask[:, None, None, :]
        # Masked before the exponential: scores that a row does not see may be far above those it sees, and
        # zero times infinity has no gradient.
        logits = logits.masked_fill(~seen, -torch.inf)
        top = logits.detach().amax(-1, keepdim=True)
        a = (logits - top.masked_fill(top.isinf(), 0.0)).exp()
    decay = per_query_head(every_decay(log_decay, batch, length, heads, state_heads(w_k, heads)), heads, 2)
    if decay is not None:
        a = a * pair_decay(decay.to(q.dtype).transpose(1, 2)).exp()
    a = torch.where(reach, a, torch.zeros_like(a)) if causal else a
    return a / normaliser(a.sum(-1, keepdim=True)) if normalize else a


def linear_attention_quadratic(q, k, v, *args, **kwargs) -> Float[Tensor, "B T H D"]:
    """`linear_attention_weights` times v. Arguments as there."""
    a = linear_attention_weights(q, k, *args, **kwargs)
    group = q.shape[2] // v.shape[2]
    return torch.einsum("bhti,bihd->bthd", a, _accumulate(v).repeat_interleave(group, 2)).to(v.dtype)


def linear_sums(
    q,
    k,
    v,
    w_q,
    w_k,
    *,
    feature,
    b_q=None,
    b_k=None,
    log_decay=None,
    key_mask=None,
    initial_state=None,
    chunk=CHUNK,
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T H"], LinearState]:
    """Numerator, denominator and final state, chunk by chunk: time and memory linear in T (chunk x chunk
    blocks, one state per chunk)."""
    check_feature(feature)
    check_sums(initial_state)
    q, k, v = _accumulate(q), _accumulate(k), _accumulate(v)
    batch, length, heads, _ = q.shape
    groups, dim = v.shape[2:]
    chunk, n, pad = blocks(length, min(chunk, EXPONENTIAL_CHUNK) if feature in EXPONENTIAL else chunk)
    states = state_heads(w_k, heads)
    state = per_query_head(initial_state, heads)
    decay = per_query_head(every_decay(log_decay, batch, length, heads, states), heads, 2)
    if pad:  # whole chunks, filled up by padding that leaves no trace
        q, k, v = (nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        key_mask = nn.functional.pad(real, (0, pad))
        decay = None if decay is None else nn.functional.pad(decay, (0, 0, 0, pad))
    phi_q, phi_k, reference = _features(
        q, k, w_q, w_k, b_q, b_k, feature, key_mask, chunk, None if state is None else state.shift
    )
    if state is None:
        state = linear_state(batch, heads, phi_q.shape[-1], dim, q.device, q.dtype)
    state = LinearState(*(x.to(q.dtype) for x in state))
    phi_q, phi_k = (x.unflatten(2, (n, chunk)) for x in (phi_q, phi_k))  # [B, H, N, C, F]
    v = (
        v.transpose(1, 2)
        .unsqueeze(2)
        .expand(batch, groups, heads // groups, n * chunk, dim)
        .reshape(batch, heads, n, chunk, dim)
    )
    inside = (phi_q @ phi_k.transpose(-1, -2)).tril()
    carry = None
    if decay is not None:
        # [B, H, N, C]; every exponent below is <= 0
        d = decay.to(q.dtype).transpose(1, 2).unflatten(2, (n, chunk))
        pairs, g = exp(pair_decay(d)), exp(d.cumsum(-1))
        inside = inside * pairs
        phi_k = phi_k * pairs[..., -1, :, None]
        phi_q, carry = phi_q * g[..., None], g[..., -1].unbind(2)
    # One tensor a chunk: the backward of an index into all of them writes zeros as large as all of them, for
    # every chunk.
    # [B, H, F, D], [B, H, F]
    added, added_z = (phi_k.transpose(-1, -2) @ v).unbind(2), phi_k.sum(-2).unbind(2)
    shift, rescale = state.shift, None
    if reference is not None:
        before = torch.cat([shift[:, :, None], reference[:, :, :-1]], 2)
        # [B, H, F]
        rescale = exp(torch.where(before.isinf(), torch.zeros_like(before), before - reference)).unbind(2)
        shift = reference[:, :, -1]
    kv, z, entering, entering_z = state.kv, state.z, [], []
    for i in range(n):
        if rescale is not None:  # the state that enters a chunk is held relative to that chunk's reference
            kv, z = kv * rescale[i][..., None], z * rescale[i]
        entering.append(kv)
        entering_z.append(z)
        if carry is not None:
            kv, z = kv * carry[i][..., None, None], z * carry[i][..., None]
        kv, z = kv + added[i], z + added_z[i]
    num = inside @ v + phi_q @ torch.stack(entering, 2)
    den = inside.sum(-1) + (phi_q @ torch.stack(entering_z, 2)[..., None])[..., 0]
    num, den = num.flatten(2, 3).transpose(1, 2)[:, :length], den.flatten(2, 3).transpose(1, 2)[:, :length]
    return num, den, per_state_head(LinearState(kv, z, shift), states)


def check_causal(causal: bool, **given) -> None:
    """Raises ValueError where attention that is not causal is given arguments that need an order of keys."""
    if not causal and (wrong := [name for name, x in given.items() if x is not None]):
        raise ValueError(
            f"attention that is not causal reads a whole sequence at once and takes no {', '.join(wrong)};"
            " possible: causal=True"
        )


def sums_of_all(
    q, k, v, w_q, w_k, *, feature, b_q=None, b_k=None, key_mask=None
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T H"]]:
    """Numerator and denominator of every query over all keys: time and memory linear in T."""
    check_feature(feature)
    q, k, v = _accumulate(q), _accumulate(k), _accumulate(v)
    # one chunk, and one reference a feature
    phi_q, phi_k, _ = _features(q, k, w_q, w_k, b_q, b_k, feature, key_mask, q.shape[1], None)
    kv = torch.einsum("bhtf,bthd->bhfd", phi_k, v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return torch.einsum("bhtf,bhfd->bthd", phi_q, kv), torch.einsum("bhtf,bhf->bth", phi_q, phi_k.sum(2))


def linear_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv Dv"],
    w_q: Float[Tensor, "H D F"] | None = None,
    w_k: Float[Tensor, "M D F"] | None = None,
    *,
    feature: str = "softmax_pm",
    b_q: Float[Tensor, "H F"] | None = None,
    b_k: Float[Tensor, "M F"] | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = True,
    key_mask: Bool[Tensor, "B T"] | None = None,
    causal: bool = True,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    chunk: int = CHUNK,
):
    """Linear attention over a piece of a sequence, in time and memory linear in its length.

    `log_decay` is None, one value per state ``[M]`` (SUPRA's fixed decay) or one per token and state ``[B, T,
    M]`` (Lizard's gate). Keys where `key_mask` is False (padding) leave no trace; give them log_decay 0. A
    decode step is a piece of length 1. Returns ``[B, T, H, Dv]`` in v's dtype, and the `LinearState` after
    the piece if `return_state`: None where it is not `causal`.
    """
    if feature in EXPONENTIAL and not normalize:
        raise ValueError(f"feature {feature!r} needs normalize=True: its sums have no common scale otherwise")
    check_causal(causal, log_decay=log_decay, initial_state=initial_state)
    maps = {"feature": feature, "b_q": b_q, "b_k": b_k, "key_mask": key_mask}
    if causal:
        num, den, state = linear_sums(
            q, k, v, w_q, w_k, **maps, log_decay=log_decay, initial_state=initial_state, chunk=chunk
        )
    else:
        num, den, state = *sums_of_all(q, k, v, w_q, w_k, **maps), None
    out = (num / normaliser(den)[..., None] if normalize else num).to(v.dtype)
    return (out, state) if return_state else out
