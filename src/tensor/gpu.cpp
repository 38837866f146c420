// The GPU part of the boundary: the CUDA library opened at run time, copy streams and events, pinned host memory of
// exact size, and the library's attention kernels with their log-sum-exp.
//
// No CUDA library is linked. Streams, events and the allocator are reached through libtorch's device-independent
// interfaces. The few other runtime calls are looked up by name in the library that libtorch has loaded.
// A function that can throw catches the exception, copies its message and returns non-zero. No exception reaches Rust.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "gpu.h"

namespace longstraw {

int driven = -1;

}  // namespace longstraw

namespace {

using namespace longstraw;

// One copy stream for each direction, so that both copy engines of a GPU work at the same time.
struct CopyStreams {
  c10::Stream in, out;
};
CopyStreams& copy_streams() {
  const auto one = [] { return guard().getStreamFromGlobalPool(device(), true); };
  static CopyStreams made{one(), one()};
  return made;
}

// --- pinned host memory ------------------------------------------------------------------------------------------

// Blocks of pinned memory, of the lengths of block_length(). A freed block is kept for the next tensor of about that size,
// because pinning costs more than a copy. Kept and used blocks together never exceed
// the peak of used blocks.
struct Pinned {
  std::mutex lock;
  std::multimap<size_t, void*> idle;
  size_t reserved = 0, used = 0, most = 0;
};
Pinned& pinned() {
  static auto* made = new Pinned;  // never destroyed: tensors may be freed after static destructors ran
  return *made;
}

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// The length of the block for a tensor of `bytes`: whole pages, and up to 4 MiB a power of two. Answers have other lengths in every
// update; without classes of lengths each layer's block would be unpinned and pinned anew, and the device waited for.
size_t block_length(size_t bytes) {
  constexpr size_t kClassesMax = size_t{4} << 20U;
  const size_t pages = whole_pages(bytes);
  if (pages > kClassesMax) return pages;
  size_t length = whole_pages(1);
  while (length < pages) length *= 2;
  return length;
}

// The NUMA node of the GPU, or -1 if the machine has only one node or does not report it.
int numa_node() {
  static const int node = [] {
    char id[32] = {0};
    must(runtime<int (*)(char*, int, int)>("cudaDeviceGetPCIBusId")(id, sizeof(id), driven), "cudaDeviceGetPCIBusId");
    std::string path = "/sys/bus/pci/devices/";
    for (const char* at = id; *at != 0; ++at) path += static_cast<char>(std::tolower(*at));
    const int file = open((path + "/numa_node").c_str(), O_RDONLY);
    if (file < 0) return -1;
    char text[16] = {0};
    const bool any = read(file, text, sizeof(text) - 1) > 0;
    close(file);
    return any ? std::atoi(text) : -1;
  }();
  return node;
}

// Touches memory with several threads; with the calling thread alone if no other can be started.
void touch(char* block, size_t bytes, int threads) {
  const size_t share = whole_pages(bytes / static_cast<size_t>(threads) + 1);
  std::vector<std::thread> crew;
  crew.reserve(static_cast<size_t>(threads) + 1);
  size_t first = 0;
  for (; first + share < bytes; first += share) {
    try {
      crew.emplace_back([=] { std::memset(block + first, 0, share); });
    } catch (const std::system_error&) {
      break;
    }
  }
  std::memset(block + first, 0, bytes - first);
  for (auto& one : crew) one.join();
}

// Allocates memory on the GPU's NUMA node, touches it and pins it.
void* pin(size_t bytes, int threads) {
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(block != MAP_FAILED, "out of memory: the machine gives no ", bytes, " bytes of host memory");
  madvise(block, bytes, MADV_HUGEPAGE);
  const int node = numa_node();
  if (node >= 0 && node < 64) {
    const unsigned long mask = 1UL << node;
    constexpr int kPreferred = 1;
    // Only a preference: if the kernel refuses, the memory comes from any node.
    syscall(SYS_mbind, block, bytes, kPreferred, &mask, 64UL, 0U);
  }
  touch(static_cast<char*>(block), bytes, threads);
  constexpr unsigned kPortable = 1;
  constexpr int kNoMemory = 2;
  const int status = runtime<int (*)(void*, size_t, unsigned)>("cudaHostRegister")(block, bytes, kPortable);
  if (status != 0) munmap(block, bytes);
  must(status, status == kNoMemory ? "out of memory: pinning host memory (see ulimit -l)" : "pinning host memory");
  return block;
}

void unpin(void* block, size_t bytes) {
  runtime<int (*)(void*)>("cudaHostUnregister")(block);
  munmap(block, bytes);
}

int crew_size() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16); }

// A block and its real length, which may be slightly more than requested.
struct Block {
  void* data;
  size_t length;
};

Block take(size_t bytes) {
  auto& all = pinned();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.idle.lower_bound(bytes);
  const size_t limit = std::max(all.most, all.used + bytes);
  // A slightly longer block is accepted too, and one of up to twice the length where another would have to be unpinned first.
  const size_t accepted = all.reserved + bytes > limit ? 2 * bytes : bytes + bytes / 8;
  if (found != all.idle.end() && found->first <= accepted) {
    const Block block{found->second, found->first};
    all.idle.erase(found);
    all.used += block.length;
    all.most = std::max(all.most, all.used);
    return block;
  }
  if (!all.idle.empty() && all.reserved + bytes > limit) guard().synchronizeDevice(device().index());
  while (!all.idle.empty() && all.reserved + bytes > limit) {
    auto last = std::prev(all.idle.end());
    unpin(last->second, last->first);
    all.reserved -= last->first;
    all.idle.erase(last);
  }
  const Block block{pin(bytes, crew_size()), bytes};
  all.reserved += bytes;
  all.used += bytes;
  all.most = std::max(all.most, all.used);
  return block;
}

void give(const Block& block) {
  auto& all = pinned();
  const std::lock_guard<std::mutex> held(all.lock);
  all.used -= block.length;
  all.idle.emplace(block.length, block.data);
}

// --- waits -------------------------------------------------------------------------------------------------------

// Time that the compute stream waited for copies, measured on the device by pairs of events.
struct Waits {
  std::vector<std::pair<c10::Event, c10::Event>> open;
  double milliseconds = 0;
};
Waits& waits() {
  static auto* made = new Waits;
  return *made;
}

constexpr size_t kOpenWaits = 256;

// Bytes copied to the device and to host memory so far.
std::atomic<uint64_t> moved_in{0}, moved_out{0};

uint64_t bytes_of(const at::Tensor& x) { return static_cast<uint64_t>(x.numel()) * x.element_size(); }

void settle(Waits& all) {
  for (auto& [before, after] : all.open) {
    after.synchronize();
    all.milliseconds += before.elapsedTime(after);
  }
  all.open.clear();
}

at::Tensor seed() {
  static auto* made = new at::Tensor(at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device())));
  return *made;
}

}  // namespace

namespace longstraw {

bool drives_gpu() { return driven >= 0; }

void gpu_bytes(int64_t* live, int64_t* peak) noexcept {
  try {
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device().index());
    *live = stats.allocated_bytes[0].current;
    *peak = stats.allocated_bytes[0].peak;
  } catch (const std::exception&) {
    *live = *peak = 0;
  }
}

void gpu_forget_peak() noexcept {
  try {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(device().index());
  } catch (const std::exception&) {
  }
}

}  // namespace longstraw

extern "C" {

// Opens libtorch's CUDA library, from `folder` if it is there, else from the loader's search path. Must be called before
// the first tensor.
int longstraw_gpu_open(const char* folder, char* message, size_t capacity) {
  const std::string beside = std::string(folder) + "/libtorch_cuda.so";
  // If the library is in `folder` and does not load, its error message says more than the loader's.
  const bool there = access(beside.c_str(), F_OK) == 0;
  if (dlopen(there ? beside.c_str() : "libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr) return 0;
  const char* words = dlerror();
  longstraw::keep(words == nullptr ? "no words from the loader" : words, message, capacity);
  return 1;
}

int longstraw_gpu_count() {
  try {
    return guard().deviceCount();
  } catch (const std::exception&) {
    return 0;
  }
}

int longstraw_gpu_drive(int index, int deterministic, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const c10::Device wanted(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    guard().setDevice(wanted);
    at::empty({1}, at::TensorOptions().dtype(at::kFloat).device(wanted));
    // Sums stay in float32, as on a CPU: no TF32, no bfloat16 partial sums.
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowBF16ReductionCuBLAS(false);
    at::globalContext().setDeterministicAlgorithms(deterministic != 0, true);
    // libtorch asks for this variable where results have to repeat, before the first matrix product. Elsewhere it stays away: where it
    // is set, libtorch parses it with a regular expression at every product. The workspace is the same on Hopper.
    if (deterministic != 0) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    // Set last: memory is only read from a GPU that works.
    driven = index;
    copy_streams();
  });
}

int longstraw_gpu_repeats() { return at::globalContext().deterministicAlgorithms() ? 1 : 0; }

int longstraw_gpu_identity(int index, char* text, size_t capacity) {
  try {
    return runtime<int (*)(char*, int, int)>("cudaDeviceGetPCIBusId")(text, static_cast<int>(capacity), index);
  } catch (const std::exception&) {
    return 1;
  }
}

int longstraw_gpu_memory(uint64_t* free, uint64_t* total, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    size_t f = 0, t = 0;
    must(runtime<int (*)(size_t*, size_t*)>("cudaMemGetInfo")(&f, &t), "cudaMemGetInfo");
    *free = f;
    *total = t;
  });
}

int longstraw_gpu_synchronize(char* message, size_t capacity) {
  return guarded(message, capacity, [&] { guard().synchronizeDevice(device().index()); });
}

int longstraw_gpu_reserved_bytes(uint64_t* now, uint64_t* peak) {
  if (driven < 0) return 1;
  try {
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device().index());
    *now = static_cast<uint64_t>(stats.reserved_bytes[0].current);
    *peak = static_cast<uint64_t>(stats.reserved_bytes[0].peak);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

void longstraw_gpu_empty_cache() {
  if (driven < 0) return;
  try {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
  } catch (const std::exception&) {
    // An error of the device is returned by the next wait.
  }
}

// A tensor with the shape and dtype of `like`, in its own pinned memory; its values are not initialized.
int longstraw_pinned_like(at::Tensor* like, at::Tensor** made, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto bytes = static_cast<size_t>(like->numel()) * like->element_size();
    auto options = at::TensorOptions().dtype(like->scalar_type()).device(at::kCPU);
    if (bytes == 0) {
      *made = new at::Tensor(at::empty(like->sizes(), options));
      return;
    }
    const Block block = take(block_length(bytes));
    longstraw::count(longstraw::kHost, static_cast<int64_t>(bytes));
    auto release = [block, bytes](void*) {
      longstraw::count(longstraw::kHost, -static_cast<int64_t>(bytes));
      give(block);
    };
    try {
      *made = new at::Tensor(at::from_blob(block.data, like->sizes(), release, options));
    } catch (...) {
      longstraw::count(longstraw::kHost, -static_cast<int64_t>(bytes));
      give(block);
      throw;
    }
  });
}

// Pins `count` blocks of the sizes `bytes` now, so that later tensors reuse them.
int longstraw_pinned_reserve(const uint64_t* bytes, size_t count, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    std::vector<Block> blocks;
    for (size_t i = 0; i < count; ++i) {
      if (bytes[i] > 0) blocks.push_back(take(block_length(bytes[i])));
    }
    for (const Block& block : blocks) give(block);
  });
}

uint64_t longstraw_pinned_reserved() { return pinned().reserved; }

// Copies between pinned memory and the device, in either direction, by a kernel on the compute stream. The copy does not
// queue after a larger copy on a copy engine, and later work on the compute stream needs no event.
int longstraw_copy_near(at::Tensor* target, at::Tensor* source, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    (target->is_cuda() ? moved_in : moved_out).fetch_add(bytes_of(*source));
    // Needs registered memory that has the same address on the device; otherwise a plain copy on the same stream is used.
    static const bool in_place = [] {
      constexpr int kCanUseHostPointer = 91;
      int can = 0;
      must(runtime<int (*)(int*, int, int)>("cudaDeviceGetAttribute")(&can, kCanUseHostPointer, driven),
           "cudaDeviceGetAttribute");
      return can != 0;
    }();
    if (!in_place) {
      target->copy_(*source, true);
      return;
    }
    const auto bytes = static_cast<int64_t>(bytes_of(*source));
    const auto aligned = [](const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 8 == 0; };
    const bool words = bytes % 8 == 0 && aligned(*target) && aligned(*source);
    const auto options = at::TensorOptions().dtype(words ? at::kLong : at::kByte).device(device());
    const auto seen = [&](const at::Tensor& x) {
      return at::from_blob(x.data_ptr(), {words ? bytes / 8 : bytes}, [](void*) {}, options, device());
    };
    at::Tensor to = seen(*target);
    at::bitwise_or_out(to, seen(*source), 0);
  });
}

// Copies `source` (device) over `target` (pinned) on the outgoing stream, after all work queued on the compute stream so
// far. `*done` is an event after the copy.
int longstraw_copy_out(at::Tensor* target, at::Tensor* source, void** done, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const c10::Stream out = copy_streams().out;
    mark(compute(), false).block(out);
    {
      const c10::StreamGuard here(out);
      target->copy_(*source, true);
    }
    *done = event_after(out);
    moved_out.fetch_add(bytes_of(*source));
  });
}

// Copies `source` (pinned) over `target` (device) on the incoming stream, after all work queued on the compute stream so
// far. `*done` is an event after the copy.
int longstraw_copy_in(at::Tensor* target, at::Tensor* source, void** done, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const c10::Stream in = copy_streams().in;
    mark(compute(), false).block(in);
    {
      const c10::StreamGuard here(in);
      target->copy_(*source, true);
    }
    *done = event_after(in);
    moved_in.fetch_add(bytes_of(*source));
  });
}

// The compute stream waits for an event; the waiting time is added to the sum of waits.
int longstraw_event_wait(void* event, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    auto* awaited = static_cast<c10::Event*>(event);
    if (awaited->query()) return;
    auto& all = waits();
    if (all.open.size() >= kOpenWaits) settle(all);
    c10::Event before = mark(compute(), true);
    awaited->block(compute());
    all.open.emplace_back(std::move(before), mark(compute(), true));
  });
}

// The compute stream waits for an event that may depend on another process. The wait is not timed, since it is no copy,
// and the host does not wait.
int longstraw_event_block(void* event, char* message, size_t capacity) {
  return guarded(message, capacity, [&] { static_cast<c10::Event*>(event)->block(compute()); });
}

// The host waits for an event.
int longstraw_event_finish(void* event, char* message, size_t capacity) {
  return guarded(message, capacity, [&] { static_cast<c10::Event*>(event)->synchronize(); });
}

void longstraw_event_free(void* event) { delete static_cast<c10::Event*>(event); }

// An event on the compute stream that can be timed.
int longstraw_event_now(void** event, char* message, size_t capacity) {
  return guarded(message, capacity, [&] { *event = new c10::Event(mark(compute(), true)); });
}

int longstraw_event_between(void* before, void* after, double* milliseconds, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    auto* last = static_cast<c10::Event*>(after);
    last->synchronize();
    *milliseconds = static_cast<c10::Event*>(before)->elapsedTime(*last);
  });
}

void longstraw_moved(uint64_t* in, uint64_t* out) {
  *in = moved_in.load();
  *out = moved_out.load();
}

// Milliseconds that the compute stream has waited for copies so far.
double longstraw_stall_ms() {
  if (driven < 0) return 0;
  try {
    settle(waits());
  } catch (const std::exception&) {
    // An error of the device is returned by the next wait.
  }
  return waits().milliseconds;
}

// While one exists and deterministic kernels were requested, an operation without a deterministic form is an error. Flash
// attention needs this strict mode: in the warn-only mode it keeps its kernels with atomics.
struct Strictly {
  const bool repeatable = at::globalContext().deterministicAlgorithms();
  const bool lenient = at::globalContext().deterministicAlgorithmsWarnOnly();
  Strictly() { at::globalContext().setDeterministicAlgorithms(repeatable, false); }
  ~Strictly() { at::globalContext().setDeterministicAlgorithms(repeatable, lenient); }
  Strictly(const Strictly&) = delete;
  Strictly& operator=(const Strictly&) = delete;
};

// [1, h, t, d] queries, [1, g, s, d] keys and values; kernel 1 is cuDNN's, 2 is flash attention. `lse` is [1, h, t].
int longstraw_attention_forward(int kernel, at::Tensor* q, at::Tensor* k, at::Tensor* v, int causal, double scale,
                                at::Tensor** out, at::Tensor** lse, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    c10::NoGradGuard no_grad;
    if (kernel == 1) {
      auto result = at::_scaled_dot_product_cudnn_attention(*q, *k, *v, std::nullopt, true, 0.0, causal != 0, false, scale);
      *out = new at::Tensor(std::get<0>(result));
      *lse = new at::Tensor(std::get<1>(result).view({q->size(0), q->size(1), q->size(2)}));
    } else {
      auto result = at::_scaled_dot_product_flash_attention(*q, *k, *v, 0.0, causal != 0, false, scale);
      *out = new at::Tensor(std::get<0>(result));
      *lse = new at::Tensor(std::get<1>(result));
    }
  });
}

int longstraw_attention_backward(int kernel, at::Tensor* dout, at::Tensor* q, at::Tensor* k, at::Tensor* v,
                                 at::Tensor* out, at::Tensor* lse, int causal, double scale, at::Tensor** dq,
                                 at::Tensor** dk, at::Tensor** dv, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    c10::NoGradGuard no_grad;
    const at::Tensor none;
    const int64_t t = q->size(2), s = k->size(2);
    std::tuple<at::Tensor, at::Tensor, at::Tensor> result;
    if (kernel == 1) {
      result = at::_scaled_dot_product_cudnn_attention_backward(*dout, *q, *k, *v, *out, lse->unsqueeze(-1), seed(),
                                                                seed(), none, none, none, t, s, 0.0, causal != 0, scale);
    } else {
      const Strictly strictly;
      result = at::_scaled_dot_product_flash_attention_backward(*dout, *q, *k, *v, *out, *lse, none, none, t, s, 0.0,
                                                                causal != 0, seed(), seed(), scale);
    }
    *dq = new at::Tensor(std::get<0>(result));
    *dk = new at::Tensor(std::get<1>(result));
    *dv = new at::Tensor(std::get<2>(result));
  });
}
}
