// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// The older interface, aclopCompileAndExecute: operators by name, with descriptions of tensors. torch_npu still takes
// it for some, and for whatever libopapi.so lacks.
#include <cstring>

#include "acl/acl_op_compiler.h"
#include "acl_op.h"
#include "injection.h"
#include "memory.h"
#include "report.h"

using namespace host_cann;

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> sizes, storage_sizes;
  aclFormat format, storage_format;
  std::string name;
  bool on_host = false;
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};

namespace {

aclTensor tensor_of(const aclTensorDesc& desc, const aclDataBuffer& buffer) {
  aclTensor t;
  t.type = desc.type;
  t.sizes = desc.sizes;
  t.format = desc.storage_format;
  t.storage_sizes = desc.storage_sizes;
  int64_t stride = 1;
  t.strides.resize(t.sizes.size());
  for (size_t d = t.sizes.size(); d-- > 0;) {
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  t.data = buffer.data;
  return t;
}

// Device memory that an operand takes has to be that of one block; a number may be in the host's memory.
bool is_there(const aclDataBuffer& buffer) {
  return host_cann::device_of(buffer.data) < 0 || inside_one_block(buffer.data, buffer.bytes);
}

aclError execute(const char* type, int inputs, const aclTensorDesc* const in_desc[], const aclDataBuffer* const in[],
                 int outputs, const aclTensorDesc* const out_desc[], aclDataBuffer* const out[], const aclopAttr* attr,
                 aclrtStream stream) {
  const std::string name = std::string("aclop ") + type;
  const OlderKernel kernel = find_older_kernel(type);
  if (!kernel) {
    not_implemented(name);
    return ACL_ERROR_OP_NOT_FOUND;
  }
  if (const int code = injected(name, Phase::kCall)) return code;
  auto operands = std::make_shared<OlderOperands>();
  std::string dtypes;
  size_t bytes = 0;
  for (int i = 0; i < inputs + outputs; ++i) {
    if (is_there(*(i < inputs ? in[i] : out[i - inputs]))) continue;
    return fail(ACL_ERROR_INVALID_PARAM,
                name + ": an operand reaches over the end of its memory, or into memory that is free");
  }
  for (int i = 0; i < inputs; ++i) {
    operands->in.push_back(tensor_of(*in_desc[i], *in[i]));
    dtypes += (i ? " " : "") + std::string(short_name(in_desc[i]->type));
    bytes += in[i]->bytes;
  }
  for (int i = 0; i < outputs; ++i) {
    operands->out.push_back(tensor_of(*out_desc[i], *out[i]));
    bytes += out[i]->bytes;
  }
  if (attr) operands->attributes = *attr;
  if (const int code = injected(name, Phase::kLaunch)) return code;
  count_launch(name, dtypes, bytes);
  // Numbers that are in the host's memory may be gone when the work is done.
  auto hosts = std::make_shared<std::vector<std::vector<char>>>();
  for (int i = 0; i < inputs; ++i) {
    if (host_cann::device_of(in[i]->data) >= 0 || in[i]->data == nullptr) continue;
    const char* data = static_cast<const char*>(in[i]->data);
    hosts->emplace_back(data, data + in[i]->bytes);
    operands->in[i].data = hosts->back().data();
  }
  Work work = [operands, hosts, kernel, name] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      kernel(*operands);
    } catch (const std::exception& error) {
      throw std::runtime_error(name + ": " + error.what());
    }
  };
  submit(stream_of(stream), or_injected(name, std::move(work)));
  return 0;
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int dims, const int64_t* sizes, aclFormat format) {
  auto* made = new aclTensorDesc;
  made->type = type;
  made->sizes.assign(sizes, sizes + dims);
  made->storage_sizes = made->sizes;
  made->format = made->storage_format = format;
  return made;
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclError aclSetTensorShape(aclTensorDesc* desc, int dims, const int64_t* sizes) {
  desc->storage_sizes.assign(sizes, sizes + dims);
  return 0;
}
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  desc->storage_format = format;
  return 0;
}
void aclSetTensorDescName(aclTensorDesc* desc, const char* name) { desc->name = name; }
aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType type) {
  desc->on_host = type == ACL_MEMTYPE_HOST || type == ACL_MEMTYPE_HOST_COMPILE_INDEPENDENT;
  return 0;
}
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->sizes.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t i, int64_t* size) {
  *size = desc->sizes.at(i);
  return 0;
}
aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) { return delete buffer, 0; }

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr* a, const char* n, uint8_t v) { return a->values[n] = bool(v), 0; }
aclError aclopSetAttrInt(aclopAttr* a, const char* n, int64_t v) { return a->values[n] = v, 0; }
aclError aclopSetAttrFloat(aclopAttr* a, const char* n, float v) { return a->values[n] = v, 0; }
aclError aclopSetAttrString(aclopAttr* a, const char* n, const char* v) { return a->values[n] = std::string(v), 0; }
aclError aclopSetAttrDataType(aclopAttr* a, const char* n, aclDataType v) { return a->values[n] = int64_t(v), 0; }
aclError aclopSetAttrListInt(aclopAttr* a, const char* n, int count, const int64_t* v) {
  return a->values[n] = std::vector<int64_t>(v, v + count), 0;
}
aclError aclopSetAttrListFloat(aclopAttr* a, const char* n, int count, const float* v) {
  return a->values[n] = std::vector<float>(v, v + count), 0;
}
aclError aclopSetAttrListBool(aclopAttr* a, const char* n, int count, const uint8_t* v) {
  return a->values[n] = std::vector<int64_t>(v, v + count), 0;
}
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return fail(ACL_ERROR_API_NOT_SUPPORT, "aclopSetAttrListListInt is not implemented");
}
aclError aclopCompileAndExecute(const char* type, int inputs, const aclTensorDesc* const in_desc[],
                                const aclDataBuffer* const in[], int outputs, const aclTensorDesc* const out_desc[],
                                aclDataBuffer* const out[], const aclopAttr* attr, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream stream) {
  return execute(type, inputs, in_desc, in, outputs, out_desc, out, attr, stream);
}
aclError aclopCompileAndExecuteV2(const char* type, int inputs, aclTensorDesc* in_desc[], aclDataBuffer* in[],
                                  int outputs, aclTensorDesc* out_desc[], aclDataBuffer* out[], aclopAttr* attr,
                                  aclopEngineType, aclopCompileType, const char*, aclrtStream stream) {
  return execute(type, inputs, in_desc, in, outputs, out_desc, out, attr, stream);
}

// Compiler options: nothing is compiled, so none is kept.
aclError aclSetCompileopt(aclCompileOpt, const char*) { return 0; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 32; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t room) {
  strncpy(value, "disable", room);
  return 0;
}
}
