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

// torch_npu finds an operator by its name alone: an argument of another kind than the operator's parameter is an error.
template <class Kind>
struct Argument {
  const Object* p;
  const Kind* get() const {
    const auto* found = dynamic_cast<const Kind*>(p);
    TORCH_CHECK(found || !p, "an argument is of another kind than the parameter");
    return found;
  }
};
struct In : Argument<aclTensor> {
  operator at::Tensor() const { return read(get()); }
  at::Tensor operator()() const { return read(get()); }
  std::optional<at::Tensor> maybe() const { return p ? std::optional<at::Tensor>(read(get())) : std::nullopt; }
};
struct Out : Argument<aclTensor> {
  operator at::Tensor() const { return read(get()); }
  at::Tensor operator()() const { return read(get()); }
  const Out& operator=(const at::Tensor& value) const {
    if (p) write(get(), value);
    return *this;
  }
  void write_resized(const at::Tensor& value) const { host_cann::write_resized(const_cast<aclTensor*>(get()), value); }
  at::ScalarType dtype() const { return scalar_type(get()->type); }
};
struct Number : Argument<aclScalar> {
  at::Scalar operator()() const { return p ? get()->value : at::Scalar(1); }
  std::optional<at::Scalar> maybe() const { return p ? std::optional<at::Scalar>(get()->value) : std::nullopt; }
};
struct Ints : Argument<aclIntArray> {
  at::IntArrayRef operator()() const { return p ? at::IntArrayRef(get()->values) : at::IntArrayRef(); }
  bool empty() const { return (*this)().empty(); }
  at::OptionalIntArrayRef maybe() const {
    return empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef((*this)());
  }
};
struct Bools : Argument<aclBoolArray> {
  template <size_t n>
  std::array<bool, n> get() const {
    const auto& values = Argument::get()->values;
    std::array<bool, n> out;
    for (size_t i = 0; i < n; ++i) out[i] = values.at(i);
    return out;
  }
};
struct InList : Argument<aclTensorList> {
  size_t size() const { return p ? get()->items.size() : 0; }
  at::Tensor operator[](size_t i) const { return read(get()->items.at(i)); }
  std::vector<at::Tensor> operator()() const {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < size(); ++i) all.push_back((*this)[i]);
    return all;
  }
};
struct OutList : Argument<aclTensorList> {
  size_t size() const { return p ? get()->items.size() : 0; }
  at::Tensor operator[](size_t i) const { return read(get()->items.at(i)); }
  void set(size_t i, const at::Tensor& value) const { write(get()->items.at(i), value); }
};
struct NumberList : Argument<aclScalarList> {
  at::Scalar operator[](size_t i) const { return get()->items.at(i)->value; }
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
