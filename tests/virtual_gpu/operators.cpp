// PyTorch's operators on virtual GPUs compute real numbers: device memory is host memory, so each
// CUDA kernel of `aten` is replaced by one that calls the CPU kernel on CPU tensors which alias the
// same memory. Operators without a CPU kernel stay as they are, and compute nothing.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::IValue;

extern "C" void virtual_gpu_wait(void* stream);  // in runtime.cpp

namespace {

struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // CUDA tensor, its CPU alias
  std::vector<std::pair<Tensor, Tensor>> empty;  // of those, outputs that may be resized
  c10::Device device{c10::kCUDA, -1};
};

// ---------------------------------------------------------------- arguments: from CUDA to the CPU

Tensor alias(const Tensor& t, Call& call) {
  if (t.defined() && t.is_cpu()) call.pairs.emplace_back(t, t);  // stays there as an output
  if (!t.defined() || !t.is_cuda() || t.layout() != c10::kStrided) return t;
  if (call.device.index() < 0) call.device = t.device();
  for (auto& [gpu, cpu] : call.pairs)
    if (gpu.is_same(t)) return cpu;
  auto options = t.options().device(c10::kCPU).pinned_memory(false);
  Tensor cpu;
  if (t.numel() == 0) {
    cpu = at::empty_strided(t.sizes(), t.strides(), options);
    call.empty.emplace_back(t, cpu);
  } else {  // from the start of the storage, as as_strided may reach all of it
    void* start = const_cast<void*>(t.storage().data());
    cpu = at::for_blob(start, t.sizes())
              .strides(t.strides())
              .storage_offset(t.storage_offset())
              .options(options)
              .make_tensor();
    auto* storage = cpu.storage().unsafeGetStorageImpl();
    storage->set_nbytes(std::max(storage->nbytes(), t.storage().nbytes()));
  }
  if (t.is_conj()) cpu._set_conj(true);
  if (t.is_neg()) cpu._set_neg(true);
  auto* implementation = t.unsafeGetTensorImpl();
  if (implementation->is_wrapped_number()) cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  call.pairs.emplace_back(t, cpu);
  return cpu;
}

at::Generator cpu_generator(const at::Generator& g) {  // with the same seed
  static std::map<c10::GeneratorImpl*, std::pair<uint64_t, at::Generator>> twins;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto& [seed, twin] = twins[g.unsafeGetGeneratorImpl()];
  if (!twin.defined() || seed != g.current_seed()) {
    seed = g.current_seed();
    twin = at::detail::createCPUGenerator(seed);
  }
  return twin;
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
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(alias(*t, call)) : t);
    return list;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) {
    call.device = v.toDevice();
    return c10::Device(c10::kCPU);
  }
  bool generator = v.isGenerator() && v.toGenerator().device().is_cuda();
  return generator ? IValue(cpu_generator(v.toGenerator())) : v;
}

// ---------------------------------------------------------------- results: from the CPU to CUDA

void copy_memory(const Tensor& gpu, const Tensor& cpu) {
  Call call;
  if (gpu.numel()) alias(gpu, call).copy_(cpu);
}

Tensor to_cuda(const Tensor& t, Call& call) {
  if (!t.defined() || !t.is_cpu()) return t;
  for (auto& [gpu, cpu] : call.pairs)
    if (cpu.is_same(t)) return gpu;
  Tensor gpu = at::empty_strided(t.sizes(), t.strides(), t.options().device(call.device));
  copy_memory(gpu, t);
  bool number = t.unsafeGetTensorImpl()->is_wrapped_number();
  if (number) gpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  return gpu;
}

IValue to_cuda(const IValue& v, Call& call) {
  if (v.isTensor()) return to_cuda(v.toTensor(), call);
  if (!v.isTensorList()) return v;
  c10::List<Tensor> list;
  for (const Tensor& t : v.toTensorVector()) list.push_back(to_cuda(t, call));
  return list;
}

// ---------------------------------------------------------------- operators

// They accept tensors of several devices: indices may be on the CPU.
const std::set<std::string> MIXED = {
    "aten::copy_", "aten::_foreach_copy_", "aten::_foreach_copy", "aten::_copy_from", "aten::index",
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
};

void check_devices(const c10::OperatorHandle& op, const c10::Stack& arguments) {
  if (MIXED.count(op.operator_name().name)) return;
  std::optional<c10::Device> device;
  auto check = [&](const Tensor& t) {
    if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return;
    if (!device) device = t.device();
    TORCH_CHECK(t.device() == *device, "Expected all tensors to be on the same device, found ",
                *device, " and ", t.device(), " (", op.operator_name(), ")");
  };
  for (const IValue& v : arguments) {
    if (v.isTensor()) check(v.toTensor());
    if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector()) check(t);
  }
}

void on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  check_devices(op, arguments);
  Call call;
  for (const IValue& v : arguments) stack->push_back(to_cpu(v, call));
  if (call.device.index() < 0) call.device.set_index(c10::cuda::current_device());
  virtual_gpu_wait(c10::cuda::getCurrentCUDAStream(call.device.index()).stream());
  op.callBoxed(stack);
  for (auto& [gpu, cpu] : call.empty) {
    if (cpu.sizes() == gpu.sizes()) continue;
    gpu.resize_(cpu.sizes());
    copy_memory(gpu, cpu);
  }
  auto results = torch::jit::pop(*stack, op.schema().returns().size());
  for (const IValue& v : results) stack->push_back(to_cuda(v, call));
}

// It has no CPU kernel. Its operators' own tensors are on the GPU.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
    const std::optional<Tensor>& weight, std::array<bool, 2> wanted) {
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<int64_t> own, others;  // dimensions
  for (int64_t d = 0; d < input.dim(); d++)
    (d < input.dim() - int64_t(shape.size()) ? others : own).push_back(d);
  Tensor normal = input * rstd;
  Tensor scaled = weight ? grad * *weight : grad;
  Tensor by_input, by_weight;
  if (wanted[0]) by_input = rstd * (scaled - normal * (scaled * normal).mean(own, true));
  if (wanted[1]) by_weight = others.empty() ? grad * normal : (grad * normal).sum(others);
  return {by_input, by_weight};
}

// They only concern metadata, storage and allocation: right as they are.
const std::set<std::string> NATIVE = {
    "aten::_assert_async", "aten::_efficientzerotensor", "aten::_fused_sdp_choice",
    "aten::_has_same_storage_numel", "aten::_local_scalar_dense", "aten::_nested_view_from_buffer",
    "aten::_pin_memory", "aten::_reshape_alias", "aten::_resize_output_", "aten::alias",
    "aten::as_strided", "aten::empty", "aten::empty_quantized", "aten::empty_strided",
    "aten::is_pinned", "aten::is_set_to", "aten::lift", "aten::record_stream", "aten::resize",
    "aten::resize_", "aten::set_", "aten::squeeze", "aten::unfold", "aten::unsqueeze", "aten::view",
    "aten::view_as_complex", "aten::view_as_real",
};

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Install {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};

  Install() {
    Quiet quiet;  // of every kernel that is replaced
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) || NATIVE.count(name.name)) continue;
      auto op = dispatcher.findSchema(name);
      auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
      bool copies = name.name == "aten::copy_" && name.overload_name.empty();
      if (!op || !(has(c10::DispatchKey::CUDA) || copies)) continue;
      if (!has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::CompositeExplicitAutograd) &&
          !has(c10::DispatchKey::CompositeImplicitAutograd) &&
          !has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
        continue;
      std::string whole = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(whole.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
    library.impl("_fused_rms_norm_backward", rms_norm_backward);
  }
};

auto* installed = new Install;  // for as long as the process lives

}  // namespace
