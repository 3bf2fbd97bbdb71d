// Devices, memory, streams: see core.h.
#include "core.h"
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

namespace gpu {

const Settings& settings() {
  static const Settings* s = [] {
    auto* r = new Settings;
    auto get = [](const char* name, const char* value) { const char* v = getenv(name); return v && *v ? v : value; };
    r->gpus = std::min(MAX_GPUS, atoi(get("VIRTUAL_GPUS", "1")));
    if (sscanf(get("VIRTUAL_GPU_CAPABILITY", "9.0"), "%d.%d", &r->major, &r->minor) != 2) { r->major = 9; r->minor = 0; }
    r->memory = size_t(atof(get("VIRTUAL_GPU_MEMORY_GB", "6")) * (1ull << 30));
    r->trace = getenv("VIRTUAL_GPU_LOG") != nullptr;
    r->nccl_error = !strcmp(get("VIRTUAL_GPU_NCCL_DEAD", "hang"), "error");
    r->id = get("VIRTUAL_GPU_ID", "0");
    return r;
  }();
  return *s;
}

void log(const char* format, ...) {
  char line[1024];
  int n = snprintf(line, sizeof line, "[virtual GPU %d] ", getpid());
  va_list list;
  va_start(list, format);
  n += vsnprintf(line + n, sizeof line - n - 1, format, list);
  va_end(list);
  n = std::min<int>(n, sizeof line - 2);
  line[n++] = '\n';
  if (const char* path = getenv("VIRTUAL_GPU_LOG")) {
    int f = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    (void)!write(f, line, n);
    close(f);
  } else {
    (void)!write(2, line, n);
  }
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// ---------------------------------------------------------------- devices
static std::atomic<int> init_pid{0};
static std::vector<int> visible;  // physical indices
static std::mutex init_mutex;

int init() {
  int pid = init_pid;
  if (pid == getpid()) return visible.empty() ? 100 : 0;
  if (pid) {
    log("CUDA is used in a forked child of process %d, which had initialized CUDA", pid);
    return 3;
  }
  std::lock_guard<std::mutex> lock(init_mutex);
  if (init_pid) return visible.empty() ? 100 : 0;
  const char* v = getenv("CUDA_VISIBLE_DEVICES");
  if (!v) {
    for (int i = 0; i < settings().gpus; i++) visible.push_back(i);
  } else {
    std::string text(v);
    size_t start = 0;
    while (start < text.size()) {  // the list ends at the first invalid entry
      size_t end = text.find(',', start);
      if (end == std::string::npos) end = text.size();
      std::string word = text.substr(start, end - start);
      start = end + 1;
      int index = -1;
      if (word.rfind("GPU-", 0) == 0) index = atoi(word.substr(word.rfind('-') + 1).c_str());
      else if (!word.empty() && isdigit(word[0])) index = atoi(word.c_str());
      if (index < 0 || index >= settings().gpus) break;
      visible.push_back(index);
    }
  }
  init_pid = getpid();
  return visible.empty() ? 100 : 0;
}

int visible_count() { return init() ? 0 : int(visible.size()); }
int physical(int device) { return device >= 0 && device < int(visible.size()) ? visible[device] : 0; }
int& current() { static thread_local int device = 0; return device; }

// ---------------------------------------------------------------- memory
struct Usage { std::atomic<int> pid; std::atomic<long> bytes[MAX_GPUS]; };
constexpr int ROWS = 256;

static Usage* table() {
  static Usage* t = [] {
    std::string name = "/dev/shm/virtual_gpu-" + settings().id;
    int f = open(name.c_str(), O_RDWR | O_CREAT, 0666);
    (void)!ftruncate(f, sizeof(Usage) * ROWS);
    void* p = mmap(nullptr, sizeof(Usage) * ROWS, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    close(f);
    return static_cast<Usage*>(p);
  }();
  return t;
}

static bool alive(int pid) { return kill(pid, 0) == 0 || errno == EPERM; }

static Usage* own_row() {
  static Usage* row = nullptr;
  static int pid = 0;
  if (row && pid == getpid()) return row;
  Usage* t = table();
  for (int i = 0; i < ROWS; i++) {
    int old = t[i].pid;
    if (old && alive(old)) continue;
    if (t[i].pid.compare_exchange_strong(old, getpid())) {
      for (auto& b : t[i].bytes) b = 0;
      row = &t[i];
      pid = getpid();
      return row;
    }
  }
  abort();
}

void usage(int device, size_t* used) {
  long sum = 0;
  Usage* t = table();
  for (int i = 0; i < ROWS; i++) {
    int pid = t[i].pid;
    if (pid && t[i].bytes[device] && alive(pid)) sum += t[i].bytes[device];
  }
  *used = sum;
}

void free_and_total(int device, size_t* free, size_t* total) {
  size_t used;
  usage(physical(device), &used);
  *total = settings().memory;
  *free = used < *total ? *total - used : 0;
}

static std::map<uintptr_t, Block>& blocks() { static auto* m = new std::map<uintptr_t, Block>; return *m; }
static std::mutex memory_mutex;

void* allocate(size_t size, int device, bool host) {
  size = std::max<size_t>((size + 4095) & ~size_t(4095), 4096);
  std::lock_guard<std::mutex> lock(memory_mutex);
  if (!host) {
    size_t free, total;
    free_and_total(device, &free, &total);
    if (size > free) { log("out of memory: %zu bytes on GPU %d, %zu of %zu free", size, physical(device), free, total); return nullptr; }
  }
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  blocks()[uintptr_t(p)] = {size, device, host, false};
  if (!host) own_row()->bytes[physical(device)] += size;
  return p;
}

bool release(void* p) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = blocks().find(uintptr_t(p));
  if (it == blocks().end()) return false;
  Block b = it->second;
  blocks().erase(it);
  if (b.registered) return true;
  munmap(p, b.size);
  if (!b.host) own_row()->bytes[physical(b.device)] -= b.size;
  return true;
}

void* reserve(size_t size, int device) {  // addresses, without memory
  std::lock_guard<std::mutex> lock(memory_mutex);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  blocks()[uintptr_t(p)] = {size, device, false, true};
  return p;
}

bool count(long bytes, int device) {  // memory of a device, without addresses
  std::lock_guard<std::mutex> lock(memory_mutex);
  size_t free, total;
  free_and_total(device, &free, &total);
  if (bytes > 0 && size_t(bytes) > free) { log("out of memory: %ld bytes on GPU %d, %zu of %zu free", bytes, physical(device), free, total); return false; }
  own_row()->bytes[physical(device)] += bytes;
  return true;
}

void register_host(void* p, size_t size) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  blocks()[uintptr_t(p)] = {size, 0, true, true};
}

bool find(const void* p, Block* block, void** base) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = blocks().upper_bound(uintptr_t(p));
  if (it == blocks().begin()) return false;
  --it;
  if (uintptr_t(p) >= it->first + it->second.size) return false;
  *block = it->second;
  *base = reinterpret_cast<void*>(it->first);
  return true;
}

// ---------------------------------------------------------------- streams
std::atomic<int> captures{0};
thread_local bool capturing_thread = false;
static std::mutex stream_mutex;
static std::vector<Stream*>& streams() { static auto* v = new std::vector<Stream*>; return *v; }

Stream* new_stream(int device, int priority) {
  auto* s = new Stream;  // never freed: a handle may outlive its destruction
  s->device = device;
  s->priority = priority;
  std::lock_guard<std::mutex> lock(stream_mutex);
  streams().push_back(s);
  return s;
}

Stream* stream_of(void* handle) {
  if (uintptr_t(handle) > 2) return static_cast<Stream*>(handle);
  static Stream* defaults[MAX_GPUS] = {};
  static std::mutex m;
  std::lock_guard<std::mutex> lock(m);
  Stream*& s = defaults[current()];
  if (!s) s = new_stream(current(), 0);
  return s;
}

static void nap() { usleep(50); }
bool ready(Stream* s) { return s->done >= s->queued; }
bool ready(Event* e) { return !e->recorded || e->stream->done >= e->target; }
void wait(Stream* s) { for (uint64_t n = s->queued; s->done < n;) nap(); }
void wait(Event* e) { while (!ready(e)) nap(); }

void wait_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(stream_mutex);
    all = streams();
  }
  for (Stream* s : all) if (s->device == device) wait(s);
}

}  // namespace gpu

extern "C" __attribute__((visibility("default"))) int virtual_gpu_unimplemented(void* first, const char* name) {
  if (gpu::settings().trace) gpu::log("stub %s", name);
  bool creates = strstr(name, "Create") && strncmp(name, "cufft", 5);
  if (creates && uintptr_t(first) > 65536) {
    static std::atomic<uintptr_t> next{0x7f0000001000};
    memcpy(first, &next, 8);
    next += 64;
  }
  return 0;
}
