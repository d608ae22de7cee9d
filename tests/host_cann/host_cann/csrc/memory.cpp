// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Each device's memory is one file without a name that is mapped twice. The addresses that callers get are of the first
// mapping, which allows no access: a host that follows a device pointer crashes, as on a machine with an NPU. Operators
// and copies go through the second.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace host_cann {
namespace {

constexpr size_t kAlignment = 512;
constexpr unsigned char kPoison = 0xFF;  // NaN in all floating formats, -1 in integers

struct Arena {
  char* device = nullptr;
  char* host = nullptr;
  size_t size = 0, used = 0, limit = 0;
  std::map<size_t, size_t> blocks, gaps;  // offset to bytes
};

// What is static here is never destroyed: streams have threads, and they may still run while the process ends.
std::mutex& arenas_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

size_t number_from_environment(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

Arena map_twice(size_t size) {
  Arena arena;
  const int file = memfd_create("host_cann", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) abort();
  const auto map = [&](int protection) {
    void* address = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) abort();
    return static_cast<char*>(address);
  };
  arena.device = map(PROT_NONE);
  arena.host = map(PROT_READ | PROT_WRITE);
  close(file);
  arena.size = arena.limit = size;
  arena.gaps[0] = size;
  return arena;
}

std::vector<Arena>& arenas() {
  static auto* all = [] {
    auto* made = new std::vector<Arena>;
    const size_t bytes = number_from_environment("HOST_CANN_MEMORY", size_t(4) << 30) / kAlignment * kAlignment;
    const size_t devices = number_from_environment("HOST_CANN_DEVICES", 2);
    for (size_t i = 0; i < devices; ++i) made->push_back(map_twice(bytes));
    return made;
  }();
  return *all;
}

size_t aligned(size_t bytes) {
  // An empty block has an address of its own.
  return bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int device_count() { return static_cast<int>(arenas().size()); }

int device_of(const void* address) {
  const auto& all = arenas();
  for (size_t i = 0; i < all.size(); ++i) {
    const char* byte = static_cast<const char*>(address);
    if (byte >= all[i].device && byte < all[i].device + all[i].size) return static_cast<int>(i);
  }
  return -1;
}

void* readable(const void* address) {
  const int device = device_of(address);
  if (device < 0) return const_cast<void*>(address);
  const Arena& arena = arenas()[device];
  return arena.host + (static_cast<const char*>(address) - arena.device);
}

void* allocate(int device, size_t bytes) {
  const size_t need = aligned(bytes);
  std::lock_guard<std::mutex> guard(arenas_lock());
  Arena& arena = arenas()[device];
  if (arena.used + need > arena.limit) return nullptr;
  for (auto gap = arena.gaps.begin(); gap != arena.gaps.end(); ++gap) {
    if (gap->second < need) continue;
    const size_t offset = gap->first, left = gap->second - need;
    arena.gaps.erase(gap);
    if (left) arena.gaps[offset + need] = left;
    arena.blocks[offset] = need;
    arena.used += need;
    memset(arena.host + offset, kPoison, need);
    return arena.device + offset;
  }
  return nullptr;
}

bool deallocate(void* address) {
  const int device = device_of(address);
  if (device < 0) return false;
  std::lock_guard<std::mutex> guard(arenas_lock());
  Arena& arena = arenas()[device];
  size_t offset = static_cast<char*>(address) - arena.device;
  const auto block = arena.blocks.find(offset);
  if (block == arena.blocks.end()) return false;
  size_t bytes = block->second;
  arena.blocks.erase(block);
  arena.used -= bytes;
  madvise(arena.host + offset, bytes, MADV_REMOVE);  // gives the pages back to the system
  // One gap with its neighbours, or memory would fall to pieces.
  auto next = arena.gaps.lower_bound(offset);
  if (next != arena.gaps.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      arena.gaps.erase(before);
    }
  }
  if (next != arena.gaps.end() && offset + bytes == next->first) {
    bytes += next->second;
    arena.gaps.erase(next);
  }
  arena.gaps[offset] = bytes;
  return true;
}

bool inside_one_block(const void* address, size_t bytes) {
  const int device = device_of(address);
  if (device < 0) return false;
  std::lock_guard<std::mutex> guard(arenas_lock());
  const Arena& arena = arenas()[device];
  const size_t offset = static_cast<const char*>(address) - arena.device;
  auto block = arena.blocks.upper_bound(offset);
  if (block == arena.blocks.begin()) return false;
  --block;
  return offset + bytes <= block->first + block->second;
}

size_t total_bytes(int device) {
  std::lock_guard<std::mutex> guard(arenas_lock());
  return arenas()[device].limit;
}

size_t free_bytes(int device) {
  std::lock_guard<std::mutex> guard(arenas_lock());
  const Arena& arena = arenas()[device];
  return arena.used < arena.limit ? arena.limit - arena.used : 0;
}

void limit_memory(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(arenas_lock());
  Arena& arena = arenas()[device];
  arena.limit = bytes < arena.size ? bytes : arena.size;
}

}  // namespace host_cann

extern "C" {
size_t host_cann_total_bytes(int device) { return host_cann::total_bytes(device); }
size_t host_cann_free_bytes(int device) { return host_cann::free_bytes(device); }
void host_cann_limit_memory(int device, size_t bytes) { host_cann::limit_memory(device, bytes); }
}
