// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Operators of the older interface, which has them by name, with tensors in order and attributes by name.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "aclnn.h"

struct aclopAttr {
  using Value = std::variant<bool, int64_t, float, std::string, std::vector<int64_t>, std::vector<float>>;
  std::map<std::string, Value> values;
};

namespace host_cann {

struct OlderOperands {
  std::vector<aclTensor> in, out;
  aclopAttr attributes;
  bool has(size_t i) const { return i < in.size() && in[i].data; }
  at::Tensor read(size_t i) const { return host_cann::read(&in.at(i)); }
  void write(size_t i, const at::Tensor& value) const { host_cann::write(&out.at(i), value); }
  // A number that is a tensor of one element.
  float number(size_t i) const { return read(i).to(at::kFloat).item<float>(); }
  template <class Value>
  Value attribute(const std::string& name, Value otherwise) const {
    const auto found = attributes.values.find(name);
    return found == attributes.values.end() ? otherwise : std::get<Value>(found->second);
  }
};
using OlderKernel = void (*)(const OlderOperands&);

OlderKernel find_older_kernel(const std::string& type);  // nullptr: there is none

}  // namespace host_cann
