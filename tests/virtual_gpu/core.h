// What the replaced libraries share: the state of the virtual GPUs in one process.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace gpu {

constexpr int MAX_GPUS = 16;
constexpr const char* NAME = "NVIDIA H100 80GB HBM3";
constexpr int MAJOR = 9, MINOR = 0;  // compute capability
constexpr int CUDA_VERSION_NUMBER = 13000;

struct Settings {
  int gpus;        // VIRTUAL_GPUS
  size_t memory;   // VIRTUAL_GPU_MEMORY_GB, in bytes per GPU
  bool logs;       // whether there is a VIRTUAL_GPU_LOG
  std::string id;  // VIRTUAL_GPU_ID
};
const Settings& settings();
void log(const char* format, ...);  // to VIRTUAL_GPU_LOG, or to stderr: errors are always logged

// Initializes CUDA in this process. Returns 0, or 3 (cudaErrorInitializationError) in a fork of a
// process that had initialized it, or 100 (cudaErrorNoDevice).
int init();
int visible_count();       // after CUDA_VISIBLE_DEVICES
int physical(int device);  // its index among all GPUs of the machine
int& current();            // this thread's device

// Memory. Every block is host memory; that of devices is counted over all processes.
struct Block {
  size_t size;
  int device;
  bool host;   // pinned
  bool owned;  // to be unmapped when it is released
};
void* allocate(size_t size, int device, bool host);  // null: out of memory
void* reserve(size_t size, int device);              // addresses that `count` does not know
void add_block(void* p, Block block);
bool release(void* p);
bool count(long bytes, int device);  // take or give back memory; false: out of memory
bool find(const void* p, Block* block, void** base);
size_t used_memory(int physical_device);
size_t free_memory(int device);

// Streams. Only NCCL's operations are asynchronous; everything else is done when it returns.
struct Capture {  // and its graph, which holds no work
  uint64_t id;
  bool active;
};
struct Stream {
  int device, priority;
  std::atomic<uint64_t> queued{0}, done{0};
  Capture* capture = nullptr;
  bool capturing() { return capture && capture->active; }
};
struct Event {
  Stream* stream = nullptr;
  uint64_t target = 0;
  double seconds = 0;
};
Stream* stream_of(void* handle);
Stream* new_stream(int device, int priority);
bool ready(Event* event);
void wait(Stream* stream);
void wait(Event* event);
void wait_device(int device);

}  // namespace gpu
