// What tch does not bind: backward with given output gradients, real storage sizes, and a CPU allocator that counts.
// A function that can throw catches the exception, copies its message and returns non-zero. No exception reaches Rust.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "count.h"

namespace {

constexpr int kTags = 2;
std::atomic<int64_t> live[kTags], peak[kTags];
std::atomic<int> current_tag{0};
c10::Allocator* base = nullptr;

// The header of an allocation is stored before its data, so the data pointer is also the context pointer. libtorch's
// raw_allocate (used by bfloat16 products) requires this.
struct alignas(64) Counted {
  void* context;
  c10::DeleterFnPtr deleter;
  int64_t bytes;
  int tag;
};

void release(void* data) {
  auto* counted = static_cast<Counted*>(data) - 1;
  longstraw::count(counted->tag, -counted->bytes);
  counted->deleter(counted->context);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    const int tag = current_tag.load();
    c10::DataPtr inner = base->allocate(sizeof(Counted) + bytes);
    const c10::Device device = inner.device();
    const c10::DeleterFnPtr deleter = inner.get_deleter();
    auto* counted = static_cast<Counted*>(inner.get());
    void* context = inner.release_context();
    *counted = Counted{context, deleter, static_cast<int64_t>(bytes), tag};
    longstraw::count(tag, counted->bytes);
    void* data = counted + 1;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

CountingAllocator counting;

}  // namespace

namespace longstraw {

void count(int tag, int64_t bytes) {
  const int64_t now = live[tag].fetch_add(bytes) + bytes;
  int64_t seen = peak[tag].load();
  while (now > seen && !peak[tag].compare_exchange_weak(seen, now)) {
  }
}

void keep(const char* what, char* message, size_t capacity) {
  if (capacity == 0) return;
  const size_t length = std::min(std::strlen(what), capacity - 1);
  std::memcpy(message, what, length);
  message[length] = 0;
}

}  // namespace longstraw

extern "C" {

int longstraw_backward(at::Tensor** outputs, at::Tensor** gradients, size_t count, char* message, size_t capacity) {
  try {
    std::vector<at::Tensor> outs, grads;
    for (size_t i = 0; i < count; ++i) {
      outs.push_back(*outputs[i]);
      grads.push_back(*gradients[i]);
    }
    torch::autograd::backward(outs, grads);
    return 0;
  } catch (const std::exception& error) {
    longstraw::keep(error.what(), message, capacity);
    return 1;
  }
}

uint64_t longstraw_storage_bytes(at::Tensor* tensor) { return tensor->storage().nbytes(); }

const char* longstraw_torch_version() { return TORCH_VERSION; }

void longstraw_count_install() {
  if (base == nullptr) {
    base = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counting, 100);
  }
}

void longstraw_count_tag(int tag) { current_tag.store(tag); }

int64_t longstraw_count_live(int tag) {
  if (tag != longstraw::kDevice || !longstraw::drives_gpu()) return live[tag].load();
  int64_t now = 0, most = 0;
  longstraw::gpu_bytes(&now, &most);
  return now;
}

int64_t longstraw_count_peak(int tag) {
  if (tag != longstraw::kDevice || !longstraw::drives_gpu()) return peak[tag].load();
  int64_t now = 0, most = 0;
  longstraw::gpu_bytes(&now, &most);
  return most;
}

void longstraw_count_reset_peak() {
  for (int tag = 0; tag < kTags; ++tag) peak[tag].store(live[tag].load());
  if (longstraw::drives_gpu()) longstraw::gpu_forget_peak();
}
}
