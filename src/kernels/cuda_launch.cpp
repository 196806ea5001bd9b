#include "kernels/cuda_launch.h"

#ifdef HEADRACE_HAS_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace headrace {

#ifdef HEADRACE_HAS_CUDA
bool fits_bf16_kernels(const at::Tensor& x) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.is_contiguous() && x.dim() > 0 && x.size(-1) % 8 == 0 &&
         x.numel() > 0 && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}
void* current_stream(const at::Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }
#else
bool fits_bf16_kernels(const at::Tensor&) { return false; }
void* current_stream(const at::Tensor&) { return nullptr; }
#endif

}  // namespace headrace
