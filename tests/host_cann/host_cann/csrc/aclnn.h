// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Operators of the aclnn interface. One macro defines one of them:
//
//   OP(aclnnAdd, (In self, In other, Number alpha, Out out), out = at::add(self(), other(), alpha()));
//
// makes aclnnAddGetWorkspaceSize, which checks the arguments and plans the work, and aclnnAdd, which gives it to a
// stream.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "stream.h"

struct aclOpExecutor;

namespace host_cann {

// The caller destroys its arguments once the work has been given to the stream, which is before it is done: plans and
// work hold them, too.
struct Object {
  std::atomic<int> references{1};
  Object() = default;
  Object(const Object&) {}
  virtual ~Object() = default;
};

at::ScalarType scalar_type(aclDataType type);
const char* short_name(aclDataType type);

}  // namespace host_cann

struct aclTensor : host_cann::Object {
  std::vector<int64_t> sizes, strides, storage_sizes;
  int64_t offset = 0;
  aclFormat format = ACL_FORMAT_ND;
  aclDataType type = ACL_FLOAT;
  void* data = nullptr;
  int64_t numel() const;
};
struct aclScalar : host_cann::Object {
  at::Scalar value;
};
struct aclIntArray : host_cann::Object {
  std::vector<int64_t> values;
};
struct aclFloatArray : host_cann::Object {
  std::vector<float> values;
};
struct aclBoolArray : host_cann::Object {
  std::vector<uint8_t> values;
};
struct aclTensorList : host_cann::Object {
  std::vector<const aclTensor*> items;
};
struct aclScalarList : host_cann::Object {
  std::vector<const aclScalar*> items;
};

namespace host_cann {

at::Tensor read(const aclTensor* tensor);                  // over the same memory; undefined where there is none
void write(const aclTensor* to, const at::Tensor& value);  // of the same sizes; an undefined value leaves it as it is
// For sizes that only the values tell: they become the sizes of `to`, which aclGetViewShape returns.
void write_resized(aclTensor* to, const at::Tensor& value);

// ---- what an operator's parameters are: each is the one pointer that CANN's interface has in its place ----

struct In {
  const aclTensor* p;
  operator at::Tensor() const { return read(p); }
  at::Tensor operator()() const { return read(p); }
  std::optional<at::Tensor> maybe() const { return p ? std::optional<at::Tensor>(read(p)) : std::nullopt; }
};
struct Out {
  aclTensor* p;
  operator at::Tensor() const { return read(p); }
  at::Tensor operator()() const { return read(p); }
  const Out& operator=(const at::Tensor& value) const {
    if (p) write(p, value);
    return *this;
  }
  void write_resized(const at::Tensor& value) const { host_cann::write_resized(p, value); }
  at::ScalarType dtype() const { return scalar_type(p->type); }
};
struct Number {
  const aclScalar* p;
  at::Scalar operator()() const { return p ? p->value : at::Scalar(1); }
  std::optional<at::Scalar> maybe() const { return p ? std::optional<at::Scalar>(p->value) : std::nullopt; }
};
struct Ints {
  const aclIntArray* p;
  at::IntArrayRef operator()() const { return p ? at::IntArrayRef(p->values) : at::IntArrayRef(); }
  bool empty() const { return !p || p->values.empty(); }
  at::OptionalIntArrayRef maybe() const {
    return empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(at::IntArrayRef(p->values));
  }
};
struct Bools {
  const aclBoolArray* p;
  template <size_t n>
  std::array<bool, n> get() const {
    std::array<bool, n> out;
    for (size_t i = 0; i < n; ++i) out[i] = p->values.at(i);
    return out;
  }
};
struct InList {
  const aclTensorList* p;
  size_t size() const { return p ? p->items.size() : 0; }
  at::Tensor operator[](size_t i) const { return read(p->items.at(i)); }
  std::vector<at::Tensor> operator()() const {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < size(); ++i) all.push_back((*this)[i]);
    return all;
  }
};
struct OutList {
  const aclTensorList* p;
  size_t size() const { return p ? p->items.size() : 0; }
  at::Tensor operator[](size_t i) const { return read(p->items.at(i)); }
  void set(size_t i, const at::Tensor& value) const { write(p->items.at(i), value); }
};
struct NumberList {
  const aclScalarList* p;
  at::Scalar operator[](size_t i) const { return p->items.at(i)->value; }
};
using Type = aclDataType;
using Text = const char*;

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor, Work work);
int launch(aclOpExecutor* executor, aclrtStream stream);
at::Generator generator(int64_t seed, int64_t offset);

}  // namespace host_cann

// The parameters come in parentheses; a macro that is called with them drops these.
#define HOST_CANN_PARAMETERS(...) __VA_ARGS__
#define HOST_CANN_OP(name, parameters, work)                                                   \
  extern "C" int name##GetWorkspaceSize(HOST_CANN_PARAMETERS parameters, uint64_t* workspace_, \
                                        aclOpExecutor** executor_) {                           \
    return host_cann::plan(#name, workspace_, executor_, work);                                \
  }                                                                                            \
  extern "C" int name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {          \
    return host_cann::launch(executor, stream);                                                \
  }                                                                                            \
  static_assert(true, "a semicolon follows")
#define OP(name, parameters, ...) HOST_CANN_OP(name, parameters, ([=] { __VA_ARGS__; }))
// The same, where parameter `text` is a string: the caller's is gone when the work is done, which has a copy.
#define OP_WITH_TEXT(name, parameters, text, ...) \
  HOST_CANN_OP(name, parameters, ([=, text = std::string(text)] { __VA_ARGS__; }))
