// Shared by the GPU files: the device of this process, its streams, and how errors are returned.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <system_error>

#include "count.h"

namespace longstraw {

// Index of the device that this process uses, or -1. Set once, before the first tensor on it.
extern int driven;

inline c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

inline c10::Device device() { return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(driven)); }

inline c10::Stream compute() { return guard().getStream(device()); }

template <typename Function>
Function runtime(const char* name) {
  auto* found = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(found != nullptr, "the CUDA libraries have no ", name);
  return found;
}

inline void must(int status, const char* what) {
  if (status == 0) return;
  const char* words = runtime<const char* (*)(int)>("cudaGetErrorString")(status);
  // Clears the error: the runtime would return it again to the next, unrelated call.
  runtime<int (*)()>("cudaGetLastError")();
  TORCH_CHECK(false, what, ": ", words);
}

template <typename Work>
int guarded(char* message, size_t capacity, Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    keep(error.what(), message, capacity);
    return 1;
  }
}

inline c10::Event mark(const c10::Stream& stream, bool timed) {
  c10::Event event(c10::DeviceType::CUDA, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  event.record(stream);
  return event;
}

// An event after all work queued on a copy stream so far. If no event can be made, the device is synchronized before
// this throws, so that the caller may free the tensors of the copy.
inline c10::Event* event_after(const c10::Stream& stream) {
  try {
    return new c10::Event(mark(stream, false));
  } catch (...) {
    guard().synchronizeDevice(device().index());
    throw;
  }
}

}  // namespace longstraw
