// Tensors from GPU to GPU: NCCL sends and receives on their own stream.
//
// NCCL is opened at run time like the rest of CUDA; libtorch's GPU build contains it. Only point-to-point messages are
// used: nothing is summed here, so no result depends on NCCL's algorithms.
#include "gpu.h"

#include <cstdint>
#include <cstring>
#include <memory>

namespace {

using namespace longstraw;

// As in nccl.h; passed by value.
struct Unique {
  char bytes[128];
};
using Communicator = void*;

constexpr int kBytes = 0;  // ncclChar

// Already loaded if libtorch_cuda was linked against a separate NCCL library; otherwise opened here, once.
void* symbol(const char* name) {
  static void* beside = dlsym(RTLD_DEFAULT, "ncclSend") == nullptr ? dlopen("libnccl.so.2", RTLD_NOW) : nullptr;
  return dlsym(beside == nullptr ? RTLD_DEFAULT : beside, name);
}

template <typename Function>
Function nccl(const char* name) {
  auto* found = reinterpret_cast<Function>(symbol(name));
  TORCH_CHECK(found != nullptr, "NCCL has no ", name);
  return found;
}

// Status 7 means work in progress; only non-blocking communicators return it.
void fine(int status, const char* what) {
  if (status == 0) return;
  TORCH_CHECK(false, what, ": ", nccl<const char* (*)(int)>("ncclGetErrorString")(status));
}

struct Link {
  Communicator communicator = nullptr;
  c10::Stream stream;
};

size_t bytes_of(const at::Tensor& x) { return x.numel() * x.element_size(); }

}  // namespace

extern "C" {

// Whether NCCL can be opened.
int longstraw_link_there() { return symbol("ncclSend") != nullptr && symbol("ncclCommInitRank") != nullptr ? 1 : 0; }

// A new id for a link, 128 bytes, made on one rank and sent to the others.
int longstraw_link_name(char* name, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    Unique unique;
    fine(nccl<int (*)(Unique*)>("ncclGetUniqueId")(&unique), "ncclGetUniqueId");
    std::memcpy(name, unique.bytes, sizeof(unique.bytes));
  });
}

// Connects `ranks` processes that have the same id; returns when all have joined.
int longstraw_link_open(const char* name, int ranks, int rank, void** link, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    Unique unique;
    std::memcpy(unique.bytes, name, sizeof(unique.bytes));
    auto made = std::make_unique<Link>(Link{nullptr, guard().getStreamFromGlobalPool(device(), true)});
    fine(nccl<int (*)(Communicator*, int, Unique, int)>("ncclCommInitRank")(&made->communicator, ranks, unique, rank),
         "ncclCommInitRank");
    *link = made.release();
  });
}

// Sends and receives whole contiguous tensors, all together, after all work queued on the compute stream so far.
// `*done` is an event after them; the tensors must live until then. Every message needs its counterpart on the peer.
int longstraw_link_exchange(void* link, at::Tensor** send, const int* to, size_t sends, at::Tensor** receive,
                            const int* from, size_t receives, void** done, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    auto& open = *static_cast<Link*>(link);
    mark(compute(), false).block(open.stream);
    void* stream = open.stream.native_handle();
    using Send = int (*)(const void*, size_t, int, int, Communicator, void*);
    using Receive = int (*)(void*, size_t, int, int, Communicator, void*);
    static const auto out = nccl<Send>("ncclSend");
    static const auto in = nccl<Receive>("ncclRecv");
    fine(nccl<int (*)()>("ncclGroupStart")(), "ncclGroupStart");
    int status = 0;
    for (size_t i = 0; i < sends && status == 0; ++i) {
      TORCH_INTERNAL_ASSERT(send[i]->is_contiguous() && send[i]->is_cuda());
      status = out(send[i]->data_ptr(), bytes_of(*send[i]), kBytes, to[i], open.communicator, stream);
    }
    for (size_t i = 0; i < receives && status == 0; ++i) {
      TORCH_INTERNAL_ASSERT(receive[i]->is_contiguous() && receive[i]->is_cuda());
      status = in(receive[i]->data_ptr(), bytes_of(*receive[i]), kBytes, from[i], open.communicator, stream);
    }
    const int ended = nccl<int (*)()>("ncclGroupEnd")();
    fine(status, "a message between GPUs");
    fine(ended, "ncclGroupEnd");
    *done = event_after(open.stream);
  });
}

// Leaves the link; messages in progress end first.
void longstraw_link_close(void* link) {
  try {
    auto* open = static_cast<Link*>(link);
    open->stream.synchronize();
    nccl<int (*)(Communicator)>("ncclCommDestroy")(open->communicator);
    delete open;
  } catch (const std::exception&) {
    // The process is about to end, and the communicator with it.
  }
}
}
