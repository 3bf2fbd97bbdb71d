// NVML, and the functions of cuBLAS, cuDNN etc. that must answer something.
#include "core.h"
#include <cudnn_version.h>

using namespace gpu;
#define EXPORT extern "C" __attribute__((visibility("default")))

// ---------------------------------------------------------------- NVML (ignores CUDA_VISIBLE_DEVICES, like the real one)
typedef void* Device;
static Device handle(unsigned i) { return (Device)(uintptr_t)(0x40000000 + 64 * (i + 1)); }
static int index_of(Device d) { return int(((uintptr_t)d - 0x40000000) / 64) - 1; }
struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
static void text(char* s, unsigned n, const char* value) { snprintf(s, n, "%s", value); }
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlInit() { return 0; }
EXPORT int nvmlInitWithFlags(unsigned) { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char* nvmlErrorString(int) { return "an error of the virtual NVML"; }
EXPORT int nvmlSystemGetDriverVersion(char* s, unsigned n) { text(s, n, "580.95.05"); return 0; }
EXPORT int nvmlSystemGetNVMLVersion(char* s, unsigned n) { text(s, n, "13.580.95.05"); return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion(int* v) { *v = 13000; return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* v) { *v = 13000; return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* n) { *n = settings().gpus; return 0; }
EXPORT int nvmlDeviceGetCount(unsigned* n) { *n = settings().gpus; return 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* d) { if (i >= unsigned(settings().gpus)) return 2; *d = handle(i); return 0; }
EXPORT int nvmlDeviceGetHandleByIndex(unsigned i, Device* d) { return nvmlDeviceGetHandleByIndex_v2(i, d); }
static void uuid(char* s, unsigned n, int i) { snprintf(s, n, "GPU-5a000000-0000-0000-0000-%012x", i); }
EXPORT int nvmlDeviceGetHandleByUUID(const char* u, Device* d) { for (int i = 0; i < settings().gpus; i++) { char s[96]; uuid(s, 96, i); if (!strcmp(s, u)) { *d = handle(i); return 0; } } return 6; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* b, Device* d) { for (int i = 0; i < settings().gpus; i++) { char s[32]; snprintf(s, 32, "%02x:00.0", i + 1); if (strcasestr(b, s)) { *d = handle(i); return 0; } } return 6; }
EXPORT int nvmlDeviceGetName(Device, char* s, unsigned n) { text(s, n, settings().major == 9 ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-80GB"); return 0; }
EXPORT int nvmlDeviceGetUUID(Device d, char* s, unsigned n) { uuid(s, n, index_of(d)); return 0; }
EXPORT int nvmlDeviceGetIndex(Device d, unsigned* i) { *i = index_of(d); return 0; }
EXPORT int nvmlDeviceGetMinorNumber(Device d, unsigned* i) { *i = index_of(d); return 0; }
EXPORT int nvmlDeviceGetMemoryInfo(Device d, unsigned long long* m) { size_t u; usage(index_of(d), &u); m[0] = settings().memory; m[2] = u; m[1] = m[0] - u; return 0; }
EXPORT int nvmlDeviceGetMemoryInfo_v2(Device d, unsigned long long* m) { size_t u; usage(index_of(d), &u); m[1] = settings().memory; m[2] = 0; m[4] = u; m[3] = m[1] - u; return 0; }
EXPORT int nvmlDeviceGetCudaComputeCapability(Device, int* a, int* b) { *a = settings().major; *b = settings().minor; return 0; }
EXPORT int nvmlDeviceGetPciInfo_v3(Device d, Pci* p) { memset(p, 0, sizeof *p); p->bus = index_of(d) + 1; snprintf(p->legacy, 16, "0000:%02x:00.0", p->bus); snprintf(p->bus_id, 32, "00000000:%02x:00.0", p->bus); return 0; }
EXPORT int nvmlDeviceGetPciInfo(Device d, Pci* p) { return nvmlDeviceGetPciInfo_v3(d, p); }
EXPORT int nvmlDeviceGetP2PStatus(Device, Device, int, int* s) { *s = 0; return 0; }
EXPORT int nvmlDeviceGetNvLinkState(Device, unsigned, unsigned* s) { *s = 1; return 0; }
EXPORT int nvmlDeviceGetUtilizationRates(Device, unsigned* u) { u[0] = u[1] = 0; return 0; }
EXPORT int nvmlDeviceGetTemperature(Device, int, unsigned* t) { *t = 40; return 0; }
EXPORT int nvmlDeviceGetPowerUsage(Device, unsigned* p) { *p = 100000; return 0; }
EXPORT int nvmlDeviceGetPersistenceMode(Device, unsigned* m) { *m = 1; return 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device, unsigned* n, void*) { *n = 0; return 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(Device, unsigned* n, void*) { *n = 0; return 0; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(Device, unsigned, int* t) { *t = 255; return 0; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, unsigned, Pci* p) { memset(p, 0, sizeof *p); return 3; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(Device, void*) { return 3; }
EXPORT int nvmlDeviceGetMaxPcieLinkWidth(Device, unsigned* n) { *n = 16; return 0; }
EXPORT int virtual_gpu_unsupported(void*, const char* name) { if (settings().trace) log("stub %s", name); return 3; }

// ---------------------------------------------------------------- cuBLAS, cuDNN, cuFFT, cuSPARSE
EXPORT int cublasGetVersion_v2(void*, int* v) { *v = 130100; return 0; }
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }
EXPORT int cublasGetProperty(int t, int* v) { *v = t == 0 ? 13 : t == 1 ? 1 : 0; return 0; }
EXPORT const char* cublasGetStatusString(int) { return "virtual"; }
EXPORT const char* cublasGetStatusName(int) { return "virtual"; }
EXPORT const char* cublasLtGetStatusString(int) { return "virtual"; }
EXPORT const char* cublasLtGetStatusName(int) { return "virtual"; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int requested, char* results, int* n) {
  *n = requested > 0;
  if (*n) memset(results, 0, 64 + 8 + 4 + 4 + 16);  // cublasLtMatmulHeuristicResult_t
  return 0;
}
EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
EXPORT const char* cudnnGetErrorString(int) { return "virtual"; }
EXPORT int cusparseGetVersion(void*, int* v) { *v = 12600; return 0; }
EXPORT const char* cusparseGetErrorString(int) { return "virtual"; }
EXPORT const char* cusparseGetErrorName(int) { return "virtual"; }
EXPORT int cusparseLtGetVersion(void*, int* v) { *v = 800; return 0; }
EXPORT const char* cusparseLtGetErrorString(int) { return "virtual"; }
EXPORT const char* cusparseLtGetErrorName(int) { return "virtual"; }
EXPORT int cufftGetVersion(int* v) { *v = 12000; return 0; }
EXPORT int curandGetVersion(int* v) { *v = 10400; return 0; }
EXPORT const char* cusolverGetErrorString(int) { return "virtual"; }
EXPORT const char* cufileop_status_error(int) { return "virtual"; }
