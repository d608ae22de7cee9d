// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "aclnn.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <numeric>

#include "formats.h"
#include "injection.h"
#include "memory.h"
#include "report.h"

struct aclOpExecutor {
  std::string name;
  host_cann::Work work;
  std::string dtypes;
  size_t bytes = 0;
  int device = -1;  // of its tensors; -1: it has none
};

namespace host_cann {
namespace {

constexpr int kInvalid = 161002;  // ACLNN_ERR_PARAM_INVALID

void release(const Object* object) {
  if (object && --const_cast<Object*>(object)->references == 0) delete object;
}

// Objects that this thread has made since it last planned an operator: that operator's arguments.
thread_local std::vector<Object*> arguments;

template <class Made>
Made* make_argument() {
  auto* made = new Made;
  ++made->references;
  arguments.push_back(made);
  return made;
}

template <class Array>
Array* make_array(const auto* values, uint64_t count) {
  auto* made = make_argument<Array>();
  made->values.assign(values, values + count);
  return made;
}

template <class List>
List* make_list(const auto* items, uint64_t count) {
  auto* made = make_argument<List>();
  made->items.assign(items, items + count);
  return made;
}

int release_list(const auto* list) {
  if (list) {
    for (const Object* item : list->items) release(item);
  }
  release(list);
  return 0;
}

struct Arguments {
  std::vector<Object*> objects;
  Arguments() { objects.swap(arguments); }
  Arguments(const Arguments&) = delete;
  ~Arguments() {
    for (const Object* object : objects) release(object);
  }
  std::vector<const aclTensor*> tensors() const {
    std::vector<const aclTensor*> found;
    // torch_npu makes an operator's arguments last one first.
    for (auto object = objects.rbegin(); object != objects.rend(); ++object) {
      if (const auto* tensor = dynamic_cast<const aclTensor*>(*object)) found.push_back(tensor);
    }
    return found;
  }
};

// The bytes from the address of `t`, which is not empty, to the end of its last element.
size_t extent(const aclTensor& t) {
  int64_t last = t.offset;
  if (is_tiled(t.format)) {
    last += std::accumulate(t.storage_sizes.begin(), t.storage_sizes.end(), int64_t(1), std::multiplies<>()) - 1;
  } else {
    for (size_t d = 0; d < t.sizes.size(); ++d) last += (t.sizes[d] - 1) * t.strides[d];
  }
  return (last + 1) * aclDataTypeSize(t.type);
}

// Why a tensor cannot be an operand of operator `name`; empty: it can.
std::string objection(const std::string& name, const aclTensor& t, int device) {
  const char* dtype = short_name(t.type);
  if (!takes_dtype(name, dtype)) return std::string("CANN's documentation has no data type ") + dtype + " for it";
  if (t.numel() == 0) return "";
  const int its_device = host_cann::device_of(t.data);
  if (its_device < 0) return "a tensor is in the host's memory";
  if (device >= 0 && its_device != device) return "tensors are on two devices";
  if (!inside_one_block(t.data, extent(t))) {
    return "a tensor reaches over the end of its memory, or into memory that is free";
  }
  return "";
}

// An exception with the operator's name in it, since the stream that it reaches knows none.
[[noreturn]] void rethrow_with(const std::string& name) {
  try {
    throw;
  } catch (const c10::Error& error) {
    throw std::runtime_error(name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(name + ": " + error.what());
  }
}

}  // namespace

at::ScalarType scalar_type(aclDataType type) {
  switch (static_cast<int>(type)) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT8:
      return at::kByte;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    default:
      TORCH_CHECK(false, "data type ", static_cast<int>(type), " is not implemented");
  }
}

const char* short_name(aclDataType type) {
  switch (static_cast<int>(type)) {
    case ACL_FLOAT:
      return "f32";
    case ACL_FLOAT16:
      return "f16";
    case ACL_BF16:
      return "bf16";
    case ACL_DOUBLE:
      return "f64";
    case ACL_INT8:
      return "i8";
    case ACL_INT16:
      return "i16";
    case ACL_INT32:
      return "i32";
    case ACL_INT64:
      return "i64";
    case ACL_UINT8:
      return "u8";
    case ACL_BOOL:
      return "bool";
    case ACL_COMPLEX64:
      return "c64";
    case ACL_COMPLEX128:
      return "c128";
    default:
      return "other";
  }
}

at::Tensor read(const aclTensor* t) {
  if (!t) return {};
  const auto options = at::TensorOptions().dtype(scalar_type(t->type));
  char* data = static_cast<char*>(readable(t->data));
  if (is_tiled(t->format)) return from_tiles(data, *t);
  return at::from_blob(data + t->offset * static_cast<int64_t>(options.dtype().itemsize()), t->sizes, t->strides,
                       options);
}

void write(const aclTensor* to, const at::Tensor& value) {
  if (!value.defined()) return;  // a gradient that was not asked for
  TORCH_CHECK(value.sizes() == to->sizes, "the result has sizes ", value.sizes(), ", the output ",
              at::IntArrayRef(to->sizes));
  const at::Tensor result = saturated(value.to(scalar_type(to->type)));
  if (is_tiled(to->format)) {
    to_tiles(readable(to->data), *to, result);
  } else {
    read(to).copy_(result);
  }
}

void write_resized(aclTensor* to, const at::Tensor& value) {
  TORCH_CHECK(value.numel() <= to->numel(), "the result has more elements than there is room for");
  to->sizes = value.sizes().vec();
  to->strides = value.contiguous().strides().vec();
  write(to, value);
}

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor, Work work) {
  const auto held = std::make_shared<Arguments>();
  *workspace = 0;
  if (const int code = injected(name, Phase::kCall)) return code;
  auto made = std::make_unique<aclOpExecutor>();
  made->name = name;
  for (const aclTensor* t : held->tensors()) {
    const std::string why_not = objection(made->name, *t, made->device);
    if (!why_not.empty()) return fail(kInvalid, made->name + ": " + why_not);
    constexpr size_t kLongestDtypes = 60;  // lists of tensors are long
    if (made->dtypes.size() < kLongestDtypes) {
      made->dtypes += (made->dtypes.empty() ? "" : " ") + std::string(short_name(t->type));
    }
    made->bytes += t->numel() * aclDataTypeSize(t->type);
    if (t->numel()) made->device = host_cann::device_of(t->data);
  }
  made->work = [work = std::move(work), held, name] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      work();
    } catch (...) {
      rethrow_with(name);
    }
  };
  *executor = made.release();
  return 0;
}

int launch(aclOpExecutor* executor, aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> owned(executor);
  if (const int code = injected(executor->name, Phase::kLaunch)) return code;
  Stream* on = stream_of(stream);
  if (executor->device >= 0 && on->device != executor->device) {
    return fail(kInvalid, executor->name + ": its tensors are on another device than its stream");
  }
  count_launch(executor->name, executor->dtypes, executor->bytes);
  submit(on, or_injected(executor->name, std::move(executor->work)));
  return 0;
}

at::Generator generator(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull +
                                        static_cast<uint64_t>(offset));
}

}  // namespace host_cann

using namespace host_cann;

int64_t aclTensor::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
}

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat format, const int64_t* storage_sizes, uint64_t storage_dims,
                           void* data) {
  auto* made = make_argument<aclTensor>();
  made->sizes.assign(sizes, sizes + dims);
  made->strides.assign(strides, strides + dims);
  made->storage_sizes.assign(storage_sizes, storage_sizes + storage_dims);
  made->offset = offset;
  made->format = format;
  made->type = type;
  made->data = data;
  return made;
}
aclScalar* aclCreateScalar(void* value, aclDataType type) {
  auto* made = make_argument<aclScalar>();
  made->value = at::from_blob(value, {}, at::TensorOptions().dtype(scalar_type(type))).item();
  return made;
}
aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t n) { return make_array<aclIntArray>(values, n); }
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t n) { return make_array<aclFloatArray>(values, n); }
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t n) { return make_array<aclBoolArray>(values, n); }
aclTensorList* aclCreateTensorList(const aclTensor* const* items, uint64_t n) {
  return make_list<aclTensorList>(items, n);
}
aclScalarList* aclCreateScalarList(const aclScalar* const* items, uint64_t n) {
  return make_list<aclScalarList>(items, n);
}
int aclDestroyTensor(const aclTensor* tensor) { return release(tensor), 0; }
int aclDestroyScalar(const aclScalar* scalar) { return release(scalar), 0; }
int aclDestroyIntArray(const aclIntArray* array) { return release(array), 0; }
int aclDestroyFloatArray(const aclFloatArray* array) { return release(array), 0; }
int aclDestroyBoolArray(const aclBoolArray* array) { return release(array), 0; }
int aclDestroyTensorList(const aclTensorList* list) { return release_list(list); }
int aclDestroyScalarList(const aclScalarList* list) { return release_list(list); }
int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
  *dims = tensor->sizes.size();
  *sizes = new int64_t[tensor->sizes.size()];  // the caller deletes it
  std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
  return 0;
}
int aclDestroyAclOpExecutor(aclOpExecutor* executor) { return delete executor, 0; }
}
