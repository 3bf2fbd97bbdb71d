// The CUDA driver, libcuda, as far as PyTorch, Triton and vLLM use it. More functions are those of
// the runtime under another name: see SAME in build.py.
#include "core.h"
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

using namespace gpu;
#define INIT() do { if (int e = init()) return CUresult(e); } while (0)

EXPORT CUresult cuInit(unsigned) { return CUresult(init()); }
EXPORT CUresult cuDeviceGet(CUdevice* d, int i) {
  INIT();
  if (i < 0 || i >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* text, int n, CUdevice) {
  snprintf(text, n, "%s", NAME);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem(size_t* n, CUdevice) {
  *n = settings().memory;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- contexts: one for each device

static CUcontext context(int d) { return (CUcontext)(0x10000000ull + 4096 * (d + 1)); }
static int device_of(CUcontext c) { return int(((uintptr_t)c - 0x10000000ull) / 4096) - 1; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  INIT();
  *c = context(d);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* c) {
  INIT();
  *c = context(current());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext c) {
  INIT();
  if (c) current() = device_of(c);
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- kernels: they do nothing

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = 232448; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, CUstream, void**, void**) {
  INIT();
  bool blocks = gx && gy && gz && gy <= 65535 && gz <= 65535;
  bool threads = bx && by && bz && bx * by * bz <= 1024;
  if (f && blocks && threads && shared <= 232448) return CUDA_SUCCESS;
  log("kernel launch: grid %u %u %u, block %u %u %u, %u bytes of shared memory", gx, gy, gz, bx, by,
      bz, shared);
  return CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** a, void** more) {
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                        c->blockDimZ, c->sharedMemBytes, c->hStream, a, more);
}

// ---------------------------------------------------------------- memory

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr p) {
  INIT();
  Block block;
  void* base;
  if (!find((void*)p, &block, &base)) return CUDA_ERROR_INVALID_VALUE;
  auto memory = block.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)value = context(block.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)value = memory; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr*)value = p; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = block.device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)value = (CUdeviceptr)base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)value = block.size; break;
    default: *(int*)value = 0;
  }
  return CUDA_SUCCESS;
}

// PyTorch's expandable segments reserve addresses, create memory without any, and map it there.
struct Physical { size_t size; int device, uses; };
struct Mapping { size_t size; CUmemGenericAllocationHandle memory; };
static std::mutex mutex;
static std::map<CUmemGenericAllocationHandle, Physical> memories;
static std::map<CUdeviceptr, Mapping> mappings;

static void release_use(CUmemGenericAllocationHandle handle) {
  Physical& memory = memories[handle];
  if (--memory.uses) return;
  count(-long(memory.size), memory.device);
  memories.erase(handle);
}
EXPORT CUresult cuMemGetAllocationGranularity(
    size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *n = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(
    CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  INIT();
  *p = (CUdeviceptr)reserve(n, current());
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  release((void*)p);
  munmap((void*)p, n);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t n, const CUmemAllocationProp* properties,
    unsigned long long) {
  INIT();
  std::lock_guard<std::mutex> lock(mutex);
  static CUmemGenericAllocationHandle next = 1;
  if (!count(n, properties->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next++;
  memories[*handle] = {n, properties->location.id, 1};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  release_use(handle);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(
    CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  memories[handle].uses++;
  mappings[p] = {n, handle};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  wait_device(current());
  std::lock_guard<std::mutex> lock(mutex);
  auto it = mappings.lower_bound(p);
  while (it != mappings.end() && it->first < p + n) {
    madvise((void*)it->first, it->second.size, MADV_DONTNEED);
    release_use(it->second.memory);
    it = mappings.erase(it);
  }
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- functions by name

EXPORT CUresult cuGetProcAddress(
    const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  *function = nullptr;
  for (const char* suffix : {"_v3", "_v2", ""})
    if (!*function) *function = dlsym(library, (std::string(name) + suffix).c_str());
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
// The runtime's way to them: success with a null pointer if there is no such function.
EXPORT int cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, int* result) {
  bool found = cuGetProcAddress(name, function, 0, 0, nullptr) == CUDA_SUCCESS;
  if (result) *result = found ? 0 : 1;  // cudaDriverEntryPointSymbolNotFound
  return 0;
}
EXPORT int cudaGetDriverEntryPoint(
    const char* name, void** function, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_SUPPORTED;
}
