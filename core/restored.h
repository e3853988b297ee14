// A variable that has another value until the end of a scope.
#pragma once
#include <type_traits>
#include <utility>

namespace tandem {

template <class T>
class Restored {
 public:
  Restored(T& variable, std::type_identity_t<T> value)
      : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ~Restored() { variable_ = std::move(before_); }
  Restored(const Restored&) = delete;

 private:
  T& variable_;
  T before_;
};

}  // namespace tandem
