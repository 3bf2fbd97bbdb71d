"""Imported by every Python process on a virtual GPU: replaces PyTorch's kernels at its import."""

import ctypes
import importlib.machinery
import os
import sys
from pathlib import Path

PRELOADED = Path(os.environ.get("LD_PRELOAD", "").partition(":")[0])


def after_torch(torch):
    ctypes.CDLL(str(PRELOADED.parent / "operators.so"))
    # attention in terms of operators that have a CPU kernel
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.version = lambda: None  # it is not there
    # convolutions would call cuDNN, which computes nothing
    global library
    library = torch.library.Library("aten", "IMPL")
    for name in ("convolution", "convolution_backward"):
        library.impl(name, on_cpu(torch, getattr(torch.ops.aten, name).default), "CUDA")
    library.impl("_flash_attention_forward", flash_forward, "CUDA")
    library.impl("_flash_attention_backward", flash_backward, "CUDA")


def weights_of(q, k, starts, i, scale):
    """Attention weights (heads, queries, keys) of sequence i, and the indices of both."""
    (a, b), (c, d) = (at[i : i + 2].tolist() for at in starts)
    groups = q.shape[1] // k.shape[1]
    scores = q[a:b].float().transpose(0, 1) @ k[c:d].float().repeat_interleave(groups, 1).permute(
        1, 2, 0
    )
    visible = scores.new_ones(b - a, d - c).tril(d - c - (b - a)) > 0
    scores = scores * (scale or q.shape[2] ** -0.5)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1), slice(a, b), slice(c, d)


def flash_forward(q, k, v, q_starts, k_starts, *sizes, scale=None, **options):
    """FlashAttention of sequences of several lengths, causal, with grouped queries."""
    out = q.new_zeros(q.shape)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(q_starts) - 1):
        weights, own, seen = weights_of(q, k, (q_starts, k_starts), i, scale)
        values = v[seen].float().repeat_interleave(groups, 1).transpose(0, 1)
        out[own] = (weights @ values).transpose(0, 1).to(q.dtype)
    empty = q.new_zeros(0)
    return out, q.new_zeros(q.shape[1], q.shape[0]).float(), empty, empty, empty


def flash_backward(grad, q, k, v, out, lse, q_starts, k_starts, *sizes, scale=None, **options):
    grads = [x.new_zeros(x.shape).float() for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    fewer = lambda x: x.transpose(0, 1).unflatten(1, (-1, groups)).sum(2)  # back to heads of keys
    for i in range(len(q_starts) - 1):
        weights, own, seen = weights_of(q, k, (q_starts, k_starts), i, scale)
        keys, values = (
            x[seen].float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v)
        )
        upstream = grad[own].float().transpose(0, 1)  # (heads, queries, D)
        by_weight = upstream @ values.transpose(1, 2)
        by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True))
        by_score = by_score * (scale or q.shape[2] ** -0.5)
        grads[0][own] = (by_score @ keys).transpose(0, 1)
        grads[1][seen] = fewer(by_score.transpose(1, 2) @ q[own].float().transpose(0, 1))
        grads[2][seen] = fewer(weights.transpose(1, 2) @ upstream)
    return tuple(grad.to(q.dtype) for grad in grads)


def on_cpu(torch, op):
    """The operator `op`, computed on the CPU from copies."""
    from torch.utils._pytree import tree_map_only

    def run(*args, **kwargs):
        device = next(x.device for x in args if isinstance(x, torch.Tensor))
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.cpu(), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: x.to(device), op(*args, **kwargs))

    return run


class Finder:
    """Calls `after_torch` at the end of the import of torch."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            sys.meta_path.remove(self)
            run(module)
            after_torch(module)

        spec.loader.exec_module = exec_module
        return spec


if PRELOADED.name == "libvirtual_gpu.so":
    sys.meta_path.insert(0, Finder())
