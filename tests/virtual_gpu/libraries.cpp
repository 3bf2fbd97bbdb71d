// NVML, which sees all GPUs whatever CUDA_VISIBLE_DEVICES says, and what other libraries answer.
#include "core.h"
#include <cudnn_version.h>

using namespace gpu;

typedef void* Device;
static Device handle(unsigned i) { return (Device)(uintptr_t)(0x40000000 + 64 * (i + 1)); }
static int index_of(Device d) { return int(((uintptr_t)d - 0x40000000) / 64) - 1; }

EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned n) {
  snprintf(text, n, "580.95.05");
  return 0;
}
EXPORT int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = settings().gpus;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* d) {
  *d = handle(i);
  return i < unsigned(settings().gpus) ? 0 : 2;  // NVML_ERROR_INVALID_ARGUMENT
}
EXPORT int nvmlDeviceGetUUID(Device d, char* text, unsigned n) {
  snprintf(text, n, "GPU-5a000000-0000-0000-0000-%012x", index_of(d));
  return 0;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, Device* d) {
  for (int i = 0; i < settings().gpus; i++) {
    char own[96];
    nvmlDeviceGetUUID(handle(i), own, sizeof own);
    *d = handle(i);
    if (!strcmp(own, uuid)) return 0;
  }
  return 6;  // NVML_ERROR_NOT_FOUND
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device* d) {  // for an OutOfMemoryError
  const char* bus = strchr(id, ':');
  *d = handle(bus ? strtol(bus + 1, nullptr, 16) - 1 : 0);
  return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(Device, unsigned* n, void*) {  // and here
  *n = 0;
  return 0;
}
EXPORT int nvmlDeviceGetName(Device, char* text, unsigned n) {
  snprintf(text, n, "%s", NAME);
  return 0;
}
EXPORT int nvmlDeviceGetIndex(Device d, unsigned* i) {
  *i = index_of(d);
  return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(Device d, unsigned long long* memory) {  // total, free, used
  memory[0] = settings().memory;
  memory[2] = used_memory(index_of(d));
  memory[1] = memory[0] - memory[2];
  return 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
  *major = MAJOR;
  *minor = MINOR;
  return 0;
}
EXPORT int nvmlDeviceGetP2PStatus(Device, Device, int, int* status) {
  *status = 0;
  return 0;
}

EXPORT int nvmlDeviceGetGpuFabricInfoV(Device, unsigned* info) {  // its size and version are given
  memset(info + 1, 0, (*info & 0xffffff) - sizeof *info);        // no fabric
  return 0;
}

EXPORT int cublasGetProperty(int which, int* value) {  // major, minor, patch
  *value = which == 0 ? 13 : which == 1 ? 1 : 0;
  return 0;
}
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return CUDA_VERSION_NUMBER; }
EXPORT const char* virtual_gpu_text(int) { return "an error of a virtual GPU"; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int requested, char* results, int* n) {
  *n = requested > 0;
  if (*n) memset(results, 0, 64 + 8 + 4 + 4 + 16);  // a cublasLtMatmulHeuristicResult_t: success
  return 0;
}
