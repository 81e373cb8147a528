"""The fused token loss against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.testing import DEVICE, DTYPES, check, relative
from relinear_kernels.token_cross_entropy import token_cross_entropy
from relinear_kernels.token_cross_entropy_reference import token_cross_entropy as definition

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")


def inputs(tokens, vocabulary, ignored=0, spread=3.0):
    """Logits and labels, the first `ignored` of them -100."""
    labels = torch.randint(vocabulary, (tokens,))
    labels[:ignored] = -100
    return spread * torch.randn(tokens, vocabulary), labels


def run(logits, labels, weigh=1.0, op=token_cross_entropy):
    """Losses and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    loss = op(logits, labels)
    return loss.detach(), torch.autograd.grad((loss * weigh).sum(), logits)[0]


def both(logits, labels, weigh=1.0):
    """Losses and gradients of the op, and of the definition in float64."""
    return run(logits, labels, weigh), run(logits.double(), labels, weigh, definition)


def on_device(*tensors):
    return [x.to(DEVICE) for x in tensors]


def agree(logits, labels, dtype=torch.float32, **how):
    """Losses and gradients under random weights of the tokens."""
    loss = lambda op: lambda x, options: {"loss": op(**x, **options)}  # noqa: E731
    check(loss(token_cross_entropy), loss(definition), {"logits": logits}, {"labels": labels}, dtype, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "ignored"),
    [(1, 7, 0), (1, 4096, 0), (3, 5000, 1), (5, 1, 2), (70, 33, 20), (4, 8193, 4), (2, 12288, 1)],
)
def test_fused_equals_definition(tokens, vocabulary, ignored, dtype):
    agree(*inputs(tokens, vocabulary, ignored), dtype)


@pytest.mark.parametrize("vocabulary", [15, 16, 17, 32, 33, 100])
def test_blocks_of_any_count(vocabulary, monkeypatch):
    monkeypatch.setattr("relinear_kernels.token_cross_entropy_triton.BLOCK", 16)
    agree(*inputs(6, vocabulary, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_ignored_is_exactly_zero(dtype):
    logits, labels = on_device(*inputs(6, 100, 3))
    logits[1] = torch.nan
    loss, gradient = run(logits.to(dtype), labels, torch.randn(6, device=DEVICE))
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    assert not loss[:3].any() and not gradient[:3].any() and loss[3:].all() and gradient[3:].any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(dtype):
    """Rising, falling and at random, up to 1e4: no overflow, and the losses are as exact as those of small
    ones."""
    logits = torch.linspace(-1e4, 1e4, 9000).repeat(3, 1)
    logits[1] = logits[1].flip(0)
    logits[2] = 1e4 * (2 * torch.rand(9000) - 1)
    logits, labels = on_device(logits.to(dtype), torch.tensor([8990, 4000, 1]))
    (loss, gradient), (want, want_gradient) = both(logits, labels)
    assert relative(loss, want) < 1e-5
    # a logsumexp of 1e4 is known to 5e-4
    assert relative(gradient, want_gradient) < (2e-3 if dtype == torch.float32 else 1e-2)


def test_logits_of_minus_infinity(monkeypatch):
    """In some places, before all others, over whole blocks, and all but the label's."""
    monkeypatch.setattr("relinear_kernels.token_cross_entropy_triton.BLOCK", 16)
    logits, labels = on_device(*inputs(4, 50))
    labels[:] = 40
    logits[0, ::3], logits[1, :20], logits[2, 16:33] = (-torch.inf,) * 3
    logits[3, torch.arange(50) != 40] = -torch.inf
    logits[0, 40] = 0.5
    (loss, gradient), (want, want_gradient) = both(logits, labels, torch.randn(4, device=DEVICE))
    assert relative(loss, want) < 1e-5 and relative(gradient, want_gradient) < 1e-5 and loss[3] == 0
    logits[0, 40] = -torch.inf
    (loss, gradient), (want, want_gradient) = both(logits, labels)
    assert loss[0] == want[0] == torch.inf and relative(gradient, want_gradient) < 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_shows(bad):
    logits, labels = on_device(*inputs(2, 50))
    logits[0, 7] = bad
    loss, gradient = run(logits, labels)
    assert (
        not loss[0].isfinite()
        and gradient[0].isnan().any()
        and loss[1].isfinite()
        and gradient[1].isfinite().all()
    )


@pytest.mark.parametrize("label", [-1, 50, -101, 2**40])
def test_a_label_that_is_no_class_makes_its_row_nan(label):
    logits, labels = on_device(*inputs(3, 50))
    labels[1] = label
    loss, gradient = run(logits, labels)
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == [False, True, False]


def test_logits_and_labels_of_any_strides():
    logits, labels = torch.randn(40, 60), torch.randint(30, (40,))
    for x, y in (
        (logits[:, 5:35], labels),
        (logits[::2, :30], labels[::2]),
        (logits[:30].T, labels[:1].expand(60)),
    ):
        x, y = x.to(DEVICE), y.to(DEVICE)  # `to` keeps strides
        (loss, gradient), (want, want_gradient) = both(x, y)
        assert relative(loss, want) < 1e-5 and relative(gradient, want_gradient) < 1e-5


def test_without_a_gradient_and_without_tokens():
    logits, labels = on_device(*inputs(3, 20))
    assert not token_cross_entropy(logits, labels).requires_grad
    loss, gradient = run(logits[:0], labels[:0])
    assert loss.shape == (0,) and gradient.shape == (0, 20)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_a_recorded_graph_replays_on_new_numbers():
    """Run from warm kernels of another batch: nothing is compiled or read on the host while recording."""
    fresh = lambda n: on_device(*inputs(n, 5000, 3))  # noqa: E731
    run(*fresh(10))
    args, new = fresh(33), fresh(33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*args)
    for old, x in zip(args, new, strict=True):
        old.copy_(x)
    graph.replay()
    for a, b in zip(got, run(*new), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_rows_beyond_two_to_the_31():
    rows, vocabulary = 44000, 49152
    logits = torch.zeros(rows, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    last, labels = on_device(*inputs(8, vocabulary))
    logits[-8:] = last
    (loss, gradient), (want, want_gradient) = both(logits[-8:], labels)
    assert relative(loss, want) < 1e-5 and relative(gradient, want_gradient) < 1e-2
    every = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    every[-8:] = labels
    logits.requires_grad_()
    losses = token_cross_entropy(logits, every)
    assert torch.equal(losses[-8:], loss)
    assert torch.equal(torch.autograd.grad(losses.sum(), logits)[0][-8:], gradient)


def test_what_the_kernels_do_not_support_is_named():
    logits, labels = on_device(*inputs(4, 16))
    with pytest.raises(ValueError, match=r"takes the dtypes .*; got logits torch.float64"):
        token_cross_entropy(logits.double(), labels)
    with pytest.raises(ValueError, match=r"takes logits \[N, V\]; got \[2, 2, 16\]"):
        token_cross_entropy(logits.view(2, 2, 16), labels)
    with pytest.raises(ValueError, match=r"takes labels \[N=4\] of torch.int64; got \[3\] of torch.int64"):
        token_cross_entropy(logits, labels[:3])
    with pytest.raises(ValueError, match=r"labels \[N=4\] of torch.int64; got \[4\] of torch.int32"):
        token_cross_entropy(logits, labels.int())


@pytest.mark.parametrize("path", ["torch", "reference"])
def test_the_other_paths_are_the_definition(path, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", path)
    logits, labels = on_device(*inputs(5, 24, 2))
    assert torch.equal(token_cross_entropy(logits, labels), definition(logits, labels))
    assert token_cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
    got, want = (
        token_cross_entropy(logits.double(), labels),
        -logits.double().log_softmax(1).gather(1, labels.clamp(0)[:, None])[:, 0],
    )
    assert got.dtype == torch.float64 and not got[:2].any() and relative(got[2:], want[2:]) < 1e-12
