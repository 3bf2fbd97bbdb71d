// A virtual NCCL that moves data between processes through a file in /dev/shm. Operations are
// asynchronous: a thread of the communicator executes them, and streams and events wait for it. As
// with the real one, a peer that ended leaves the others waiting until their abort
// (VIRTUAL_GPU_NCCL_DEAD=error: they also get an asynchronous error).
#include "core.h"
#include <nccl.h>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

using namespace gpu;
#define EXPORT extern "C" __attribute__((visibility("default")))
constexpr size_t CHUNK = 1 << 20;
constexpr int MAX_RANKS = 64;

struct Shared {
  std::atomic<int> joined;
  std::atomic<int> arrived;
  std::atomic<unsigned> generation;
  std::atomic<int> pids[MAX_RANKS];
};

struct Aborted {};

// The file VIRTUAL_GPU_STALL, with e.g. "op 2" or "init 2", holds rank 2 in its operations, or before it
// joins a group, while it exists.
static bool stalled(const char* where, int rank) {
  static const char* path = getenv("VIRTUAL_GPU_STALL");
  char text[32] = "";
  int f = path ? open(path, O_RDONLY) : -1;
  if (f < 0) return false;
  (void)!read(f, text, sizeof text - 1);
  close(f);
  char own[32];
  snprintf(own, sizeof own, "%s %d", where, rank);
  text[strcspn(text, "\n")] = 0;
  return !strcmp(text, own);
}

struct ncclComm {
  int rank, size, device;
  Shared* shared;
  char* slots;
  std::string path;
  std::atomic<bool> aborted{false}, ended{false};
  std::atomic<int> error{ncclSuccess};
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Stream*, std::function<void()>>> work;
  std::thread thread;

  char* slot(int r) { return slots + r * CHUNK; }
  bool lost() {
    for (int r = 0; r < size; r++) {
      int pid = shared->pids[r];
      if (pid && kill(pid, 0) && errno == ESRCH) return true;
    }
    return false;
  }
  void pause(int& turns) {
    if (aborted) throw Aborted();
    if (++turns > 100) usleep(turns > 2000 ? 2000 : 50);
    if (turns % 200 == 199 && settings().nccl_error && lost()) error = ncclRemoteError;
  }
  void barrier() {
    unsigned g = shared->generation;
    if (++shared->arrived == size) {
      shared->arrived = 0;
      shared->generation++;
      return;
    }
    for (int turns = 0; shared->generation == g;) pause(turns);
  }
  void run() {
    while (true) {
      std::pair<Stream*, std::function<void()>> item;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return ended || !work.empty(); });
        if (work.empty()) return;
        item = work.front();
        work.pop_front();
      }
      try {
        for (int turns = 101; stalled("op", rank);) pause(turns);
        if (!aborted) item.second();
      } catch (Aborted&) {
      }
      item.first->done++;
    }
  }
  void enqueue(void* stream, std::function<void()> f) {
    Stream* s = stream_of(stream);
    s->queued++;
    if (s->capturing) { s->done++; return; }
    std::lock_guard<std::mutex> lock(mutex);
    work.emplace_back(s, f);
    changed.notify_all();
  }
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      changed.notify_all();
    }
    if (thread.joinable()) thread.join();
  }
};

static size_t size_of(ncclDataType_t t) {
  switch (int(t)) {
    case ncclInt8: case ncclUint8: case 10: case 11: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}
static float from_half(uint16_t h) { _Float16 f; memcpy(&f, &h, 2); return float(f); }
static uint16_t to_half(float x) { _Float16 f = _Float16(x); uint16_t h; memcpy(&h, &f, 2); return h; }
static float from_brain(uint16_t h) { uint32_t u = uint32_t(h) << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to_brain(float f) { uint32_t u; memcpy(&u, &f, 4); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }

template <class T, class Get, class Put>
static void reduce(char* out, ncclComm* c, size_t bytes, size_t offset, int op, Get get, Put put) {
  for (size_t i = 0; i < bytes / sizeof(T); i++) {
    auto at = [&](int r) { return get(reinterpret_cast<T*>(c->slot(r) + offset)[i]); };
    auto v = at(0);
    for (int r = 1; r < c->size; r++) {
      auto w = at(r);
      v = op == ncclProd ? v * w : op == ncclMax ? std::max(v, w) : op == ncclMin ? std::min(v, w) : v + w;
    }
    if (op == ncclAvg) v = v / c->size;
    reinterpret_cast<T*>(out)[i] = put(v);
  }
}
static void reduce_all(char* out, ncclComm* c, size_t bytes, size_t offset, int type, int op) {
  auto same = [](auto x) { return x; };
  switch (type) {
    case ncclInt8: reduce<int8_t>(out, c, bytes, offset, op, same, same); break;
    case ncclUint8: reduce<uint8_t>(out, c, bytes, offset, op, same, same); break;
    case ncclInt32: reduce<int32_t>(out, c, bytes, offset, op, same, same); break;
    case ncclUint32: reduce<uint32_t>(out, c, bytes, offset, op, same, same); break;
    case ncclInt64: reduce<int64_t>(out, c, bytes, offset, op, same, same); break;
    case ncclUint64: reduce<uint64_t>(out, c, bytes, offset, op, same, same); break;
    case ncclFloat32: reduce<float>(out, c, bytes, offset, op, same, same); break;
    case ncclFloat64: reduce<double>(out, c, bytes, offset, op, same, same); break;
    case ncclFloat16: reduce<uint16_t>(out, c, bytes, offset, op, [](uint16_t h) { return from_half(h); }, [](float f) { return to_half(f); }); break;
    case ncclBfloat16: reduce<uint16_t>(out, c, bytes, offset, op, [](uint16_t h) { return from_brain(h); }, [](float f) { return to_brain(f); }); break;
  }
}

static std::string path_of(const ncclUniqueId& id) {
  std::string s = "/dev/shm/virtual_gpu-" + settings().id + "-nccl-";
  for (int i = 0; i < 16; i++) { char b[3]; snprintf(b, 3, "%02x", (unsigned char)id.internal[i]); s += b; }
  return s;
}

EXPORT ncclResult_t ncclGetVersion(int* v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  int f = open("/dev/urandom", O_RDONLY);
  (void)!read(f, id->internal, 16);
  close(f);
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t r) { return r == ncclSuccess ? "no error" : r == ncclRemoteError ? "remote process exited or there was a network error" : "virtual GPU error"; }
EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }

static ncclResult_t join(ncclComm_t* out, int size, const std::string& path, int rank) {
  if (int e = init()) { log("ncclCommInitRank: CUDA error %d", e); return ncclUnhandledCudaError; }
  size_t bytes = 4096 + CHUNK * size;
  int f = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (f < 0 || ftruncate(f, bytes)) return ncclSystemError;
  char* p = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
  close(f);
  auto* c = new ncclComm;
  c->rank = rank;
  c->size = size;
  c->device = current();
  c->path = path;
  c->shared = (Shared*)p;
  c->slots = p + 4096;
  while (stalled("init", rank)) usleep(1000);
  c->shared->pids[rank] = getpid();
  c->shared->joined++;
  if (settings().trace) log("NCCL rank %d of %d on GPU %d waits for the others", rank, size, physical(c->device));
  for (int turns = 0; c->shared->joined < size;) {  // like the real one, it waits forever
    usleep(200);
    if (++turns % 200 == 0 && settings().nccl_error && c->lost()) { log("NCCL: a peer ended"); return ncclRemoteError; }
  }
  if (rank == 0) unlink(path.c_str());
  if (settings().trace) log("NCCL rank %d of %d has joined", rank, size);
  c->thread = std::thread([c] { current() = c->device; c->run(); });
  *out = c;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) { return join(c, n, path_of(id), rank); }
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t*) { return join(c, n, path_of(id), rank); }
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* id, ncclConfig_t*) { return join(c, n, path_of(id[0]), rank); }
EXPORT ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { log("ncclCommSplit: not in the virtual GPU"); return ncclInvalidUsage; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t c) { c->end(); return ncclSuccess; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (settings().trace) log("ncclCommAbort of rank %d of %d", c->rank, c->size);
  c->aborted = true;
  c->end();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) { *e = ncclResult_t(int(c->error)); return ncclSuccess; }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t c, int* n) { *n = c->size; return ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) { *r = c->rank; return ncclSuccess; }
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* d) { *d = c->device; return ncclSuccess; }
EXPORT ncclResult_t ncclGroupStart() { return ncclSuccess; }
EXPORT ncclResult_t ncclGroupEnd() { return ncclSuccess; }
EXPORT ncclResult_t ncclMemAlloc(void** p, size_t n) { *p = allocate(n, current(), false); return *p ? ncclSuccess : ncclSystemError; }
EXPORT ncclResult_t ncclMemFree(void* p) { release(p); return ncclSuccess; }

// Checks that a buffer is memory of the communicator's device.
static ncclResult_t check(ncclComm_t c, const void* p, size_t n, const char* name) {
  if (!n) return ncclSuccess;
  Block b;
  void* base;
  if (find(p, &b, &base) && !b.host && b.device == c->device && (const char*)p + n <= (char*)base + b.size) return ncclSuccess;
  log("%s: buffer %p is not memory of GPU %d", name, p, c->device);
  return ncclInvalidArgument;
}
#define CHECK(p, n) do { if (check(c, p, n, __func__)) return ncclInvalidArgument; } while (0)

EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  size_t n = count * size_of(t);
  if (c->rank == root) CHECK(in, n);
  CHECK(out, n);
  c->enqueue(s, [=] {
    for (size_t i = 0; i < n; i += CHUNK) {
      size_t m = std::min(CHUNK, n - i);
      if (c->rank == root) memcpy(c->slot(root), (char*)in + i, m);
      c->barrier();
      if (c->rank != root || in != out) memcpy((char*)out + i, c->slot(root), m);
      c->barrier();
    }
  });
  return ncclSuccess;
}
EXPORT ncclResult_t ncclBcast(void* p, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) { return ncclBroadcast(p, p, n, t, root, c, s); }
EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  size_t n = count * size_of(t);
  CHECK(in, n);
  CHECK(out, n);
  c->enqueue(s, [=] {
    for (size_t i = 0; i < n; i += CHUNK) {
      size_t m = std::min(CHUNK, n - i);
      memcpy(c->slot(c->rank), (char*)in + i, m);
      c->barrier();
      reduce_all((char*)out + i, c, m, 0, t, op);
      c->barrier();
    }
  });
  return ncclSuccess;
}
EXPORT ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
  size_t n = count * size_of(t);
  CHECK(in, n);
  c->enqueue(s, [=] {
    for (size_t i = 0; i < n; i += CHUNK) {
      size_t m = std::min(CHUNK, n - i);
      memcpy(c->slot(c->rank), (char*)in + i, m);
      c->barrier();
      if (c->rank == root) reduce_all((char*)out + i, c, m, 0, t, op);
      c->barrier();
    }
  });
  return ncclSuccess;
}
EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  size_t n = count * size_of(t);
  CHECK(in, n);
  CHECK(out, n * c->size);
  c->enqueue(s, [=] {
    for (size_t i = 0; i < n; i += CHUNK) {
      size_t m = std::min(CHUNK, n - i);
      memcpy(c->slot(c->rank), (char*)in + i, m);
      c->barrier();
      for (int r = 0; r < c->size; r++) memcpy((char*)out + r * n + i, c->slot(r), m);
      c->barrier();
    }
  });
  return ncclSuccess;
}
EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  size_t n = count * size_of(t);
  CHECK(in, n * c->size);
  CHECK(out, n);
  c->enqueue(s, [=] {
    for (int r = 0; r < c->size; r++)
      for (size_t i = 0; i < n; i += CHUNK) {
        size_t m = std::min(CHUNK, n - i);
        memcpy(c->slot(c->rank), (char*)in + r * n + i, m);
        c->barrier();
        if (c->rank == r) reduce_all((char*)out + i, c, m, 0, t, op);
        c->barrier();
      }
  });
  return ncclSuccess;
}
EXPORT ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { log("ncclSend: not in the virtual GPU"); return ncclInvalidUsage; }
EXPORT ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { log("ncclRecv: not in the virtual GPU"); return ncclInvalidUsage; }
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) { log("ncclRedOpCreatePreMulSum: not in the virtual GPU"); return ncclInvalidUsage; }
