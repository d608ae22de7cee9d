// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What is known of each operator, and the counters.
#include <ATen/core/function_schema.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <deque>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "host_call.h"

namespace npu_simulator {
namespace {

struct Counters {
  std::atomic<int64_t> launches{0}, bytes{0}, h2d{0}, d2h{0}, syncs{0};
};
Counters counters;

struct InfoTable {
  std::mutex mutex;
  std::map<std::string, int64_t> named;
  std::deque<OpInfo> infos;  // addresses stay
  std::unordered_map<const c10::FunctionSchema*, OpInfo*> current;
};
InfoTable& info_table() {
  static auto* table = new InfoTable;
  return *table;
}

// Operators that accept CPU tensors of any size next to tensors of a device, on real devices as well.
bool takes_host_tensors(std::string_view name) {
  constexpr std::array kNames = {"_pack_padded_sequence", "index.Tensor",     "index_put_",     "index_put",
                                 "_index_put_impl_",      "index.Tensor_out", "_foreach_copy_", "_ctc_loss.Tensor",
                                 "copy_sparse_to_sparse_"};
  for (std::string_view known : kNames) {
    if (name == known) return true;
  }
  return false;
}

bool has_type(const c10::Argument& argument, c10::TypeKind kind) {
  const c10::TypePtr& type = argument.type();
  if (type->kind() == kind) return true;
  for (const c10::TypePtr& inner : type->containedTypes()) {
    if (inner->kind() == kind) return true;
  }
  return false;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) : op_name(op.operator_name()) {
  const c10::FunctionSchema& schema = op.schema();
  name = c10::toString(op_name);
  if (name.rfind("aten::", 0) == 0) name = name.substr(6);
  bool writes = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    writes |= written.back();
    if (has_type(argument, c10::TypeKind::GeneratorType)) generator_arg = static_cast<int>(i);
    const bool is_index = argument.name() == "index" || argument.name() == "target";
    if (is_index && has_type(argument, c10::TypeKind::TensorType) && !written.back()) index_arg = static_cast<int>(i);
  }
  const std::string base = name.substr(0, name.find('.'));
  if (base == "convolution") bias_arg = 2, like_arg = 0;
  if (base == "addmm" || base == "baddbmm") bias_arg = 0, like_arg = 1;
  bool returns_new = false;
  bool returns_tensor = false;
  for (const c10::Argument& argument : schema.returns()) {
    const bool tensor = has_type(argument, c10::TypeKind::TensorType);
    returns_tensor |= tensor;
    returns_new |= tensor && argument.alias_info() == nullptr;
  }
  draws_unasked = generator_arg < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  const bool reads_value = op.hasTag(at::Tag::data_dependent_output);
  syncs = reads_value || op.hasTag(at::Tag::dynamic_output_shape);
  syncs_for_masks = name.rfind("index", 0) == 0;
  launches = writes || returns_new || (!returns_tensor && reads_value);
  takes_host_tensors = npu_simulator::takes_host_tensors(name);
  one_launch_per_tensor = name.rfind("_amp_foreach_", 0) == 0;
}

OpInfo& op_info(const c10::OperatorHandle& op) {
  const c10::FunctionSchema* key = &op.schema();
  thread_local std::unordered_map<const c10::FunctionSchema*, OpInfo*> known;
  auto found = known.find(key);
  if (found != known.end() && found->second->is_of(op)) return *found->second;
  InfoTable& table = info_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  OpInfo*& info = table.current[key];
  if (info == nullptr || !info->is_of(op)) info = &table.infos.emplace_back(op);
  known[key] = info;
  return *info;
}

void count_sync() { counters.syncs.fetch_add(1, std::memory_order_relaxed); }
void count_bytes(int64_t nbytes) { counters.bytes.fetch_add(nbytes, std::memory_order_relaxed); }
void count_host_to_device(int64_t nbytes, bool blocking) {
  counters.h2d.fetch_add(1, std::memory_order_relaxed);
  count_bytes(nbytes);
  if (blocking) count_sync();
}
void count_device_to_host(int64_t nbytes, bool blocking) {
  counters.d2h.fetch_add(1, std::memory_order_relaxed);
  count_bytes(nbytes);
  if (blocking) count_sync();
}
void count_launch(const char* name, c10::Device device, int64_t launches) {
  std::atomic<int64_t>& left = settings().fail_after;
  if (left.load(std::memory_order_relaxed) >= 0 && left.fetch_sub(launches) < launches) {
    left = -1;  // once
    TORCH_CHECK(false, "NPU function error: ", name, " failed on ", device,
                ", error code is 507015 (simulated: npu_simulator.fail_after)");
  }
  counters.launches.fetch_add(launches, std::memory_order_relaxed);
}

void count_named_launch(const std::string& name, c10::Device device) {
  count_launch(name.c_str(), device);
  std::lock_guard<std::mutex> lock(info_table().mutex);
  ++info_table().named[name];
}

Totals totals() {
  Totals result{counters.launches, counters.bytes, counters.h2d, counters.d2h, counters.syncs, {}};
  InfoTable& table = info_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  result.by_op = table.named;
  for (const OpInfo& info : table.infos) {
    const int64_t launched = info.launched;
    if (launched > 0) result.by_op[info.name] += launched;
  }
  return result;
}

}  // namespace npu_simulator
