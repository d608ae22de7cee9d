// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// aclrt*: devices, contexts, memory, copies, streams, events, graphs. What torch_npu links against and is not here
// becomes a stub that fails with its own name when the libraries are built.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "injection.h"
#include "memory.h"
#include "report.h"
#include "stream.h"

using namespace host_cann;

namespace {

thread_local int this_device = -1;
std::atomic<uint64_t> used_devices{0};  // a bit for each that a thread has set

bool is_used(int device) { return used_devices >> device & 1; }

Stream* as_stream(aclrtStream s) { return stream_of(s); }
Event* as_event(aclrtEvent e) { return static_cast<Event*>(e); }

std::mutex& pinned_lock() {
  static auto* m = new std::mutex;
  return *m;
}
std::set<void*>& pinned() {
  static auto* all = new std::set<void*>;
  return *all;
}

// Which direction a copy has, or an error: a kind that does not fit the addresses is one on an NPU, too.
int check_copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, const char*& name) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy is larger than the memory it goes to");
  const bool to_device = host_cann::device_of(to) >= 0, from_device = host_cann::device_of(from) >= 0;
  static const char* names[2][2] = {{"h2h", "d2h"}, {"h2d", "d2d"}};
  static const aclrtMemcpyKind kinds[2][2] = {{ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_DEVICE_TO_HOST},
                                              {ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_DEVICE}};
  name = names[to_device][from_device];
  if (kind != ACL_MEMCPY_DEFAULT && kind != kinds[to_device][from_device]) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("a copy ") + name + " was called another kind of copy");
  }
  for (const void* end : {static_cast<const void*>(to), from}) {
    if (host_cann::device_of(end) >= 0 && !inside_one_block(end, bytes)) {
      return fail(ACL_ERROR_RT_PARAM_INVALID,
                  "a copy reaches over the end of device memory, or to memory that is free");
    }
  }
  return 0;
}

}  // namespace

int host_cann::current_device() { return this_device; }

extern "C" {

aclError aclInit(const char*) { return 0; }
aclError aclFinalize() { return 0; }
const char* aclrtGetSocName() { return chip(); }
// The version decides which operators torch_npu calls.
static const char* cann_version() {
  const char* text = getenv("HOST_CANN_VERSION");
  return text ? text : "9.1.0";
}
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  strncpy(version->version, name == ACL_PKG_NAME_DRIVER ? "25.5.0" : cann_version(), sizeof version->version - 1);
  return 0;
}
aclError aclsysGetVersionStr(char*, char* version) {
  strncpy(version, cann_version(), ACL_PKG_VERSION_MAX_SIZE);
  return 0;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = device_count();
  return 0;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "no device " + std::to_string(device));
  }
  this_device = device;
  used_devices |= uint64_t(1) << device;
  return 0;
}
aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtGetDevice(int32_t* device) {
  if (this_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = this_device;
  return 0;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (this_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(this_device) + 1);
  return 0;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  this_device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return 0;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t*, int32_t* active) {
  *active = is_used(device);
  return 0;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 20;
  return 0;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return 0;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return 0; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return 0; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return 0; }

// ---- memory ----
aclError aclrtMalloc(void** p, size_t bytes, aclrtMemMallocPolicy) {
  if (const int code = injected("aclrtMalloc", Phase::kCall)) return code;
  if (this_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *p = allocate(this_device, bytes);
  return *p ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtMallocAlign32(void** p, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(p, bytes, policy);
}
aclError aclrtFree(void* p) {
  const int device = host_cann::device_of(p);
  if (device >= 0) synchronize_device(device);
  return deallocate(p) ? 0 : fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of what aclrtMalloc has not given, or twice");
}
aclError aclrtMallocHost(void** p, size_t bytes) {
  *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
  memset(*p, 0xFF, bytes);
  std::lock_guard<std::mutex> guard(pinned_lock());
  pinned().insert(*p);
  return 0;
}
aclError aclrtFreeHost(void* p) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock());
    if (!pinned().erase(p))
      return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost of what aclrtMallocHost has not given");
  }
  deallocate_later([p] { free(p); });
  return 0;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* unused, size_t* total) {
  const int device = this_device < 0 ? 0 : this_device;
  *unused = free_bytes(device);
  *total = total_bytes(device);
  return 0;
}
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes == 0) return 0;
  const char* name;
  if (const int code = check_copy(to, room, from, bytes, kind, name)) return code;
  count_copy(name, bytes);
  memmove(readable(to), readable(from), bytes);
  return 0;
}
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  if (bytes == 0) return 0;
  const char* name;
  if (const int code = check_copy(to, room, from, bytes, kind, name)) return code;
  if (const int code = injected("aclrtMemcpyAsync", Phase::kCall)) return code;
  count_copy(name, bytes);
  submit(as_stream(stream), [=] { memmove(readable(to), readable(from), bytes); });
  return 0;
}
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}
aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
  memset(readable(to), value, bytes);
  return 0;
}
aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  count_launch("aclrtMemsetAsync", "", bytes);
  submit(as_stream(stream), [=] { memset(readable(to), value, bytes); });
  return 0;
}

// ---- streams ----
aclError aclrtCreateStream(aclrtStream* stream) {
  if (this_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *stream = make_stream(this_device);
  return 0;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream) { return 0; }
aclError aclrtDestroyStreamForce(aclrtStream) { return 0; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
  count_wait("stream");
  return synchronize(as_stream(stream), milliseconds);
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  count_wait("device");
  return this_device < 0 ? ACL_ERROR_RT_CONTEXT_NULL : synchronize_device(this_device, milliseconds);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = is_idle(as_stream(stream)) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}
aclError aclrtGetStreamId(aclrtStream stream, int32_t* id) {
  *id = as_stream(stream)->id;
  return 0;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) { return aclrtGetStreamId(stream, id); }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return 0; }
aclError aclrtLaunchCallback(aclrtCallback call, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  submit(as_stream(stream), [=] { call(data); });
  return 0;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, void (*call)(void*), void* data) {
  submit(as_stream(stream), [=] { call(data); });
  return 0;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return 0; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return 0; }

// ---- events ----
aclError aclrtCreateEvent(aclrtEvent* event) {
  *event = new Event;
  return 0;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
// Kept: torch_npu's queue of one device may still wait for an event that the other device's has destroyed.
aclError aclrtDestroyEvent(aclrtEvent) { return 0; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  record(as_event(event), as_stream(stream));
  return 0;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }
aclError aclrtSynchronizeEvent(aclrtEvent event) {
  count_wait("event");
  return synchronize_event(as_event(event));
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  wait_event(as_stream(stream), as_event(event));
  return 0;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = is_complete(as_event(event)) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
aclError aclrtEventElapsedTime(float* ms, aclrtEvent a, aclrtEvent b) {
  *ms = static_cast<float>(*as_event(b)->milliseconds - *as_event(a)->milliseconds);
  return 0;
}

// ---- graphs ----
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  Stream* s = as_stream(stream);
  if (s->capturing) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
  begin_capture(s);
  return 0;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  const Stream* s = as_stream(stream);
  *status = s->capturing ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = s->capturing;
  return 0;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph) {
  Stream* s = as_stream(stream);
  if (!s->capturing) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
  *graph = end_capture(s);
  return 0;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return 0; }
aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id) {
  *id = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(graph) >> 4);
  return 0;
}
aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
  count_launch("aclmdlRIExecuteAsync", "", 0);
  execute(static_cast<Graph*>(graph), as_stream(stream));
  return 0;
}
aclError aclmdlRIDestroy(aclmdlRI graph) {
  destroy(static_cast<Graph*>(graph));
  return 0;
}

// ---- settings: those that have a meaning here are kept ----
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return 0;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return 0; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return 0;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return 0; }
static aclrtFloatOverflowMode overflow_mode = ACL_RT_OVERFLOW_MODE_INFNAN;
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  overflow_mode = mode;
  return 0;
}
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  *mode = overflow_mode;
  return 0;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return 0; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* on) {
  *on = saturates();
  return 0;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) {
  *actual = 0;
  return 0;
}
aclError aclmdlInitDump() { return 0; }
aclError aclmdlFinalizeDump() { return 0; }

// ---- profiling: there is no profiler to listen ----
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }

// For tests, by way of ctypes.
int host_cann_is_used(int device) { return is_used(device); }

size_t aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
      return 4;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
      return 1;
    default:
      fail(ACL_ERROR_INVALID_PARAM, "the size of data type " + std::to_string(type));
      return 0;
  }
}
}
