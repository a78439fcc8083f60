// How the attention kernels are handed the paged KV pool.
#pragma once
#include <cstdint>

extern "C" {
// One layer's part of the pool. Strides count elements; the last dimension is contiguous. dtype: 0 float32,
// 1 bfloat16, 2 float16. value_dim: width of the values that come in; wider ones lie in the pool behind zeros.
struct MoeOptKV {
  void *keys, *values;
  int64_t slot_stride, head_stride, kv_heads, dim, value_dim;
  int32_t dtype;
};
// [rows, heads, ...] with these strides.
struct MoeOptRows {
  const void* data;
  int64_t row_stride, head_stride;
};
}
