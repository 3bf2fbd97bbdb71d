// NCCL: data moves between processes through a file in /dev/shm. Operations are asynchronous: a
// thread of the communicator executes them, and streams and events wait for it. A member that ends
// leaves the others waiting until they abort.
#include "core.h"
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <nccl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

using namespace gpu;
constexpr size_t CHUNK = 1 << 20;  // bytes of each rank in the file

struct Shared {
  std::atomic<int> joined, arrived;
  std::atomic<unsigned> generation;
};

struct Aborted {};

// Whether the file VIRTUAL_GPU_STALL says that this rank is to hang here.
static bool stalled(const char* where, int rank) {
  static const char* path = getenv("VIRTUAL_GPU_STALL");
  FILE* file = path ? fopen(path, "r") : nullptr;
  if (!file) return false;
  char word[16] = "";
  int number = -1;
  (void)!fscanf(file, "%15s %d", word, &number);
  fclose(file);
  return !strcmp(word, where) && number == rank;
}

struct ncclComm {
  int rank, size, device;
  Shared* shared;
  char* chunks;
  std::atomic<bool> aborted{false};
  bool ended = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Stream*, std::function<void()>>> work;
  std::thread thread;

  char* chunk(int r) { return chunks + r * CHUNK; }
  void pause(int& turns) {
    if (aborted) throw Aborted();
    if (++turns > 100) usleep(turns > 2000 ? 2000 : 50);
  }
  void barrier() {
    unsigned generation = shared->generation;
    if (++shared->arrived == size) {
      shared->arrived = 0;
      shared->generation++;
      return;
    }
    for (int turns = 0; shared->generation == generation;) pause(turns);
  }
  // n bytes, a part at a time: every rank puts its own into its chunk, then takes from all chunks.
  template <class Put, class Take>
  void exchange(size_t n, Put put, Take take) {
    for (size_t i = 0; i < n; i += CHUNK) {
      size_t part = std::min(CHUNK, n - i);
      put(i, part);
      barrier();
      take(i, part);
      barrier();
    }
  }
  void run() {
    current() = device;
    while (true) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return ended || !work.empty(); });
      if (work.empty()) return;
      auto [stream, operation] = work.front();
      work.pop_front();
      lock.unlock();
      try {
        for (int turns = 101; stalled("op", rank);) pause(turns);
        if (!aborted) operation();
      } catch (Aborted&) {
      }
      stream->done++;
    }
  }
  ncclResult_t enqueue(void* handle, std::function<void()> operation) {
    Stream* stream = stream_of(handle);
    if (stream->capturing()) return ncclSuccess;
    stream->queued++;
    std::lock_guard<std::mutex> lock(mutex);
    work.emplace_back(stream, operation);
    changed.notify_all();
    return ncclSuccess;
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

// ---------------------------------------------------------------- groups

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  int file = open("/dev/urandom", O_RDONLY);
  (void)!read(file, id->internal, 16);
  close(file);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  if (init()) return ncclUnhandledCudaError;
  std::string path = "/dev/shm/virtual_gpu-" + settings().id + "-nccl-";
  for (int i = 0; i < 16; i++) path += "0123456789abcdef"[id.internal[i] & 15];
  size_t bytes = 4096 + CHUNK * size;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  char* p = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto* c = new ncclComm{rank, size, current(), (Shared*)p, p + 4096};
  while (stalled("init", rank)) usleep(1000);
  c->shared->joined++;
  if (settings().logs)
    log("NCCL rank %d of %d on GPU %d waits for the others", rank, size, physical(c->device));
  while (c->shared->joined < size) usleep(200);  // like the real one, it waits forever
  if (rank == 0) unlink(path.c_str());
  if (settings().logs) log("NCCL rank %d of %d has joined", rank, size);
  c->thread = std::thread([c] { c->run(); });
  *comm = c;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int, ncclUniqueId* id, ncclConfig_t*) {
  return ncclCommInitRank(comm, size, *id, rank);
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t c) {
  c->end();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (settings().logs) log("ncclCommAbort of rank %d of %d", c->rank, c->size);
  c->aborted = true;
  return ncclCommDestroy(c);
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->size;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
  *rank = c->rank;
  return ncclSuccess;
}

// ---------------------------------------------------------------- collectives

struct BFloat16 {
  uint16_t bits;
  BFloat16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};

template <class T>
static void reduce(ncclComm* c, char* out, size_t n, int op) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
  for (size_t i = 0; i < n / sizeof(T); i++) {
    auto at = [&](int r) { return Wide(reinterpret_cast<T*>(c->chunk(r))[i]); };
    Wide value = at(0);
    for (int r = 1; r < c->size; r++) {
      if (op == ncclSum || op == ncclAvg) value += at(r);
      if (op == ncclProd) value *= at(r);
      if (op == ncclMax) value = std::max(value, at(r));
      if (op == ncclMin) value = std::min(value, at(r));
    }
    if (op == ncclAvg) value /= c->size;
    reinterpret_cast<T*>(out)[i] = T(value);
  }
}
static void reduce(ncclComm* c, char* out, size_t n, ncclDataType_t type, int op) {
  switch (type) {
    case ncclInt8: return reduce<int8_t>(c, out, n, op);
    case ncclUint8: return reduce<uint8_t>(c, out, n, op);
    case ncclInt32: return reduce<int32_t>(c, out, n, op);
    case ncclInt64: return reduce<int64_t>(c, out, n, op);
    case ncclFloat16: return reduce<_Float16>(c, out, n, op);
    case ncclBfloat16: return reduce<BFloat16>(c, out, n, op);
    case ncclFloat32: return reduce<float>(c, out, n, op);
    case ncclFloat64: return reduce<double>(c, out, n, op);
    default: log("NCCL reduces no data of type %d on a virtual GPU", type); abort();
  }
}
static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

// A buffer has to be memory of the communicator's device.
static bool on_device(ncclComm_t c, const void* p, size_t n) {
  Block block;
  void* base;
  bool found = find(p, &block, &base) && !block.host && block.device == c->device;
  if (!n || (found && (char*)p + n <= (char*)base + block.size)) return true;
  log("NCCL: buffer %p is not memory of GPU %d", p, c->device);
  return false;
}
#define CHECK(p, n) do { if (!on_device(c, p, n)) return ncclInvalidArgument; } while (0)

EXPORT ncclResult_t ncclBroadcast(
    const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t c,
    cudaStream_t stream) {
  size_t n = count * size_of(type);
  if (c->rank == root) CHECK(in, n);
  CHECK(out, n);
  return c->enqueue(stream, [=] {
    auto put = [=](size_t i, size_t part) {
      if (c->rank == root) memcpy(c->chunk(root), (char*)in + i, part);
    };
    auto take = [=](size_t i, size_t part) { memcpy((char*)out + i, c->chunk(root), part); };
    c->exchange(n, put, take);
  });
}
EXPORT ncclResult_t ncclBcast(
    void* p, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
  return ncclBroadcast(p, p, count, type, root, c, stream);
}
EXPORT ncclResult_t ncclAllReduce(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
    cudaStream_t stream) {
  size_t n = count * size_of(type);
  CHECK(in, n);
  CHECK(out, n);
  return c->enqueue(stream, [=] {
    auto put = [=](size_t i, size_t part) { memcpy(c->chunk(c->rank), (char*)in + i, part); };
    auto take = [=](size_t i, size_t part) { reduce(c, (char*)out + i, part, type, op); };
    c->exchange(n, put, take);
  });
}
EXPORT ncclResult_t ncclAllGather(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t c,
    cudaStream_t stream) {
  size_t n = count * size_of(type);
  CHECK(in, n);
  CHECK(out, n * c->size);
  return c->enqueue(stream, [=] {
    auto put = [=](size_t i, size_t part) { memcpy(c->chunk(c->rank), (char*)in + i, part); };
    auto take = [=](size_t i, size_t part) {
      for (int r = 0; r < c->size; r++) memcpy((char*)out + r * n + i, c->chunk(r), part);
    };
    c->exchange(n, put, take);
  });
}
EXPORT ncclResult_t ncclReduceScatter(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
    cudaStream_t stream) {
  size_t n = count * size_of(type);
  CHECK(in, n * c->size);
  CHECK(out, n);
  return c->enqueue(stream, [=] {
    for (int r = 0; r < c->size; r++) {
      auto put = [=](size_t i, size_t part) {
        memcpy(c->chunk(c->rank), (char*)in + r * n + i, part);
      };
      auto take = [=](size_t i, size_t part) {
        if (c->rank == r) reduce(c, (char*)out + i, part, type, op);
      };
      c->exchange(n, put, take);
    }
  });
}
