// The state of a computation in a file, and back. A class lists its fields once, for both directions:
//
//   void archive(Archive& a) { a(steps_, weights_, workers_); }
//
//   16 bytes that say what it is | the fields as they are in memory | u64 checksum
//
// Only the program that wrote a file can read it: the file does not say which fields it has. The first ones are
// therefore to name the program, for the reader to compare. What crosses versions and machines is a safetensors file.
#pragma once
#include <array>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/checksum.h"
#include "core/files/atomic_file.h"
#include "core/tensor.h"

namespace tandem {

class Archive {
 public:
  enum class Mode { write, read };
  // read: looks at every byte first. Throws UsageError that names a file that is none of these, cut off or damaged.
  Archive(const std::string& path, Backend& backend, Mode mode);
  bool reads() const { return !out_; }

  // Numbers, structs of numbers without pointers, strings, containers that can be resized, pairs, Tensors in the host's
  // memory, and what has archive(). Tensors that shared their memory share it again; one that is there already in the
  // same shape keeps its own.
  template <class... T>
  void operator()(T&... fields) {
    (field(fields), ...);
  }
  void finish();  // the file is complete, or read to its end. Throws Error, when written where the disk is full

 private:
  template <class T>
  void field(T& x) {
    if constexpr (requires { x.archive(*this); }) {
      x.archive(*this);
    } else if constexpr (std::is_same_v<T, Tensor>) {
      tensor(x);
    } else if constexpr (std::is_trivially_copyable_v<T>) {
      static_assert(!std::is_pointer_v<T>);
      bytes(&x, sizeof x);
    } else if constexpr (requires { x.first, x.second; }) {
      field(x.first), field(x.second);
    } else {
      std::size_t size = x.size();
      bytes(&size, sizeof size);
      x.resize(size);
      for (auto& each : x) field(each);
    }
  }
  void tensor(Tensor& t);
  void bytes(void* at, std::size_t count);
  void open();       // and looks at every byte
  void next_part();  // writes part_, or reads the next one

  std::string path_;
  Backend& backend_;
  std::optional<AtomicFile> out_;
  std::ifstream in_;
  std::uint64_t left_ = 0;  // bytes that are to be read after this part
  std::vector<char> part_;
  std::size_t at_ = 0;                         // in it
  Checksum checksum_;                          // of the parts before
  std::vector<Tensor> tensors_;                // all that have memory, in their order
  std::map<const void*, std::size_t> places_;  // of their memory
};

}  // namespace tandem
