// The operators of `aten` on virtual GPUs give real numbers. Device memory is host memory,
// so each CUDA kernel of PyTorch is replaced by one that calls the CPU kernel on CPU tensors which
// alias the same memory. Operators without a CPU kernel stay as they are, and compute nothing.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/TensorFactories.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::IValue;

extern "C" void virtual_gpu_wait(void* stream);  // in cudart.cpp

namespace {

struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // CUDA tensor, its CPU alias
  std::vector<std::pair<Tensor, Tensor>> fresh;  // empty outputs, which may be resized
  c10::Device device{c10::kCUDA, -1};
};

Tensor alias(const Tensor& t, Call& call) {
  if (!t.defined() || !t.is_cuda() || t.layout() != c10::kStrided) return t;
  if (call.device.index() < 0) call.device = t.device();
  for (auto& [gpu, cpu] : call.pairs) if (gpu.is_same(t)) return cpu;
  auto options = t.options().device(c10::kCPU).pinned_memory(false);
  Tensor cpu;
  if (t.numel() == 0) {
    cpu = at::empty_strided(t.sizes(), t.strides(), options);
    call.fresh.emplace_back(t, cpu);
  } else {
    // from the start of the storage: as_strided may reach the whole of it
    auto* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
    cpu = at::for_blob(base, t.sizes()).strides(t.strides()).storage_offset(t.storage_offset()).options(options).make_tensor();
    if (size_t(cpu.storage().nbytes()) < t.storage().nbytes()) cpu.storage().unsafeGetStorageImpl()->set_nbytes(t.storage().nbytes());
  }
  if (t.is_conj()) cpu._set_conj(true);
  if (t.is_neg()) cpu._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  call.pairs.emplace_back(t, cpu);
  return cpu;
}

at::Generator cpu_generator(const at::Generator& g) {
  static std::map<c10::GeneratorImpl*, std::pair<uint64_t, at::Generator>> twins;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto& twin = twins[g.unsafeGetGeneratorImpl()];
  uint64_t seed = g.current_seed();
  if (!twin.second.defined() || twin.first != seed) twin = {seed, at::detail::createCPUGenerator(seed)};
  return twin.second;
}

IValue to_cpu(const IValue& v, Call& call) {
  if (v.isTensor()) return alias(v.toTensor(), call);
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(alias(t, call));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(alias(*t, call)) : t);
    return list;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) {
    call.device = v.toDevice();
    return c10::Device(c10::kCPU);
  }
  if (v.isGenerator() && v.toGenerator().device().is_cuda()) return cpu_generator(v.toGenerator());
  return v;
}

Tensor back(const Tensor& t, Call& call) {
  if (!t.defined() || !t.is_cpu()) return t;
  for (auto& [gpu, cpu] : call.pairs) if (cpu.is_same(t)) return gpu;
  Tensor gpu = at::empty_strided(t.sizes(), t.strides(), t.options().device(call.device));
  Call other;
  Tensor view = gpu.numel() ? alias(gpu, other) : Tensor();
  if (view.defined()) view.copy_(t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) gpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  return gpu;
}

IValue to_cuda(const IValue& v, Call& call) {
  if (v.isTensor()) return back(v.toTensor(), call);
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(back(t, call));
    return list;
  }
  return v;
}

// Operators that accept tensors of several devices (indices may be on the CPU)
const std::set<std::string> MIXED = {"aten::copy_", "aten::_foreach_copy_", "aten::index", "aten::index_put_",
  "aten::_index_put_impl_", "aten::index_put", "aten::_copy_from", "aten::_foreach_copy"};

void check_devices(const c10::OperatorHandle& op, c10::Stack* stack, size_t n) {
  if (MIXED.count(op.operator_name().name)) return;
  std::optional<c10::Device> device;
  auto see = [&](const Tensor& t) {
    if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return;
    if (!device) device = t.device();
    TORCH_CHECK(t.device() == *device, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", t.device(), "! (", op.operator_name(), ", checked by operators.cpp)");
  };
  for (size_t i = stack->size() - n; i < stack->size(); i++) {
    const IValue& v = (*stack)[i];
    if (v.isTensor()) see(v.toTensor());
    if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) see(t);
  }
}

void on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  size_t n = op.schema().arguments().size();
  check_devices(op, stack, n);
  Call call;
  for (size_t i = stack->size() - n; i < stack->size(); i++) (*stack)[i] = to_cpu((*stack)[i], call);
  if (call.device.index() < 0) call.device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  virtual_gpu_wait(c10::cuda::getCurrentCUDAStream(call.device.index()).stream());
  op.callBoxed(stack);
  for (auto& [gpu, cpu] : call.fresh) {
    if (cpu.numel() == 0 && cpu.sizes() == gpu.sizes()) continue;
    gpu.resize_(cpu.sizes());
    Call other;
    if (gpu.numel()) alias(gpu, other).copy_(cpu);
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) (*stack)[i] = to_cuda((*stack)[i], call);
}

const std::set<std::string> NATIVE = {  // of metadata, storage and memory: right as they are
  "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_",
  "aten::resize_", "aten::resize", "aten::empty", "aten::empty_strided", "aten::_local_scalar_dense",
  "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to", "aten::alias",
  "aten::_efficientzerotensor", "aten::_fused_sdp_choice", "aten::view_as_real", "aten::view_as_complex",
  "aten::_nested_view_from_buffer", "aten::empty_quantized", "aten::_assert_async", "aten::lift",
  "aten::_has_same_storage_numel", "aten::_resize_output_", "aten::squeeze", "aten::unsqueeze",
};

struct Quiet : c10::WarningHandler { void process(const c10::Warning&) override {} };

struct Install {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
  Install() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) || NATIVE.count(name.name)) continue;
      auto op = dispatcher.findSchema(name);
      bool copies = name.name == "aten::copy_" && name.overload_name.empty();
      if (!op || (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !copies)) continue;
      bool cpu = false;
      for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutogradNonFunctional})
        cpu |= op->hasKernelForDispatchKey(key);
      if (!cpu) continue;
      library.impl((name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
};

Install* installed = new Install;  // never ends

}  // namespace
