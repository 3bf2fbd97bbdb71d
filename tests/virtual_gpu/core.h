// State shared by the virtual CUDA runtime, driver, NVML and NCCL (one process).
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace gpu {

constexpr int MAX_GPUS = 16;

struct Settings {
  int gpus;         // VIRTUAL_GPUS: GPUs of this machine
  int major, minor; // VIRTUAL_GPU_CAPABILITY=9.0: compute capability
  size_t memory;    // VIRTUAL_GPU_MEMORY_GB=6: per GPU
  bool trace;       // VIRTUAL_GPU_LOG=FILE: log calls of stubs, and NCCL groups, there
  bool nccl_error;  // VIRTUAL_GPU_NCCL_DEAD=error: a dead peer is an NCCL error, not a hang
  std::string id;   // VIRTUAL_GPU_ID: which virtual machine (its table in /dev/shm)
};
const Settings& settings();
void log(const char* format, ...);

// Initializes CUDA for this process: 0, or 3 (cudaErrorInitializationError) in a forked child of a
// process that had initialized it, or 100 (cudaErrorNoDevice).
int init();
int visible_count();       // after CUDA_VISIBLE_DEVICES; 0 also if `init` fails
int physical(int device);  // index among all GPUs of the machine
int& current();            // this thread's device

// Memory
struct Block { size_t size; int device; bool host, registered; };
void* allocate(size_t size, int device, bool host);  // null: out of memory
bool release(void* p);
bool find(const void* p, Block* block, void** base);
void* reserve(size_t size, int device);
bool count(long bytes, int device);
void register_host(void* p, size_t size);
void free_and_total(int device, size_t* free, size_t* total);
void usage(int physical_device, size_t* used);

// Streams: only NCCL operations are asynchronous. Everything else has finished when it returns.
struct Stream {
  int device = 0, priority = 0;
  std::atomic<uint64_t> queued{0}, done{0};
  bool capturing = false;
  uint64_t capture_id = 0;
  void* graph = nullptr;
};
struct Event { Stream* stream = nullptr; uint64_t target = 0; double seconds = 0; bool recorded = false; };
Stream* stream_of(void* handle);
Stream* new_stream(int device, int priority);
bool ready(Stream* s);
bool ready(Event* e);
void wait(Stream* s);
void wait(Event* e);
void wait_device(int device);
double now();
extern std::atomic<int> captures;  // streams that are capturing
extern thread_local bool capturing_thread;

}  // namespace gpu
