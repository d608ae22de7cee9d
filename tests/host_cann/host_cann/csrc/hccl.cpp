// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Collectives between processes of one machine, over shared memory: what a rank gives is put in its slot, then all
// ranks meet, then each reads what it needs. Sums are made in order of ranks, so that all get the same bits.
#include "third_party/hccl/inc/hccl/hccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "aclnn.h"
#include "injection.h"
#include "memory.h"
#include "report.h"

using namespace host_cann;

namespace {

constexpr uint32_t kMaxRanks = 16;
constexpr size_t kSlot = size_t(1) << 20, kBox = size_t(1) << 16;

struct Box {                            // from one rank to another
  std::atomic<uint64_t> written, read;  // pieces
};
struct Shared {
  std::atomic<uint64_t> met[kMaxRanks];  // how often each has come to meet the others
  Box boxes[kMaxRanks][kMaxRanks];
};

struct Comm {
  uint32_t rank, ranks;
  std::string name;
  Shared* shared;
  char* slots;
  char* boxes;
  uint64_t meetings = 0;
  char* slot(uint32_t r) const { return slots + r * kSlot; }
  char* box(uint32_t from, uint32_t to) const { return boxes + (from * ranks + to) * kBox; }
};

// Seconds that a collective waits for another rank.
std::atomic<int>& timeout() {
  static std::atomic<int> seconds{getenv("HOST_CANN_HCCL_TIMEOUT") ? atoi(getenv("HOST_CANN_HCCL_TIMEOUT")) : 300};
  return seconds;
}

template <class Condition>
void wait_until(Condition condition) {
  const auto begun = std::chrono::steady_clock::now();
  for (long tries = 0; !condition(); ++tries) {
    if (tries < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (std::chrono::steady_clock::now() - begun > std::chrono::seconds(timeout())) {
      throw std::runtime_error("a collective has waited for another rank too long");
    }
  }
}

void meet(Comm& c) {
  const uint64_t mine = ++c.meetings;
  c.shared->met[c.rank].store(mine);
  for (uint32_t r = 0; r < c.ranks; ++r) wait_until([&] { return c.shared->met[r].load() >= mine; });
}

// `bytes` of each rank, piece by piece: `give` fills this rank's slot, `take` reads all slots.
template <class Give, class Take>
void rounds(Comm& c, size_t bytes, Give give, Take take) {
  for (size_t at = 0; at < bytes; at += kSlot) {
    const size_t length = std::min(kSlot, bytes - at);
    give(c.slot(c.rank), at, length);
    meet(c);
    take(at, length);
    meet(c);
  }
}

at::ScalarType dtype_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return at::kChar;
    case HCCL_DATA_TYPE_UINT8:
      return at::kByte;
    case HCCL_DATA_TYPE_INT16:
      return at::kShort;
    case HCCL_DATA_TYPE_INT32:
      return at::kInt;
    case HCCL_DATA_TYPE_INT64:
      return at::kLong;
    case HCCL_DATA_TYPE_FP16:
      return at::kHalf;
    case HCCL_DATA_TYPE_BFP16:
      return at::kBFloat16;
    case HCCL_DATA_TYPE_FP32:
      return at::kFloat;
    case HCCL_DATA_TYPE_FP64:
      return at::kDouble;
    default:
      TORCH_CHECK(false, "HCCL's data type ", static_cast<int>(type), " is not implemented");
  }
}
size_t size_of(HcclDataType type) { return at::elementSize(dtype_of(type)); }

at::Tensor reduced(const Comm& c, size_t length, HcclDataType type, HcclReduceOp op) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto dtype = dtype_of(type);
  const auto of = [&](uint32_t r) {
    return at::from_blob(c.slot(r), {static_cast<int64_t>(length / at::elementSize(dtype))},
                         at::TensorOptions().dtype(dtype));
  };
  at::Tensor out = of(0).clone();
  for (uint32_t r = 1; r < c.ranks; ++r) {
    if (op == HCCL_REDUCE_SUM)
      out = at::add(out, of(r));
    else if (op == HCCL_REDUCE_PROD)
      out = at::mul(out, of(r));
    else if (op == HCCL_REDUCE_MAX)
      out = at::maximum(out, of(r));
    else
      out = at::minimum(out, of(r));
  }
  return out;
}

char* host_address(const void* p) { return static_cast<char*>(readable(p)); }

// A collective is started at once: another rank may wait for it while this one's host waits for something else.
HcclResult start(const char* name, size_t bytes, aclrtStream stream, std::function<void()> work) {
  if (const int code = injected(name, Phase::kCall)) return static_cast<HcclResult>(code);
  count_launch(name, "", bytes);
  submit(stream_of(stream), or_injected(name, std::move(work)), true);
  return HCCL_SUCCESS;
}

Comm& of(HcclComm comm) { return *static_cast<Comm*>(comm); }

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> made{0};
  memset(info, 0, sizeof *info);
  snprintf(info->internal, 64, "/host_cann_%d_%d", getpid(), made++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  if (ranks > kMaxRanks) return static_cast<HcclResult>(fail(HCCL_E_NOT_SUPPORT, "more than 16 ranks"));
  const size_t bytes = sizeof(Shared) + ranks * kSlot + ranks * ranks * kBox;
  const int fd = shm_open(info->internal, O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, bytes) != 0) return static_cast<HcclResult>(fail(HCCL_E_INTERNAL, "no shared memory"));
  auto* shared = static_cast<Shared*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  auto* c = new Comm{rank, ranks, info->internal, shared, reinterpret_cast<char*>(shared + 1), nullptr};
  c->boxes = c->slots + ranks * kSlot;
  try {
    meet(*c);
  } catch (const std::exception& e) {
    return static_cast<HcclResult>(fail(HCCL_E_TIMEOUT, e.what()));
  }
  if (rank == 0) shm_unlink(info->internal);  // all have it
  *comm = c;
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* comm) {
  return HcclCommInitRootInfo(ranks, info, rank, comm);
}
uint32_t HcclGetCommConfigCapability() { return 0; }
HcclResult HcclCommDestroy(HcclComm) { return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) { return *error = HCCL_SUCCESS; }
HcclResult HcclGetCommName(HcclComm comm, char* name) {
  strncpy(name, of(comm).name.c_str(), COMM_NAME_MAX_LENGTH);
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) { return *ranks = of(comm).ranks, HCCL_SUCCESS; }
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) { return *rank = of(comm).rank, HCCL_SUCCESS; }
const char* HcclGetErrorString(HcclResult) { return "host CANN: a collective has failed"; }

HcclResult HcclAllReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclAllReduce", 2 * bytes, stream, [=, &c = of(comm)] {
    rounds(
        c, bytes, [&](char* slot, size_t at, size_t n) { memcpy(slot, host_address(send) + at, n); },
        [&](size_t at, size_t n) { memcpy(host_address(recv) + at, reduced(c, n, type, op).const_data_ptr(), n); });
  });
}
HcclResult HcclReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclReduce", 2 * bytes, stream, [=, &c = of(comm)] {
    rounds(
        c, bytes, [&](char* slot, size_t at, size_t n) { memcpy(slot, host_address(send) + at, n); },
        [&](size_t at, size_t n) {
          if (c.rank == root) memcpy(host_address(recv) + at, reduced(c, n, type, op).const_data_ptr(), n);
        });
  });
}
HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclBroadcast", 2 * bytes, stream, [=, &c = of(comm)] {
    rounds(
        c, bytes,
        [&](char* slot, size_t at, size_t n) {
          if (c.rank == root) memcpy(slot, host_address(buffer) + at, n);
        },
        [&](size_t at, size_t n) {
          if (c.rank != root) memcpy(host_address(buffer) + at, c.slot(root), n);
        });
  });
}
HcclResult HcclAllGather(void* send, void* recv, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclAllGather", 2 * bytes, stream, [=, &c = of(comm)] {
    rounds(
        c, bytes, [&](char* slot, size_t at, size_t n) { memcpy(slot, host_address(send) + at, n); },
        [&](size_t at, size_t n) {
          for (uint32_t r = 0; r < c.ranks; ++r) memcpy(host_address(recv) + r * bytes + at, c.slot(r), n);
        });
  });
}
HcclResult HcclReduceScatter(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclReduceScatter", 2 * bytes, stream, [=, &c = of(comm)] {
    for (uint32_t to = 0; to < c.ranks; ++to) {
      rounds(
          c, bytes, [&](char* slot, size_t at, size_t n) { memcpy(slot, host_address(send) + to * bytes + at, n); },
          [&](size_t at, size_t n) {
            if (c.rank == to) memcpy(host_address(recv) + at, reduced(c, n, type, op).const_data_ptr(), n);
          });
    }
  });
}
HcclResult HcclScatter(void* send, void* recv, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclScatter", 2 * bytes, stream, [=, &c = of(comm)] {
    for (uint32_t to = 0; to < c.ranks; ++to) {
      rounds(
          c, bytes,
          [&](char* slot, size_t at, size_t n) {
            if (c.rank == root) memcpy(slot, host_address(send) + to * bytes + at, n);
          },
          [&](size_t at, size_t n) {
            if (c.rank == to) memcpy(host_address(recv) + at, c.slot(root), n);
          });
    }
  });
}
HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType type, const void* recv, uint64_t,
                        HcclDataType, HcclComm comm, aclrtStream stream) {
  const size_t bytes = send_count * size_of(type);
  return start("HcclAlltoAll", 2 * bytes, stream, [=, &c = of(comm)] {
    for (uint32_t to = 0; to < c.ranks; ++to) {
      rounds(
          c, bytes, [&](char* slot, size_t at, size_t n) { memcpy(slot, host_address(send) + to * bytes + at, n); },
          [&](size_t at, size_t n) {
            if (c.rank != to) return;
            for (uint32_t r = 0; r < c.ranks; ++r) memcpy(host_address(recv) + r * bytes + at, c.slot(r), n);
          });
    }
  });
}
HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_at, HcclDataType type,
                         const void* recv, const void* recv_counts, const void* recv_at, HcclDataType, HcclComm comm,
                         aclrtStream stream) {
  const uint32_t ranks = of(comm).ranks;
  const auto kept = [&](const void* numbers) {
    const auto* n = static_cast<const uint64_t*>(numbers);
    return std::vector<uint64_t>(n, n + ranks);
  };
  return start(
      "HcclAlltoAllV", 0, stream,
      [=, &c = of(comm), sc = kept(send_counts), sa = kept(send_at), rc = kept(recv_counts), ra = kept(recv_at)] {
        const size_t each = size_of(type);
        for (uint32_t to = 0; to < c.ranks; ++to) {
          // The longest of all, which every rank has to know.
          uint64_t longest = 0;
          rounds(
              c, sizeof(uint64_t), [&](char* slot, size_t, size_t) { memcpy(slot, &sc[to], sizeof(uint64_t)); },
              [&](size_t, size_t) {
                for (uint32_t r = 0; r < c.ranks; ++r)
                  longest = std::max(longest, *reinterpret_cast<uint64_t*>(c.slot(r)));
              });
          const auto part = [](size_t at, size_t n, size_t bytes) { return at >= bytes ? 0 : std::min(n, bytes - at); };
          rounds(
              c, longest * each,
              [&](char* slot, size_t at, size_t n) {
                memcpy(slot, host_address(send) + sa[to] * each + at, part(at, n, sc[to] * each));
              },
              [&](size_t at, size_t n) {
                if (c.rank != to) return;
                for (uint32_t r = 0; r < c.ranks; ++r)
                  memcpy(host_address(recv) + ra[r] * each + at, c.slot(r), part(at, n, rc[r] * each));
              });
        }
      });
}
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return start("HcclBarrier", 0, stream, [&c = of(comm)] { meet(c); });
}
HcclResult HcclSend(void* send, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclSend", bytes, stream, [=, &c = of(comm)] {
    Box& box = c.shared->boxes[c.rank][to];
    for (size_t at = 0; at < bytes; at += kBox) {
      wait_until([&] { return box.read.load() == box.written.load(); });
      memcpy(c.box(c.rank, to), host_address(send) + at, std::min(kBox, bytes - at));
      ++box.written;
    }
  });
}
HcclResult HcclRecv(void* recv, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
  const size_t bytes = count * size_of(type);
  return start("HcclRecv", bytes, stream, [=, &c = of(comm)] {
    Box& box = c.shared->boxes[from][c.rank];
    for (size_t at = 0; at < bytes; at += kBox) {
      wait_until([&] { return box.written.load() > box.read.load(); });
      memcpy(host_address(recv) + at, c.box(from, c.rank), std::min(kBox, bytes - at));
      ++box.read;
    }
  });
}

// For tests, by way of ctypes.
void host_cann_set_collective_timeout(int seconds) { timeout() = seconds; }
}
