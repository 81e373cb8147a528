"""The public `token_cross_entropy`: Triton kernels on CUDA, the definition elsewhere."""

from jaxtyping import Float, Int64
from torch import Tensor

from relinear_kernels import token_cross_entropy_reference as reference
from relinear_kernels.dispatch import takes, use_triton, wrong_dtypes


def token_cross_entropy(logits: Float[Tensor, "N V"], labels: Int64[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The loss of each token in nats, logsumexp(logits_n) - logits_n[labels_n], in float32; 0 where the label
    is -100 (ignored).

    The gradient, softmax less one-hot, goes to the logits in their dtype and is exactly 0 where ignored. The
    kernels form no softmax in memory: forward reads the logits once, backward reads them and writes their
    gradient (after Liger Kernel, Hsu et al. 2024), and neither asks the host anything: they can be recorded
    in a CUDA graph. A label that is no class and not -100 therefore cannot raise there, as it does on a CPU:
    its loss and the gradient of its logits are NaN. Where the kernels do not take the dtype, the definition
    runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    if use_triton(logits) and takes("token_cross_entropy", wrong_dtypes(logits=logits)):
        from relinear_kernels.token_cross_entropy_triton import token_cross_entropy as fused

        return fused(logits, labels)
    return reference.token_cross_entropy(logits, labels)
