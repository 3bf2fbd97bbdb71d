// The virtual driver, libcuda.so.1: what PyTorch, Triton and vLLM call. Kernels do nothing.
#include "core.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

using namespace gpu;
#define EXPORT extern "C" __attribute__((visibility("default")))
#define INIT() do { if (int e = init()) return CUresult(e); } while (0)
int virtual_gpu_attribute(int a, int d);

EXPORT CUresult cuInit(unsigned) { int e = init(); return CUresult(e); }
EXPORT CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* n) { INIT(); *n = visible_count(); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* d, int i) { INIT(); if (i < 0 || i >= visible_count()) return CUDA_ERROR_INVALID_DEVICE; *d = i; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char* s, int n, CUdevice d) { cudaDeviceProp p; cudaGetDeviceProperties(&p, d); snprintf(s, n, "%s", p.name); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) { INIT(); *v = virtual_gpu_attribute(a, d); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceTotalMem(size_t* n, CUdevice) { *n = settings().memory; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetUuid(CUuuid* u, CUdevice d) { cudaDeviceProp p; cudaGetDeviceProperties(&p, d); memcpy(u, &p.uuid, 16); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetPCIBusId(char* s, int n, CUdevice d) { return CUresult(cudaDeviceGetPCIBusId(s, n, d)); }
EXPORT CUresult cuDeviceCanAccessPeer(int* c, CUdevice a, CUdevice b) { *c = a != b; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* p, CUdevice) { *p = (CUmemoryPool)0x1000; return CUDA_SUCCESS; }

static CUcontext context(int d) { return (CUcontext)(0x10000000ull + 4096 * (d + 1)); }
static int device_of(CUcontext c) { return c ? int(((uintptr_t)c - 0x10000000ull) / 4096) - 1 : 0; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { INIT(); *c = context(d); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* active) { if (f) *f = 0; *active = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxCreate(CUcontext* c, CUctxCreateParams*, unsigned, CUdevice d) { INIT(); *c = context(d); current() = d; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* c) { INIT(); *c = context(current()); return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { INIT(); if (c) current() = device_of(c); return CUDA_SUCCESS; }
static thread_local std::vector<int> pushed;
EXPORT CUresult cuCtxPushCurrent(CUcontext c) { INIT(); pushed.push_back(current()); current() = device_of(c); return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext* c) { if (c) *c = context(current()); if (!pushed.empty()) { current() = pushed.back(); pushed.pop_back(); } return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* d) { INIT(); *d = current(); return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize() { return CUresult(cudaDeviceSynchronize()); }
EXPORT CUresult cuCtxGetApiVersion(CUcontext, unsigned* v) { *v = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* n, CUlimit) { *n = 1 << 20; return CUDA_SUCCESS; }

EXPORT CUresult cuGetErrorString(CUresult e, const char** s) { *s = cudaGetErrorString(cudaError_t(e)); return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorName(CUresult e, const char** s) { *s = cudaGetErrorName(cudaError_t(e)); return CUDA_SUCCESS; }

// modules and kernels
static CUmodule any_module(const char*) { static std::atomic<uintptr_t> next{0x20000000}; return (CUmodule)(next += 64); }
EXPORT CUresult cuModuleLoad(CUmodule* m, const char*) { INIT(); *m = any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule* m, const void*) { INIT(); *m = any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) { INIT(); *m = any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) { *f = (CUfunction)any_module(name); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunctionCount(unsigned* n, CUmodule) { *n = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetGlobal(CUdeviceptr* p, size_t* n, CUmodule, const char*) { if (p) *p = (CUdeviceptr)allocate(4096, current(), false); if (n) *n = 4096; return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryLoadData(CUlibrary* l, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *l = (CUlibrary)any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryLoadFromFile(CUlibrary* l, const char*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *l = (CUlibrary)any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryGetKernel(CUkernel* k, CUlibrary, const char* name) { *k = (CUkernel)any_module(name); return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryGetModule(CUmodule* m, CUlibrary) { *m = any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryGetKernelCount(unsigned* n, CUlibrary) { *n = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryEnumerateKernels(CUkernel* k, unsigned n, CUlibrary) { for (unsigned i = 0; i < n; i++) k[i] = (CUkernel)any_module(""); return CUDA_SUCCESS; }
EXPORT CUresult cuKernelGetFunction(CUfunction* f, CUkernel k) { *f = (CUfunction)k; return CUDA_SUCCESS; }
static int function_attribute(int a) { return a == 0 ? 1024 : a == 4 ? 32 : a == 8 ? 232448 : 0; }
EXPORT CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) { *v = function_attribute(a); return CUDA_SUCCESS; }
EXPORT CUresult cuKernelGetAttribute(int* v, CUfunction_attribute a, CUkernel, CUdevice) { *v = function_attribute(a); return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream, void**, void**) {
  INIT();
  if (!f) return CUDA_ERROR_INVALID_HANDLE;
  bool bad = !gx || !gy || !gz || !bx || bx * by * bz > 1024 || gy > 65535 || gz > 65535 || shared > 232448;
  if (bad) log("cuLaunchKernel: grid %u %u %u, block %u %u %u, shared %u", gx, gy, gz, bx, by, bz, shared);
  return bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** a, void** x) { return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream, a, x); }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, CUfunction, int, size_t, unsigned) { *n = 2; return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { return CUDA_SUCCESS; }

// memory
EXPORT CUresult cuMemGetInfo(size_t* f, size_t* t) { return CUresult(cudaMemGetInfo(f, t)); }
EXPORT CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { return CUresult(cudaMalloc((void**)p, n)); }
EXPORT CUresult cuMemAllocAsync(CUdeviceptr* p, size_t n, CUstream) { return CUresult(cudaMalloc((void**)p, n)); }
EXPORT CUresult cuMemFree(CUdeviceptr p) { return CUresult(cudaFree((void*)p)); }
EXPORT CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) { return CUresult(cudaFreeAsync((void*)p, 0)); }
EXPORT CUresult cuMemAllocHost(void** p, size_t n) { return CUresult(cudaHostAlloc(p, n, 0)); }
EXPORT CUresult cuMemHostAlloc(void** p, size_t n, unsigned) { return CUresult(cudaHostAlloc(p, n, 0)); }
EXPORT CUresult cuMemFreeHost(void* p) { return CUresult(cudaFreeHost(p)); }
EXPORT CUresult cuMemcpy(CUdeviceptr d, CUdeviceptr s, size_t n) { return CUresult(cudaMemcpy((void*)d, (void*)s, n, cudaMemcpyDefault)); }
EXPORT CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpy(d, s, n); }
EXPORT CUresult cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) { return cuMemcpy(d, (CUdeviceptr)s, n); }
EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr d, const void* s, size_t n, CUstream) { return cuMemcpy(d, (CUdeviceptr)s, n); }
EXPORT CUresult cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { return cuMemcpy((CUdeviceptr)d, s, n); }
EXPORT CUresult cuMemcpyDtoHAsync(void* d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpy((CUdeviceptr)d, s, n); }
EXPORT CUresult cuMemcpyDtoD(CUdeviceptr d, CUdeviceptr s, size_t n) { return cuMemcpy(d, s, n); }
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpy(d, s, n); }
EXPORT CUresult cuMemsetD8(CUdeviceptr d, unsigned char v, size_t n) { return CUresult(cudaMemset((void*)d, v, n)); }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream) { return CUresult(cudaMemset((void*)d, v, n)); }
EXPORT CUresult cuMemsetD32(CUdeviceptr d, unsigned v, size_t n) { for (size_t i = 0; i < n; i++) ((unsigned*)d)[i] = v; return CUDA_SUCCESS; }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr d, unsigned v, size_t n, CUstream) { return cuMemsetD32(d, v, n); }
EXPORT CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  INIT();
  Block b;
  void* base;
  if (!find((void*)p, &b, &base)) return CUDA_ERROR_INVALID_VALUE;
  switch (int(a)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)v = context(b.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)v = b.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr*)v = p; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned*)v = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)v = b.device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)v = (CUdeviceptr)base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)v = b.size; break;
    default: *(int*)v = 0;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* a, void** v, CUdeviceptr p) { for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(v[i], a[i], p); return CUDA_SUCCESS; }
EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* n, CUdeviceptr p) { Block b; void* q; if (!find((void*)p, &b, &q)) return CUDA_ERROR_NOT_FOUND; if (base) *base = (CUdeviceptr)q; if (n) *n = b.size; return CUDA_SUCCESS; }
EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* d, void* h, unsigned) { *d = (CUdeviceptr)h; return CUDA_SUCCESS; }
EXPORT CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *n = 2 << 20; return CUDA_SUCCESS; }
struct Physical { size_t size; int device, uses; };  // memory without addresses
static std::mutex physical_mutex;
static std::map<uint64_t, Physical>& physicals() { static auto* m = new std::map<uint64_t, Physical>; return *m; }
static std::map<CUdeviceptr, std::pair<size_t, uint64_t>>& maps() { static auto* m = new std::map<CUdeviceptr, std::pair<size_t, uint64_t>>; return *m; }
static void unuse(uint64_t h) { auto& p = physicals()[h]; if (!--p.uses) { count(-long(p.size), p.device); physicals().erase(h); } }
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) { INIT(); *p = (CUdeviceptr)reserve(n, current()); return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY; }
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { release((void*)p); munmap((void*)p, n); return CUDA_SUCCESS; }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* prop, unsigned long long) {
  INIT();
  static uint64_t next = 1;
  if (!count(n, prop->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> lock(physical_mutex);
  *h = next++;
  physicals()[*h] = {n, prop->location.id, 1};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle h) { std::lock_guard<std::mutex> lock(physical_mutex); unuse(h); return CUDA_SUCCESS; }
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle h, unsigned long long) {
  std::lock_guard<std::mutex> lock(physical_mutex);
  physicals()[h].uses++;
  maps()[p] = {n, h};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  cudaDeviceSynchronize();
  std::lock_guard<std::mutex> lock(physical_mutex);
  for (auto it = maps().lower_bound(p); it != maps().end() && it->first < p + n; it = maps().erase(it)) {
    madvise((void*)it->first, it->second.first, MADV_DONTNEED);
    unuse(it->second.second);
  }
  return CUDA_SUCCESS;
}

// streams, events
EXPORT CUresult cuStreamCreate(CUstream* s, unsigned) { return CUresult(cudaStreamCreate(s)); }
EXPORT CUresult cuStreamCreateWithPriority(CUstream* s, unsigned f, int p) { return CUresult(cudaStreamCreateWithPriority(s, f, p)); }
EXPORT CUresult cuStreamSynchronize(CUstream s) { return CUresult(cudaStreamSynchronize(s)); }
EXPORT CUresult cuStreamQuery(CUstream s) { return CUresult(cudaStreamQuery(s)); }
EXPORT CUresult cuStreamGetCtx(CUstream s, CUcontext* c) { *c = context(stream_of(s)->device); return CUDA_SUCCESS; }
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* st) { return CUresult(cudaStreamIsCapturing(s, (cudaStreamCaptureStatus*)st)); }
EXPORT CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned f) { return CUresult(cudaStreamWaitEvent(s, e, f)); }
EXPORT CUresult cuEventCreate(CUevent* e, unsigned f) { return CUresult(cudaEventCreateWithFlags(e, f)); }
EXPORT CUresult cuEventRecord(CUevent e, CUstream s) { return CUresult(cudaEventRecord(e, s)); }
EXPORT CUresult cuEventQuery(CUevent e) { return CUresult(cudaEventQuery(e)); }
EXPORT CUresult cuEventSynchronize(CUevent e) { return CUresult(cudaEventSynchronize(e)); }
EXPORT CUresult cuEventElapsedTime(float* ms, CUevent a, CUevent b) { return CUresult(cudaEventElapsedTime(ms, a, b)); }
EXPORT CUresult cuGetExportTable(const void** t, const CUuuid*) { *t = nullptr; return CUDA_ERROR_NOT_SUPPORTED; }

// functions by name
extern "C" void* virtual_gpu_driver_symbol(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  std::string base(name);
  for (const char* suffix : {"_v3", "_v2", ""})
    if (void* f = dlsym(library, (base + suffix).c_str())) return f;
  if (settings().trace) log("no driver function %s", name);
  return nullptr;
}
EXPORT CUresult cuGetProcAddress(const char* name, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* r) {
  *f = virtual_gpu_driver_symbol(name);
  if (r) *r = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
