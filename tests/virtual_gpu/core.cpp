// Devices, memory, streams: see core.h.
#include "core.h"
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <fcntl.h>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>

namespace gpu {

static std::string variable(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

const Settings& settings() {
  static const auto* s = new Settings{
      std::min(MAX_GPUS, std::stoi(variable("VIRTUAL_GPUS", "1"))),
      size_t(std::stod(variable("VIRTUAL_GPU_MEMORY_GB", "6")) * (1 << 30)),
      !variable("VIRTUAL_GPU_LOG", "").empty(),
      variable("VIRTUAL_GPU_ID", "0"),
  };
  return *s;
}

void log(const char* format, ...) {
  char line[1024];
  int n = snprintf(line, sizeof line, "[virtual GPU, process %d] ", getpid());
  va_list arguments;
  va_start(arguments, format);
  n += vsnprintf(line + n, sizeof line - n - 1, format, arguments);
  va_end(arguments);
  n = std::min<int>(n, sizeof line - 2);
  line[n++] = '\n';
  int file = 2;
  if (settings().logs) file = open(getenv("VIRTUAL_GPU_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0644);
  (void)!write(file, line, n);
  if (file != 2) close(file);
}

// ---------------------------------------------------------------- devices

static std::atomic<int> initialized_by{0};
static std::vector<int> visible;  // physical indices
static std::mutex init_mutex;

int init() {
  if (!initialized_by) {
    std::lock_guard<std::mutex> lock(init_mutex);
    if (initialized_by) return init();
    std::string all;
    for (int i = 0; i < settings().gpus; i++) all += std::to_string(i) + ",";
    const char* given = getenv("CUDA_VISIBLE_DEVICES");
    std::stringstream words(given ? given : all);
    for (std::string word; std::getline(words, word, ',');) {
      int index = -1;
      if (!word.empty() && isdigit(word[0])) index = std::stoi(word);
      if (word.rfind("GPU-", 0) == 0)
        index = std::stoi(word.substr(word.rfind('-') + 1), nullptr, 16);
      if (index < 0 || index >= settings().gpus) break;  // the list ends at the first invalid entry
      visible.push_back(index);
    }
    initialized_by = getpid();
  }
  if (initialized_by != getpid()) {
    log("CUDA is used in a fork of process %d, which had initialized it", int(initialized_by));
    return 3;
  }
  return visible.empty() ? 100 : 0;
}

int visible_count() { return init() ? 0 : int(visible.size()); }
int physical(int device) { return visible.at(device); }
int& current() {
  static thread_local int device = 0;
  return device;
}

// ---------------------------------------------------------------- memory

// What each process uses, in memory that all processes of a VIRTUAL_GPU_ID share.
struct Usage {
  std::atomic<int> pid;
  std::atomic<long> bytes[MAX_GPUS];
};
constexpr int ROWS = 256;

static Usage* table() {
  static Usage* t = [] {
    std::string path = "/dev/shm/virtual_gpu-" + settings().id;
    int file = open(path.c_str(), O_RDWR | O_CREAT, 0666);
    (void)!ftruncate(file, sizeof(Usage) * ROWS);
    void* p = mmap(nullptr, sizeof(Usage) * ROWS, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return static_cast<Usage*>(p);
  }();
  return t;
}

static bool alive(int pid) { return pid && (kill(pid, 0) == 0 || errno == EPERM); }

static Usage* own_row() {
  static Usage* row = nullptr;
  if (row && row->pid == getpid()) return row;
  for (row = table(); row < table() + ROWS; row++) {
    int owner = row->pid;
    if (!alive(owner) && row->pid.compare_exchange_strong(owner, getpid())) {
      for (auto& bytes : row->bytes) bytes = 0;
      return row;
    }
  }
  log("more than %d processes use virtual GPUs", ROWS);
  abort();
}

size_t used_memory(int device) {
  long sum = 0;
  for (Usage* row = table(); row < table() + ROWS; row++)
    if (row->bytes[device] && alive(row->pid)) sum += row->bytes[device];
  return sum;
}

size_t free_memory(int device) {
  size_t used = used_memory(physical(device));
  return used < settings().memory ? settings().memory - used : 0;
}

bool count(long bytes, int device) {
  if (bytes > 0 && size_t(bytes) > free_memory(device)) return false;
  own_row()->bytes[physical(device)] += bytes;
  return true;
}

static std::mutex blocks_mutex;
static std::map<uintptr_t, Block>& blocks() {
  static auto* map = new std::map<uintptr_t, Block>;  // outlives destructors that free memory
  return *map;
}

void add_block(void* p, Block block) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  blocks()[uintptr_t(p)] = block;
}

static void* map_memory(size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

void* reserve(size_t size, int device) {
  void* p = map_memory(size);
  if (p) add_block(p, {size, device, false, false});
  return p;
}

void* allocate(size_t size, int device, bool host) {
  size = std::max<size_t>(4096, (size + 4095) & ~size_t(4095));
  if (!host && !count(size, device)) return nullptr;
  void* p = map_memory(size);
  if (p) add_block(p, {size, device, host, true});
  return p;
}

bool release(void* p) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto it = blocks().find(uintptr_t(p));
  if (it == blocks().end()) return false;
  Block block = it->second;
  blocks().erase(it);
  if (block.owned) {
    munmap(p, block.size);
    if (!block.host) count(-long(block.size), block.device);
  }
  return true;
}

bool find(const void* p, Block* block, void** base) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto it = blocks().upper_bound(uintptr_t(p));
  if (it == blocks().begin()) return false;
  --it;
  if (uintptr_t(p) >= it->first + it->second.size) return false;
  *block = it->second;
  *base = reinterpret_cast<void*>(it->first);
  return true;
}

// ---------------------------------------------------------------- streams

static std::mutex streams_mutex;
static std::vector<Stream*>& streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}

Stream* new_stream(int device, int priority) {
  auto* stream = new Stream{device, priority};  // never freed: events may outlive it
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams().push_back(stream);
  return stream;
}

Stream* stream_of(void* handle) {
  if (uintptr_t(handle) > 2) return static_cast<Stream*>(handle);
  static Stream* defaults[MAX_GPUS] = {};
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& stream = defaults[current()];
  if (!stream) stream = new_stream(current(), 0);
  return stream;
}

bool ready(Event* event) { return !event->stream || event->stream->done >= event->target; }
void wait(Event* event) {
  while (!ready(event)) usleep(50);
}
void wait(Stream* stream) {
  Event now{stream, stream->queued};
  wait(&now);
}
void wait_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    all = streams();
  }
  for (Stream* stream : all)
    if (stream->device == device) wait(stream);
}

}  // namespace gpu

// ---------------------------------------------------------------- every other function

static void log_stub(const char* name) {
  bool registers = !strncmp(name, "__cuda", 6);  // a kernel or a variable: thousands of them
  if (gpu::settings().logs && !registers) gpu::log("stub %s", name);
}

// What build.py's stubs call, with the first argument and the name of the function.
EXPORT int virtual_gpu_stub(void*, const char* name) {
  log_stub(name);
  return 0;
}

// For functions that create something: the first argument is where its handle goes.
EXPORT int virtual_gpu_stub_handle(void** handle, const char* name) {
  static std::atomic<uintptr_t> next{0x7f0000001000};
  log_stub(name);
  *handle = reinterpret_cast<void*>(next += 64);
  return 0;
}

EXPORT int virtual_gpu_stub_unsupported(void*, const char* name) {
  log_stub(name);
  return 3;  // NVML_ERROR_NOT_SUPPORTED, ncclInternalError
}
