// Working memory of the kernels.
#pragma once
#include <cstdint>
#include <memory>

namespace moe_opt {

// Memory that stays with its thread from call to call: fresh pages cost more than what is written to them.
class Scratch {
 public:
  template <typename T>
  T* of(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > size_) {
      size_ = 0;
      memory_.reset(new char[bytes]);
      size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

}  // namespace moe_opt
