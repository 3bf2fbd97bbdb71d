// The CUDA runtime, libcudart. Kernels do nothing; all else is done at once, in host memory.
#include "core.h"
#include <algorithm>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <time.h>
#include <utility>

using namespace gpu;

static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) {
  if (error) last_error = error;
  return error;
}
#define INIT() do { if (int e = init()) return fail(cudaError_t(e)); } while (0)
#define NOT_CAPTURING() do { \
    if (capturing_thread) { \
      log("%s during stream capture", __func__); \
      return fail(cudaErrorStreamCaptureUnsupported); \
    } \
  } while (0)
static thread_local bool capturing_thread = false;

// ---------------------------------------------------------------- devices

static bool is_device(int d) { return d >= 0 && d < visible_count(); }

EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  *n = visible_count();
  return fail(cudaError_t(init()));
}
EXPORT cudaError_t cudaGetDevice(int* d) {
  INIT();
  *d = current();
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int d) {
  INIT();
  if (!is_device(d)) return fail(cudaErrorInvalidDevice);
  current() = d;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int d) {
  static const std::map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrTotalConstantMemory, 65536},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxPitch, 2147483647},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrClockRate, 1785000},
      {cudaDevAttrTextureAlignment, 512},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrL2CacheSize, 50 << 20},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrAsyncEngineCount, 3},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrComputeCapabilityMajor, MAJOR},
      {cudaDevAttrComputeCapabilityMinor, MINOR},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrManagedMemory, 1},
      {cudaDevAttrConcurrentManagedAccess, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrHostRegisterSupported, 1},
      {102, 1},  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrMemoryPoolsSupported, 1},
      {120, 1},  // CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH
  };
  INIT();
  if (!is_device(d)) return fail(cudaErrorInvalidDevice);
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  if (attribute == cudaDevAttrPciBusId) *value = physical(d) + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  INIT();
  if (!is_device(d)) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", NAME);
  p->uuid.bytes[0] = 0x5a;
  p->uuid.bytes[15] = char(physical(d));
  p->totalGlobalMem = settings().memory;
  std::copy_n(std::initializer_list<int>{1024, 1024, 64}.begin(), 3, p->maxThreadsDim);
  std::copy_n(std::initializer_list<int>{2147483647, 65535, 65535}.begin(), 3, p->maxGridSize);
  auto number = [d](int attribute) {
    int value;
    cudaDeviceGetAttribute(&value, cudaDeviceAttr(attribute), d);
    return value;
  };
  p->sharedMemPerBlock = number(cudaDevAttrMaxSharedMemoryPerBlock);
  p->regsPerBlock = number(cudaDevAttrMaxRegistersPerBlock);
  p->warpSize = number(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = number(cudaDevAttrMaxThreadsPerBlock);
  p->major = MAJOR;
  p->minor = MINOR;
  p->multiProcessorCount = number(cudaDevAttrMultiProcessorCount);
  p->l2CacheSize = number(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = number(cudaDevAttrGlobalMemoryBusWidth);
  p->maxThreadsPerMultiProcessor = number(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->sharedMemPerMultiprocessor = number(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerMultiprocessor = number(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->sharedMemPerBlockOptin = number(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->maxBlocksPerMultiProcessor = number(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->reservedSharedMemPerBlock = number(cudaDevAttrReservedSharedMemoryPerBlock);
  p->pciBusID = number(cudaDevAttrPciBusId);
  p->asyncEngineCount = number(cudaDevAttrAsyncEngineCount);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->streamPrioritiesSupported = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->cooperativeLaunch = p->clusterLaunch = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int d) {
  INIT();
  snprintf(id, n, "0000:%02x:00.0", physical(d) + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int d, int peer) {
  *can = d != peer;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  INIT();
  NOT_CAPTURING();
  wait_device(current());
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1 << 20;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_NUMBER;
  return cudaSuccess;
}

// ---------------------------------------------------------------- errors

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  static const std::map<int, const char*> texts = {
      {cudaSuccess, "no error"},
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorInitializationError, "initialization error"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
  };
  auto found = texts.find(error);
  return found == texts.end() ? "an error of the virtual GPU" : found->second;
}

// ---------------------------------------------------------------- memory

EXPORT cudaError_t cudaMalloc(void** p, size_t n) {
  INIT();
  *p = n ? allocate(n, current(), false) : nullptr;
  return *p || !n ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
  return !p || release(p) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaFree(void* p) {
  INIT();
  if (!p) return cudaSuccess;
  NOT_CAPTURING();
  wait_device(current());  // as the real one does
  return cudaFreeAsync(p, nullptr);
}
EXPORT cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  INIT();
  *p = allocate(n, current(), true);
  return *p ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  INIT();
  add_block(p, {n, current(), true, false});
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** on_device, void* p, unsigned) {
  *on_device = p;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  INIT();
  *free = free_memory(current());
  *total = settings().memory;
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  INIT();
  Block block;
  void* base;
  memset(a, 0, sizeof *a);
  a->hostPointer = const_cast<void*>(p);
  if (!find(p, &block, &base)) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    return cudaSuccess;
  }
  a->type = block.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = block.device;
  a->devicePointer = const_cast<void*>(p);
  if (!block.host) a->hostPointer = nullptr;
  return cudaSuccess;
}

// Work of a stream is done at once, on the host: it first waits for the stream's NCCL operations.
EXPORT void virtual_gpu_wait(void* stream) {
  Stream* s = stream_of(stream);
  if (!s->capturing()) wait(s);
}
EXPORT cudaError_t virtual_gpu_copy(void* to, const void* from, size_t n, cudaStream_t stream) {
  INIT();
  virtual_gpu_wait(stream);
  if (n) memmove(to, from, n);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
  return virtual_gpu_copy(to, from, n, stream);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  NOT_CAPTURING();
  return virtual_gpu_copy(to, from, n, nullptr);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
  return virtual_gpu_copy(to, from, n, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++)
    virtual_gpu_copy((char*)to + i * to_pitch, (char*)from + i * from_pitch, width, stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  INIT();
  virtual_gpu_wait(stream);
  constexpr uintptr_t PAGE = 4096;
  uintptr_t first = (uintptr_t(p) + PAGE - 1) & ~(PAGE - 1);
  uintptr_t last = (uintptr_t(p) + n) & ~(PAGE - 1);
  Block block;
  void* base;
  if (!value && n > (1 << 20) && find(p, &block, &base) && !block.host &&
      !madvise((void*)first, last - first, MADV_DONTNEED)) {  // pages of zeros need no memory
    memset(p, 0, first - uintptr_t(p));
    memset((void*)last, 0, uintptr_t(p) + n - last);
  } else {
    memset(p, value, n);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* p, int value, size_t n) {
  return cudaMemsetAsync(p, value, n, nullptr);
}
EXPORT cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  static std::map<const void*, void*> variables;
  void*& variable = variables[symbol];
  if (!variable) variable = allocate(1 << 16, current(), false);
  *p = variable;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, 8);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  log("memory cannot be shared between processes on a virtual GPU");
  return fail(cudaErrorNotSupported);
}

// ---------------------------------------------------------------- streams, events

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  INIT();
  *s = (cudaStream_t)new_stream(current(), priority);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
  *priority = stream_of(s)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t s, int* d) {
  *d = stream_of(s)->device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) {
  INIT();
  Stream* stream = stream_of(s);
  if (stream->capturing()) return fail(cudaErrorStreamCaptureUnsupported);
  return stream->done >= stream->queued ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  INIT();
  NOT_CAPTURING();
  wait(stream_of(s));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  auto* event = (Event*)e;
  wait(event);  // the stream's next work is done at once, on the host: so the host waits
  if (event->stream && event->stream->capturing()) stream_of(s)->capture = event->stream->capture;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  INIT();
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  auto* event = (Event*)e;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->seconds = now.tv_sec + 1e-9 * now.tv_nsec;
  event->stream = stream_of(s);
  event->target = event->stream->queued;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) {
  return ready((Event*)e) ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  NOT_CAPTURING();
  wait((Event*)e);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::max(0.001, 1000 * (((Event*)end)->seconds - ((Event*)start)->seconds));
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) {
  virtual_gpu_wait(s);
  function(data);
  return cudaSuccess;
}

// ---------------------------------------------------------------- graphs

static std::atomic<uint64_t> next_capture{1};

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  INIT();
  if (uintptr_t(s) <= 2) return fail(cudaErrorStreamCaptureImplicit);
  Stream* stream = stream_of(s);
  if (stream->capturing()) return fail(cudaErrorIllegalState);
  stream->capture = new Capture{next_capture++, true};
  capturing_thread = true;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  Stream* stream = stream_of(s);
  if (!stream->capturing()) return fail(cudaErrorIllegalState);
  stream->capture->active = capturing_thread = false;
  *graph = (cudaGraph_t)stream->capture;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  INIT();
  bool active = stream_of(s)->capturing();
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  Stream* stream = stream_of(s);
  if (id && stream->capture) *id = stream->capture->id;
  if (graph) *graph = stream->capturing() ? (cudaGraph_t)stream->capture : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaStreamIsCapturing(s, status);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
  std::swap(*mode, own);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t graph, unsigned long long) {
  *e = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes, size_t* n) {
  if (nodes && *n) nodes[0] = (cudaGraphNode_t)0x1000;
  *n = 1;  // an empty graph would be reported
  return cudaSuccess;
}

// ---------------------------------------------------------------- kernels

EXPORT cudaError_t cudaLaunchKernel(
    const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  INIT();
  bool blocks = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535;
  bool threads = block.x && block.y && block.z && block.x * block.y * block.z <= 1024;
  if (blocks && threads && shared <= 232448) return cudaSuccess;
  log("kernel launch: grid %u %u %u, block %u %u %u, %zu bytes of shared memory", grid.x, grid.y,
      grid.z, block.x, block.y, block.z, shared);
  return fail(cudaErrorInvalidConfiguration);
}
// A host function stands for its kernel.
EXPORT cudaError_t cudaGetFuncBySymbol(cudaFunction_t* kernel, const void* function) {
  *kernel = (cudaFunction_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 10 * MAJOR + MINOR;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)calloc(1, 64); }

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t n, cudaStream_t stream) {
  configurations.push_back({grid, block, n, stream});
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* n, cudaStream_t* s) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *n = last.shared;
  *s = last.stream;
  return cudaSuccess;
}
