// The virtual CUDA runtime: see README.md. Kernels do nothing.
#include "core.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace gpu;
static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t e) { if (e) last_error = e; return e; }
#define INIT() do { if (int e = init()) return fail(cudaError_t(e)); } while (0)
#define NOT_CAPTURING() do { if (capturing_thread) { log("%s during stream capture", __func__); return fail(cudaErrorStreamCaptureUnsupported); } } while (0)
#define EXPORT extern "C" __attribute__((visibility("default")))

// ---------------------------------------------------------------- devices
EXPORT cudaError_t cudaGetDeviceCount(int* n) { *n = 0; int e = init(); *n = visible_count(); return fail(cudaError_t(e)); }
EXPORT cudaError_t cudaGetDevice(int* d) { INIT(); *d = current(); return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int d) {
  INIT();
  if (d < 0 || d >= visible_count()) { log("cudaSetDevice(%d): there are %d", d, visible_count()); return fail(cudaErrorInvalidDevice); }
  current() = d;
  return cudaSuccess;
}
EXPORT cudaError_t cudaInitDevice(int, unsigned, unsigned) { INIT(); return cudaSuccess; }

static int attribute(int a, int device) {
  const Settings& s = settings();
  switch (a) {
    case 1: return 1024;            // max threads per block
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;           // shared memory per block
    case 9: return 65536;           // constant memory
    case 10: return 32;             // warp
    case 11: return 2147483647;     // pitch
    case 12: return 65536;          // registers per block
    case 13: return 1785000;        // kHz
    case 14: return 512;            // texture alignment
    case 15: return 1;
    case 16: return s.major == 9 ? 132 : 108;
    case 17: return 0;              // kernel timeout
    case 18: return 0;              // integrated
    case 19: return 1;              // map host memory
    case 20: return 0;              // compute mode default
    case 31: return 1;              // concurrent kernels
    case 32: return 0;
    case 33: return physical(device) + 1;  // PCI bus
    case 34: return 0;
    case 36: return 2619000;        // memory kHz
    case 37: return 5120;           // bus width
    case 38: return 50 << 20;       // L2
    case 39: return 2048;
    case 40: return 3;              // async engines
    case 41: return 1;              // unified addressing
    case 75: return s.major;
    case 76: return s.minor;
    case 78: return 1;              // stream priorities
    case 79: case 80: return 1;
    case 81: return s.major == 9 ? 233472 : 167936;  // shared memory per SM
    case 82: return 65536;
    case 83: return 1;              // managed memory
    case 89: return 1;
    case 90: return 1;
    case 91: return 1;
    case 95: return 1;              // cooperative launch
    case 97: return s.major == 9 ? 232448 : 166912;  // opt-in shared memory per block
    case 99: return 1;              // host register
    case 102: return 1;             // virtual memory management
    case 106: return 32;            // blocks per SM
    case 111: return 1024;          // reserved shared memory
    case 115: return 1;             // memory pools
    case 120: return s.major >= 9;  // cluster launch
    default: return 0;
  }
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  INIT();
  if (d < 0 || d >= visible_count()) return fail(cudaErrorInvalidDevice);
  *v = attribute(a, d);
  return cudaSuccess;
}
int virtual_gpu_attribute(int a, int d) { return attribute(a, d); }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  INIT();
  if (d < 0 || d >= visible_count()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  const Settings& s = settings();
  snprintf(p->name, sizeof p->name, s.major == 9 ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-80GB");
  p->uuid.bytes[15] = char(physical(d));
  p->uuid.bytes[0] = 0x5a;
  p->totalGlobalMem = s.memory;
  p->sharedMemPerBlock = attribute(8, d);
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = s.major;
  p->minor = s.minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = attribute(16, d);
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = physical(d) + 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = attribute(81, d);
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = attribute(97, d);
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = 1;
  p->clusterLaunch = s.major >= 9;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int d) { INIT(); snprintf(id, n, "0000:%02x:00.0", physical(d) + 1); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* d, const char* id) {
  INIT();
  for (int i = 0; i < visible_count(); i++) { char own[32]; cudaDeviceGetPCIBusId(own, 32, i); if (!strcasecmp(own, id)) { *d = i; return cudaSuccess; } }
  return fail(cudaErrorInvalidDevice);
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { INIT(); if (least) *least = 0; if (greatest) *greatest = -5; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int d, int peer) { INIT(); *can = d != peer; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { INIT(); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSynchronize() { INIT(); NOT_CAPTURING(); wait_device(current()); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceReset() { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1 << 20; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorString(cudaError_t e) {
  switch (int(e)) {
    case 0: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 3: return "initialization error";
    case 100: return "no CUDA-capable device is detected";
    case 101: return "invalid device ordinal";
    case 600: return "device not ready";
    case 900: return "operation not permitted when stream is capturing";
    default: return "an error of the virtual GPU";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t e) {
  switch (int(e)) {
    case 0: return "cudaSuccess";
    case 1: return "cudaErrorInvalidValue";
    case 2: return "cudaErrorMemoryAllocation";
    case 3: return "cudaErrorInitializationError";
    case 100: return "cudaErrorNoDevice";
    case 101: return "cudaErrorInvalidDevice";
    case 600: return "cudaErrorNotReady";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
  }
}

// ---------------------------------------------------------------- memory
EXPORT cudaError_t cudaMalloc(void** p, size_t n) {
  INIT();
  if (!n) { *p = nullptr; return cudaSuccess; }
  *p = allocate(n, current(), false);
  return *p ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { return cudaMalloc(p, n); }
EXPORT cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
EXPORT cudaError_t cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t) { return cudaMalloc(p, n); }
EXPORT cudaError_t cudaFree(void* p) {
  INIT();
  if (!p) return cudaSuccess;
  NOT_CAPTURING();
  wait_device(current());  // as the real one does
  return release(p) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p) ? cudaSuccess : fail(cudaErrorInvalidValue); }
EXPORT cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { INIT(); *p = allocate(n, current(), true); return *p ? cudaSuccess : fail(cudaErrorMemoryAllocation); }
EXPORT cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
EXPORT cudaError_t cudaFreeHost(void* p) { return !p || release(p) ? cudaSuccess : fail(cudaErrorInvalidValue); }
EXPORT cudaError_t cudaHostRegister(void* p, size_t n, unsigned) { INIT(); register_host(p, n); return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void* p) { return release(p) ? cudaSuccess : fail(cudaErrorInvalidValue); }
EXPORT cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return cudaSuccess; }
EXPORT cudaError_t cudaHostGetFlags(unsigned* f, void*) { *f = 0; return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { INIT(); free_and_total(current(), free, total); return cudaSuccess; }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  INIT();
  memset(a, 0, sizeof *a);
  Block b;
  void* base;
  if (!find(p, &b, &base)) { a->type = cudaMemoryTypeUnregistered; a->device = -2; a->hostPointer = const_cast<void*>(p); return cudaSuccess; }
  a->type = b.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b.device;
  a->devicePointer = const_cast<void*>(p);
  a->hostPointer = b.host ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}
// A stream's work runs at once, on the host: so it first waits for the stream's NCCL operations.
EXPORT void virtual_gpu_wait(void* stream) { Stream* s = stream_of(stream); if (!s->capturing) wait(s); }
static cudaError_t copy(void* d, const void* s, size_t n, cudaStream_t stream = 0) { INIT(); virtual_gpu_wait(stream); if (n && d != s) memmove(d, s, n); return cudaSuccess; }
EXPORT cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) { NOT_CAPTURING(); return copy(d, s, n); }
EXPORT cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t t) { return copy(d, s, n, t); }
EXPORT cudaError_t cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) { return copy(d, s, n); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t t) { return copy(d, s, n, t); }
EXPORT cudaError_t cudaMemcpyToSymbol(const void* d, const void* s, size_t n, size_t o, cudaMemcpyKind) { return cudaSuccess; }
EXPORT cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t t) {
  virtual_gpu_wait(t);
  for (size_t i = 0; i < h; i++) memmove((char*)d + i * dp, (const char*)s + i * sp, w);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) { return cudaMemcpy2DAsync(d, dp, s, sp, w, h, k, 0); }
EXPORT cudaError_t cudaMemcpyBatchAsync(void* const* d, const void* const* s, const size_t* sizes, size_t n, cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t) { for (size_t i = 0; i < n; i++) copy(d[i], s[i], sizes[i]); return cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t t) {
  INIT();
  virtual_gpu_wait(t);
  if (!v && n > (1 << 20)) {  // untouched pages stay untouched
    uintptr_t a = (uintptr_t(d) + 4095) & ~uintptr_t(4095), e = (uintptr_t(d) + n) & ~uintptr_t(4095);
    Block b;
    void* base;
    if (find(d, &b, &base) && !b.host && !madvise((void*)a, e - a, MADV_DONTNEED)) {
      memset(d, 0, a - uintptr_t(d));
      memset((void*)e, 0, uintptr_t(d) + n - e);
      return cudaSuccess;
    }
  }
  memset(d, v, n);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* d, int v, size_t n) { return cudaMemsetAsync(d, v, n, 0); }
EXPORT cudaError_t cudaGetSymbolAddress(void** p, const void* s) { static std::map<const void*, void*> m; if (!m[s]) m[s] = allocate(1 << 16, current(), false); *p = m[s]; return cudaSuccess; }
EXPORT cudaError_t cudaGetSymbolSize(size_t* n, const void*) { *n = 4; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)0x1000; return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) { memset(v, 0, 8); return cudaSuccess; }
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) { log("cudaIpcGetMemHandle: not in the virtual GPU"); return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return fail(cudaErrorNotSupported); }

// ---------------------------------------------------------------- streams, events
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) { INIT(); *s = (cudaStream_t)new_stream(current(), priority); return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = stream_of(s)->priority; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* f) { *f = 1; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t s, int* d) { *d = stream_of(s)->device; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) { *id = (unsigned long long)stream_of(s); return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) {
  INIT();
  if (stream_of(s)->capturing) return fail(cudaErrorStreamCaptureUnsupported);
  return ready(stream_of(s)) ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { INIT(); NOT_CAPTURING(); wait(stream_of(s)); return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  // the stream's work runs on the host, at once: so the host waits
  auto* event = (Event*)e;
  wait(event);
  if (event->stream && event->stream->capturing && !stream_of(s)->capturing) {  // the stream joins the capture
    auto* to = stream_of(s);
    to->capturing = true;
    to->capture_id = event->stream->capture_id;
    to->graph = event->stream->graph;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { INIT(); *e = (cudaEvent_t) new Event; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  auto* event = (Event*)e;
  event->stream = stream_of(s);
  event->target = event->stream->queued;
  event->seconds = now();
  event->recorded = true;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) { return ready((Event*)e) ? cudaSuccess : cudaErrorNotReady; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) { NOT_CAPTURING(); wait((Event*)e); return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = std::max(0.001, 1000 * (((Event*)b)->seconds - ((Event*)a)->seconds)); return cudaSuccess; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* data) { f(data); return cudaSuccess; }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) { f(s, cudaSuccess, data); return cudaSuccess; }

// ---------------------------------------------------------------- graphs
struct Graph { uint64_t id; };
static std::atomic<uint64_t> next_capture{1};
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  INIT();
  if (uintptr_t(s) <= 2) return fail(cudaErrorStreamCaptureImplicit);
  auto* stream = stream_of(s);
  if (stream->capturing) return fail(cudaErrorIllegalState);
  stream->capturing = true;
  stream->capture_id = next_capture++;
  stream->graph = new Graph{stream->capture_id};
  captures++;
  capturing_thread = true;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  auto* stream = stream_of(s);
  if (!stream->capturing) return fail(cudaErrorIllegalState);
  stream->capturing = false;
  *g = (cudaGraph_t)stream->graph;
  captures--;
  capturing_thread = false;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) { INIT(); *st = stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  INIT();
  auto* stream = stream_of(s);
  *st = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = stream->capture_id;
  if (g) *g = stream->capturing ? (cudaGraph_t)stream->graph : nullptr;
  if (deps) *deps = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal; std::swap(*m, mode); return cudaSuccess; }
EXPORT cudaError_t cudaGraphCreate(cudaGraph_t* g, unsigned) { *g = (cudaGraph_t) new Graph{0}; return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { *e = (cudaGraphExec_t)g; return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { *e = (cudaGraphExec_t)g; return cudaSuccess; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes, size_t* n) { if (nodes && *n) nodes[0] = (cudaGraphNode_t)0x1000; *n = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGraphNodeGetType(cudaGraphNode_t, cudaGraphNodeType* t) { *t = cudaGraphNodeTypeKernel; return cudaSuccess; }
EXPORT cudaError_t cudaGraphGetEdges(cudaGraph_t, cudaGraphNode_t*, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) { *n = 0; return cudaSuccess; }
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) { *n = 0; return cudaSuccess; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { INIT(); return cudaSuccess; }

// ---------------------------------------------------------------- kernels
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  INIT();
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535) {
    log("kernel launch: grid %u %u %u, block %u %u %u", grid.x, grid.y, grid.z, block.x, block.y, block.z);
    return fail(cudaErrorInvalidConfiguration);
  }
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return cudaLaunchKernel(k, g, b, a, m, s); }
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return cudaLaunchKernel(k, g, b, a, m, s); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return cudaLaunchKernel(k, g, b, a, m, s); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { INIT(); return cudaSuccess; }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
EXPORT cudaError_t cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
EXPORT cudaError_t cudaGetFuncBySymbol(cudaFunction_t* k, const void* f) { *k = (cudaFunction_t)f; return cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 10 * settings().major + settings().minor;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* n, const void*, const cudaLaunchConfig_t*) { *n = 16; return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* n, const void*, int, int) { *n = 49152; return cudaSuccess; }
EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)calloc(1, 64); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Configuration> configurations;
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, cudaStream_t s) { configurations.push_back({g, b, n, s}); return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* n, void* s) {
  Configuration c = configurations.back();
  configurations.pop_back();
  *g = c.grid; *b = c.block; *n = c.shared; *(void**)s = c.stream;
  return cudaSuccess;
}

// ---------------------------------------------------------------- the driver's functions
extern "C" void* virtual_gpu_driver_symbol(const char* name);
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  *f = virtual_gpu_driver_symbol(name);
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long flags, cudaDriverEntryPointQueryResult* r) { return cudaGetDriverEntryPointByVersion(name, f, 13000, flags, r); }
EXPORT cudaError_t cudaGetExportTable(const void** t, const cudaUUID_t*) { *t = nullptr; return cudaErrorNotSupported; }
