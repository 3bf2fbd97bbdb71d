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
    # convolutions would call cuDNN, which computes nothing
    global library
    library = torch.library.Library("aten", "IMPL")
    for name in ("convolution", "convolution_backward"):
        library.impl(name, on_cpu(torch, getattr(torch.ops.aten, name).default), "CUDA")


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
