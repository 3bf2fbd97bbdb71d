"""Build the virtual GPU for this interpreter's PyTorch, or run a command on it.

    python tests/virtual_gpu/build.py               # prints the folder of the libraries
    python tests/virtual_gpu/build.py COMMAND...    # what run.sh does

libvirtual_gpu.so holds every function that does something. For each library of NVIDIA's, a stub
with its soname and symbol versions holds the rest, which return 0. operators.so replaces PyTorch's
kernels. See README.md.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = HERE / "site"
SOURCES = sorted(p for p in HERE.rglob("*") if p.suffix in {".cpp", ".h", ".py"})
SYSTEM = ("core", "runtime", "driver", "libraries", "nccl")
REPLACED = (
    "cudart cublas cublasLt cufft cufile curand cusolver cusparse cupti cudnn cusparseLt nccl "
    "nvshmem_host"
).split()

# functions that do what another one does, which gets the same arguments
SAME = {
    "cudaDeviceGetDefaultMemPool": "virtual_gpu_stub_handle",
    "cudaEventCreate": "cudaEventCreateWithFlags",
    "cudaEventRecordWithFlags": "cudaEventRecord",
    "cudaFreeHost": "cudaFreeAsync",
    "cudaGetKernel": "cudaGetFuncBySymbol",
    "cudaGraphInstantiateWithFlags": "cudaGraphInstantiate",
    "cudaHostUnregister": "cudaFreeAsync",
    "cudaMallocAsync": "cudaMalloc",
    "cudaMallocFromPoolAsync": "cudaMalloc",
    "cudaMallocHost": "cudaHostAlloc",
    "cudaMallocManaged": "cudaMalloc",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": (
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor"
    ),
    "cudaRuntimeGetVersion": "cudaDriverGetVersion",
    "cudaStreamCreate": "cudaStreamCreateWithFlags",
    "__cudaGetKernel": "cudaGetFuncBySymbol",
    "__cudaLaunchKernel": "cudaLaunchKernel",
    "cuCtxGetDevice": "cudaGetDevice",
    "cuCtxSynchronize": "cudaDeviceSynchronize",
    "cuDeviceCanAccessPeer": "cudaDeviceCanAccessPeer",
    "cuDeviceGetAttribute": "cudaDeviceGetAttribute",
    "cuDeviceGetCount": "cudaGetDeviceCount",
    "cuDriverGetVersion": "cudaDriverGetVersion",
    "cuEventCreate": "cudaEventCreateWithFlags",
    "cuEventElapsedTime": "cudaEventElapsedTime",
    "cuEventQuery": "cudaEventQuery",
    "cuEventRecord": "cudaEventRecord",
    "cuEventSynchronize": "cudaEventSynchronize",
    "cuKernelGetAttribute": "cuFuncGetAttribute",
    "cuMemAlloc": "cudaMalloc",
    "cuMemFree": "cudaFree",
    "cuMemGetInfo": "cudaMemGetInfo",
    "cuMemcpy": "cudaMemcpy",
    "cuMemcpyAsync": "virtual_gpu_copy",
    "cuMemcpyDtoHAsync": "virtual_gpu_copy",
    "cuMemcpyDtoH": "cudaMemcpy",
    "cuMemcpyHtoDAsync": "virtual_gpu_copy",
    "cuMemcpyHtoD": "cudaMemcpy",
    "cuMemsetD8": "cudaMemset",
    "cuMemsetD8Async": "cudaMemsetAsync",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamCreate": "cudaStreamCreateWithFlags",
    "cuStreamIsCapturing": "cudaStreamIsCapturing",
    "cuStreamQuery": "cudaStreamQuery",
    "cuStreamSynchronize": "cudaStreamSynchronize",
    "cuStreamWaitEvent": "cudaStreamWaitEvent",
    "ncclCommFinalize": "virtual_gpu_stub",
    "ncclCommInitRankConfig": "ncclCommInitRank",
    "ncclGroupEnd": "virtual_gpu_stub",
    "ncclGroupStart": "virtual_gpu_stub",
    "nvmlDeviceGetCount": "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex": "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMinorNumber": "nvmlDeviceGetIndex",
    "nvmlInitWithFlags": "virtual_gpu_stub",
    "nvmlInit": "virtual_gpu_stub",
    "nvmlShutdown": "virtual_gpu_stub",
    "nvmlSystemGetCudaDriverVersion": "cudaDriverGetVersion",
}
# other functions whose first argument is where a new handle goes
CREATES = re.compile(r"(?!cufft).*(Create|cu\w+(LoadData|GetFunction|GetKernel|GetModule)(Ex)?$)")
# other functions that return a text
TEXTS = re.compile(r".*(Get(Last)?|_)([Ee]rror|[Ss]tatus)_?([Ss]tring|[Nn]ame|error)?$")


def site_packages() -> Path:
    """The folder in which this interpreter finds torch."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin, "torch is not installed"
    return Path(spec.origin).parents[1]


def cannot_build() -> str:
    """Why the virtual GPU cannot be built here; empty if it can."""
    missing = [tool for tool in ("g++", "nm") if not shutil.which(tool)]
    if missing:
        return f"the virtual GPU needs {' and '.join(missing)}"
    if not list(site_packages().glob("nvidia/cu*/include/cuda.h")):
        return "the virtual GPU needs PyTorch's CUDA build, from PyPI"
    return ""


def build() -> Path:
    """The folder of the libraries, which are built if they are not in the user's cache yet."""
    key = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in SOURCES:
        key.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(cache if cache.exists() else cache.parent, os.W_OK):
        cache = Path(tempfile.gettempdir())
    folder = cache / "tba" / f"virtual-gpu-{key.hexdigest()[:16]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        parts = Path(name) / "lib"
        parts.mkdir()
        build_all(parts)
        try:
            parts.rename(folder)
        except OSError:
            if not folder.exists():  # another process was first
                raise
    return folder


def build_all(out: Path) -> None:
    """Compile every library into the folder `out`."""
    site = site_packages()
    (toolkit,) = (path.parents[1] for path in site.glob("nvidia/cu*/include/cuda.h"))
    core = out / "libvirtual_gpu.so"
    headers = [toolkit, site / "nvidia/nccl", site / "nvidia/cudnn"]
    include = [f"-I{folder}/include" for folder in headers]
    compiler = ["g++", "-O1", "-shared", "-fPIC", "-w"]
    run(
        *compiler, "-std=c++17", "-fvisibility=hidden", *include,
        "-o", core, *(HERE / f"{name}.cpp" for name in SYSTEM), "-ldl", "-lpthread",
        f"-Wl,-soname,{core.name}", "-Wl,-z,defs",
    )  # fmt: skip
    done = {name for name, _, _ in symbols(core)}
    for name in REPLACED:
        (path,) = site.glob(f"nvidia/*/lib/lib{name}.so.*[0-9]")
        found = [s for s in symbols(path) if re.match(r"_*(cu|nv|p?nccl)", s[0]) and s[2] in "TWi"]
        versions = sorted({version for _, version, _ in found if version})
        otherwise = "virtual_gpu_stub_unsupported" if name == "nccl" else "virtual_gpu_stub"
        stub(core, path.name, {symbol for symbol, _, _ in found} - done, versions, otherwise)
    header = (toolkit / "include/cuda.h").read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\(", header))
    names |= set(
        re.findall(r"#\s*define\s+cu\w+\s+(?:__CUDA_API_PT[DS]Z\()?(cu[A-Z]\w+_v\d)\b", header)
    )
    stub(core, "libcuda.so.1", names - done)
    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', (site / "pynvml.py").read_text()))
    torch = site / "torch"
    text = (torch / "lib/libc10_cuda.so").read_bytes().decode("latin-1")
    names |= set(re.findall(r"nvml[A-Z]\w+", text))
    stub(core, "libnvidia-ml.so.1", names - done, otherwise="virtual_gpu_stub_unsupported")
    run(
        *compiler, "-std=c++20", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include",
        *include, HERE / "operators.cpp", "-o", out / "operators.so", f"-L{torch}/lib",
        "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda", f"-L{out}", "-lvirtual_gpu",
        "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip


def run(*words: object) -> str:
    """Run a command; returns its output."""
    command = [str(word) for word in words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def symbols(path: Path) -> list[tuple[str, str, str]]:
    """(name, version or "", type) of each dynamic symbol that a library defines."""
    found = []
    for line in run("nm", "-D", "--defined-only", "--with-symbol-versions", path).splitlines():
        _, kind, name = line.split(maxsplit=2)
        name, _, version = name.partition("@")
        if kind != "A":
            found.append((name, version.lstrip("@"), kind))
    return found


def stub(
    core: Path, soname: str, names: set[str], versions: list[str] | None = None,
    otherwise: str = "virtual_gpu_stub",
) -> None:  # fmt: skip
    """Build a library whose functions jump to those of libvirtual_gpu.so."""
    lines = [".text"]
    for i, name in enumerate(sorted(names)):
        target = target_of(name, otherwise)
        lines += [f".globl {name}", f".type {name},@function", f"{name}:"]
        if target.startswith("virtual_gpu_stub"):  # their second argument: the name
            lines += [f"  leaq .L{i}(%rip), %rsi", ".pushsection .rodata"]
            lines += [f'.L{i}: .asciz "{name}"', ".popsection"]
        lines.append(f"  jmp {target}@PLT")
    lines.append('.section .note.GNU-stack,"",@progbits')
    with tempfile.TemporaryDirectory() as name:
        assembly, script = Path(name) / "stub.s", Path(name) / "stub.map"
        assembly.write_text("\n".join(lines) + "\n")
        words = ["g++", "-shared", "-o", core.parent / soname, assembly, f"-Wl,-soname,{soname}"]
        words += ["-Wl,--no-as-needed", core, "-Wl,-rpath,$ORIGIN"]
        if versions:
            first, *others = versions
            nodes = [f"{first} {{ global: *; }};"] + [f"{other} {{ }};" for other in others]
            script.write_text("\n".join(nodes) + "\n")
            words.append(f"-Wl,--version-script={script}")
        run(*words)


def target_of(name: str, otherwise: str) -> str:
    """The function of libvirtual_gpu.so that takes the place of one that it does not define."""
    base = re.sub(r"_(v\d|ptsz)$", "", name)
    if base in SAME:
        return SAME[base]
    if TEXTS.match(name):
        return "virtual_gpu_text"
    creates = otherwise == "virtual_gpu_stub" and CREATES.match(base)
    return "virtual_gpu_stub_handle" if creates else otherwise


def environment() -> dict[str, str]:
    """The variables under which a new process finds virtual GPUs, beside VIRTUAL_GPUS and others.

    Compiled kernels are kept apart from those for a real GPU.
    """
    folder = build()
    libraries = [folder / "libvirtual_gpu.so", *sorted(folder.glob("lib*.so.*"))]
    python_path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(python_path),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
    }


if __name__ == "__main__":
    if problem := cannot_build():
        sys.exit(f"build.py: {problem}")
    if len(sys.argv) == 1:
        print(build())
    else:
        os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})
