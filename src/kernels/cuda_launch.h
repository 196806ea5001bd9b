// For the tensor side of the kernels: when a tensor can go to a CUDA kernel, and the stream it goes to.
#pragma once

#include <ATen/core/Tensor.h>

namespace headrace {

/// True for a contiguous bfloat16 CUDA tensor whose last dimension is a multiple of 8 (16-byte packs), in a build with CUDA
/// code.
bool fits_bf16_kernels(const at::Tensor& x);

/// torch's current stream (a cudaStream_t) of x's device.
void* current_stream(const at::Tensor& x);

}  // namespace headrace
