// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The fallback: npu tensors on the stack become CPU tensors over the same memory, the CPU kernel runs, and what it
// returns becomes npu tensors again. No byte is copied.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "host_call.h"

namespace npu_simulator {
namespace {

class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key)
      : op_(op), info_(op_info(op)), stack_(stack), key_(key) {}

  void run(HostKernel kernel) {
    arguments_to_host();
    check_devices();
    count();
    to_dtypes_of_host();
    call(kernel);
    written_to_npu();
    returns_to_npu();
    for (const at::Tensor& host : to_scan_) saturate(host, device_.index());
  }

 private:
  struct Seen {
    at::Tensor npu, host;
    bool written;
  };
  struct SeenStorage {
    c10::intrusive_ptr<c10::StorageImpl> npu, host;
    const void* data;
    size_t nbytes;
  };

  // ---- to the host ----

  void arguments_to_host() {
    const size_t count = op_.schema().arguments().size();
    const size_t begin = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack_)[begin + i];
      const bool written = info_.written[i];
      if (value.isTensor()) {
        if (value.toTensor().defined()) value = argument_to_host(value.toTensor(), written);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        list.reserve(value.toListRef().size());
        for (const c10::IValue& item : value.toListRef()) list.push_back(argument_to_host(item.toTensor(), written));
        value = std::move(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const c10::IValue& item : value.toListRef()) {
          list.push_back(item.isNone() ? std::nullopt : std::optional(argument_to_host(item.toTensor(), written)));
        }
        value = std::move(list);
      } else if (value.isDevice()) {
        if (value.toDevice().type() == kNpu) note_device(value.toDevice());
        value = c10::Device(c10::DeviceType::CPU);
      } else if (value.isGenerator()) {
        value = host_generator(value.toGenerator());
      }
    }
    if (!device_.has_index()) device_ = c10::Device(kNpu, current_device());
    if (info_.generator_arg >= 0 && (*stack_)[begin + info_.generator_arg].isNone()) {
      (*stack_)[begin + info_.generator_arg] = default_host_generator(device_.index());
    }
  }

  void note_device(c10::Device device) {
    if (!device_.has_index() && device.has_index()) device_ = device;
  }

  at::Tensor argument_to_host(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kNpu) {
      if (written || tensor.dim() > 0) foreign_ = tensor;
      foreign_written_ |= written;
      return tensor;
    }
    note_device(tensor.device());
    if (tensor.device() != device_) foreign_ = tensor;
    for (Seen& seen : tensors_) {
      if (seen.npu.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) {
        seen.written |= written;
        return seen.host;
      }
    }
    at::Tensor host = to_host(tensor);
    // Some kernels keep what their backward needs only if there will be one.
    if (c10::GradMode::is_enabled() && tensor.requires_grad()) host.set_requires_grad(true);
    nbytes_ += static_cast<int64_t>(tensor.layout() == c10::kStrided ? tensor.numel() * tensor.element_size() : 0);
    // A mask among the indices; the first tensor is what is indexed.
    has_mask_ |= !tensors_.empty() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    tensors_.push_back({tensor, host, written});
    return host;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (tensor.layout() == c10::kSparse) return sparse_to(tensor, c10::DispatchKey::SparseCPU, &HostCall::part_to_host);
    if (at::SparseCsrTensorImpl* csr = as_csr(tensor)) {
      return csr_to(tensor, csr, c10::DispatchKey::SparseCsrCPU, &HostCall::part_to_host);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(), "npu_simulator: ", op_.operator_name(),
                                " got an npu tensor without memory (", tensor.toString(),
                                "), which cannot be simulated");
    c10::StorageImpl* npu = tensor.storage().unsafeGetStorageImpl();
    for (const SeenStorage& seen : storages_) {
      if (seen.npu.get() == npu) return host_alias(tensor, seen.host);
    }
    auto host = host_storage(npu);
    storages_.push_back({c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(npu), host, host->data(), npu->nbytes()});
    return host_alias(tensor, std::move(host));
  }
  at::Tensor part_to_host(const at::Tensor& part) { return part.device().type() == kNpu ? to_host(part) : part; }
  at::Tensor part_to_npu(const at::Tensor& part) { return part.is_cpu() ? to_npu(part) : part; }

  using Part = at::Tensor (HostCall::*)(const at::Tensor&);

  static at::SparseTensorImpl* as_sparse(const at::Tensor& tensor) {
    return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  }
  static at::SparseCsrTensorImpl* as_csr(const at::Tensor& tensor) {
    return at::sparse_csr::is_sparse_compressed(tensor)
               ? static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl())
               : nullptr;
  }

  at::Tensor sparse_to(const at::Tensor& tensor, c10::DispatchKey key, Part part) {
    const at::SparseTensorImpl* from = as_sparse(tensor);
    auto impl = c10::make_intrusive<at::SparseTensorImpl>(c10::DispatchKeySet(key), tensor.dtype());
    impl->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
    impl->set_indices_and_values_unsafe((this->*part)(from->indices()), (this->*part)(from->values()));
    impl->set_nnz_and_narrow(from->nnz());
    impl->set_coalesced(from->coalesced());
    return at::Tensor(std::move(impl));
  }

  at::Tensor csr_to(const at::Tensor& tensor, at::SparseCsrTensorImpl* from, c10::DispatchKey key, Part part) {
    const c10::Device device = key == c10::DispatchKey::SparseCsrCPU ? c10::Device(c10::DeviceType::CPU) : device_;
    auto impl =
        c10::make_intrusive<at::SparseCsrTensorImpl>(c10::DispatchKeySet(key), device, from->layout(), tensor.dtype());
    impl->set_member_tensors((this->*part)(from->compressed_indices()), (this->*part)(from->plain_indices()),
                             (this->*part)(from->values()), from->sizes());
    return at::Tensor(std::move(impl));
  }

  void check_devices() {
    if (!foreign_.defined() || tensors_.empty()) return;
    const bool host = foreign_.is_cpu();
    if (host && info_.takes_host_tensors && !foreign_written_) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device_,
                " and ", foreign_.device(), "! (", op_.operator_name(), ")");
  }

  // ---- the call ----

  void count() {
    if (info_.syncs && (!info_.syncs_for_masks || has_mask_)) count_sync();
    if (!info_.launches) return;
    const bool split = info_.one_launch_per_tensor && !settings().fused_foreach;
    const int64_t launches = split ? std::max<int64_t>(1, static_cast<int64_t>(tensors_.size()) - 2) : 1;
    count_launch(info_.name.c_str(), device_, launches);
    info_.launched.fetch_add(launches, std::memory_order_relaxed);
  }

  // Kernels of an NPU take more dtypes than the CPU's.
  void to_dtypes_of_host() {
    const auto argument = [this](int index) -> c10::IValue& {
      return (*stack_)[stack_->size() - op_.schema().arguments().size() + index];
    };
    const auto is = [](const c10::IValue& value, std::initializer_list<at::ScalarType> dtypes) {
      if (!value.isTensor() || !value.toTensor().defined()) return false;
      return std::find(dtypes.begin(), dtypes.end(), value.toTensor().scalar_type()) != dtypes.end();
    };
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (info_.index_arg >= 0 && is(argument(info_.index_arg), {at::kInt})) {
      argument(info_.index_arg) = argument(info_.index_arg).toTensor().to(at::kLong);
    }
    if (info_.bias_arg >= 0 && is(argument(info_.bias_arg), {at::kFloat}) &&
        is(argument(info_.like_arg), {at::kHalf, at::kBFloat16})) {
      argument(info_.bias_arg) =
          argument(info_.bias_arg).toTensor().to(argument(info_.like_arg).toTensor().scalar_type());
    }
  }

  void call(HostKernel kernel) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
    std::optional<BorrowedCpuGenerator> borrowed;
    if (info_.draws_unasked) borrowed.emplace(device_.index());
    if (kernel != nullptr) {
      kernel(op_, stack_);
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(key_), "npu_simulator: ", op_.operator_name(),
        " has no CPU kernel, and the simulated npu has no other; run this operator on a CPU copy"
        " of its arguments");
    op_.redispatchBoxed(c10::DispatchKeySet(key_), stack_);
  }

  // Kernels that draw random numbers without being passed a generator take the CPU's default one, which for the time of
  // the call is given the state of the device's.
  class BorrowedCpuGenerator {
   public:
    explicit BorrowedCpuGenerator(c10::DeviceIndex index)
        : cpu_(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
          npu_generator_(default_host_generator(index)),
          npu_(at::check_generator<at::CPUGeneratorImpl>(npu_generator_)) {
      saved_.take(cpu_);
      State state;
      state.take(npu_);
      state.give(cpu_);
    }
    ~BorrowedCpuGenerator() {
      State state;
      state.take(cpu_);
      state.give(npu_);
      saved_.give(cpu_);
    }

   private:
    struct State {
      at::mt19937 engine;
      std::optional<float> normal;
      std::optional<double> double_normal;
      void take(at::CPUGeneratorImpl* from) {
        engine = from->engine();
        normal = from->next_float_normal_sample();
        double_normal = from->next_double_normal_sample();
      }
      void give(at::CPUGeneratorImpl* to) const {
        to->set_engine(engine);
        to->set_next_float_normal_sample(normal);
        to->set_next_double_normal_sample(double_normal);
      }
    };
    at::CPUGeneratorImpl* cpu_;
    at::Generator npu_generator_;
    at::CPUGeneratorImpl* npu_;
    State saved_;
  };

  // ---- back to the device ----

  void written_to_npu() {
    for (const SeenStorage& seen : storages_) {
      if (seen.host->data() == seen.data && seen.host->nbytes() == seen.nbytes) continue;
      // The kernel resized it: the device takes the new memory over.
      const size_t nbytes = seen.host->nbytes();
      c10::DataPtr data = seen.host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
      seen.npu->set_data_ptr(adopt(std::move(data), static_cast<int64_t>(nbytes), device_.index()));
      seen.npu->set_nbytes(nbytes);
    }
    for (const Seen& seen : tensors_) {
      if (seen.written) {
        metadata_to_npu(seen);
        if (saturates(seen.host.scalar_type()) && seen.npu.layout() == c10::kStrided) scan(seen.npu);
      }
    }
  }

  void metadata_to_npu(const Seen& seen) {
    c10::TensorImpl* npu = seen.npu.unsafeGetTensorImpl();
    if (seen.npu.layout() == c10::kSparse) {
      const at::SparseTensorImpl* from = as_sparse(seen.host);
      at::SparseTensorImpl* to = as_sparse(seen.npu);
      to->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
      to->set_indices_and_values_unsafe(to_npu(from->indices()), to_npu(from->values()));
      to->set_nnz_and_narrow(from->nnz());
      to->set_coalesced(from->coalesced());
      return;
    }
    if (at::SparseCsrTensorImpl* from = as_csr(seen.host)) {
      as_csr(seen.npu)->set_member_tensors(to_npu(from->compressed_indices()), to_npu(from->plain_indices()),
                                           to_npu(from->values()), from->sizes());
      return;
    }
    c10::Storage storage = storage_of(seen.host);
    if (!storage.is_alias_of(seen.npu.storage())) npu->set_storage_keep_dtype(std::move(storage));
    if (npu->sizes() != seen.host.sizes() || npu->strides() != seen.host.strides() ||
        npu->storage_offset() != seen.host.storage_offset()) {
      npu->set_sizes_and_strides(seen.host.sizes(), seen.host.strides(), seen.host.storage_offset());
    }
  }

  c10::Storage storage_of(const at::Tensor& host) {
    c10::StorageImpl* impl = host.storage().unsafeGetStorageImpl();
    for (const SeenStorage& seen : storages_) {
      if (seen.host.get() == impl) return c10::Storage(seen.npu);
    }
    c10::Storage storage = adopt(host.storage(), device_.index());
    storages_.push_back({c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()),
                         c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl), impl->data(), impl->nbytes()});
    fresh_ = true;
    return storage;
  }

  at::Tensor to_npu(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (const Seen& seen : tensors_) {
      if (seen.host.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) return seen.npu;
    }
    if (host.layout() == c10::kSparse)
      return sparse_to(host, c10::DispatchKey::SparsePrivateUse1, &HostCall::part_to_npu);
    if (at::SparseCsrTensorImpl* csr = as_csr(host)) {
      return csr_to(host, csr, c10::DispatchKey::SparseCsrPrivateUse1, &HostCall::part_to_npu);
    }
    if (host._is_zerotensor()) {  // has no memory
      auto impl = c10::make_intrusive<c10::TensorImpl>(
          c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}), host.dtype(), device_);
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      return at::Tensor(std::move(impl));
    }
    TORCH_CHECK_NOT_IMPLEMENTED(host.has_storage(), "npu_simulator: ", op_.operator_name(), " returned ",
                                host.toString(), ", which has no memory that the simulated npu could take over");
    fresh_ = false;
    at::Tensor npu = npu_tensor(storage_of(host), host);
    if (fresh_) {
      nbytes_ += static_cast<int64_t>(host.numel() * host.element_size());
      if (saturates(host.scalar_type())) scan(npu);
    }
    return npu;
  }

  void scan(const at::Tensor& npu) { to_scan_.push_back(host_alias(npu)); }

  void returns_to_npu() {
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = to_npu(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const c10::IValue& item : value.toListRef()) list.push_back(to_npu(item.toTensor()));
        value = std::move(list);
      }
    }
    if (info_.launches) count_bytes(nbytes_);
  }

  const c10::OperatorHandle& op_;
  OpInfo& info_;
  torch::jit::Stack* stack_;
  const c10::DispatchKey key_;
  c10::Device device_{kNpu, -1};
  c10::SmallVector<Seen, 8> tensors_;
  c10::SmallVector<SeenStorage, 8> storages_;
  std::vector<at::Tensor> to_scan_;
  at::Tensor foreign_;
  bool foreign_written_ = false;
  bool has_mask_ = false;
  bool fresh_ = false;
  int64_t nbytes_ = 0;
};

template <c10::DispatchKey key>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack, key, nullptr);
}

// Fused foreach kernels, for as long as the object lives.
std::unique_ptr<torch::Library> foreach_library;
std::mutex foreach_mutex;

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey host_key,
                 HostKernel kernel) {
  HostCall(op, stack, host_key).run(kernel);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack, c10::DispatchKey::CPU, nullptr);
}

void set_fused_foreach(bool on) {
  std::lock_guard<std::mutex> lock(foreach_mutex);
  settings().fused_foreach = on;
  if (on == (foreach_library != nullptr)) return;
  if (!on) {
    foreach_library.reset();
    return;
  }
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  foreach_library = std::move(library);
}

namespace {

bool has_composite(const c10::OperatorHandle& op) {
  for (auto key : {c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                   c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeImplicitAutograd}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

// torch prefers a composite, where it has one, to a backend's fallback. Where the CPU has a kernel of its own beside
// the composite, the device has it too: same values, one launch.
template <c10::DispatchKey host_key>
void register_rivals_of_composites(torch::Library* library, c10::DispatchKey key) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key)) continue;
    if (!op->hasKernelForDispatchKey(host_key) || !has_composite(*op)) continue;
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed<host_key>>());
  }
}

template <c10::DispatchKey host_key>
void register_key(c10::DispatchKey key) {
  // Never destroyed: tensors may be used while the process ends.
  auto* rest = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  rest->fallback(torch::CppFunction::makeFromBoxedFunction<&boxed<host_key>>());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  register_rivals_of_composites<host_key>(aten, key);
}

}  // namespace

void register_fallback() {
  register_key<c10::DispatchKey::CPU>(c10::DispatchKey::PrivateUse1);
  register_key<c10::DispatchKey::SparseCPU>(c10::DispatchKey::SparsePrivateUse1);
  register_key<c10::DispatchKey::SparseCsrCPU>(c10::DispatchKey::SparseCsrPrivateUse1);
}

}  // namespace npu_simulator
