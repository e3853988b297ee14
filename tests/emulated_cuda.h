// Runs CUDA kernels on the host, so that they can be tested where there is no GPU: a .cu file of ours, included behind
// this header, becomes plain C++ in the namespace tandem::emulated, and its start() runs each block's threads as
// coroutines that change over at barriers and shuffles. Only one runs at a time, in an order that the test chooses:
// results that depend on it are races. A barrier that not every thread reaches, and a shuffle in a warp that is not
// whole, fail.
//
// What it does not show: bank conflicts, memory order between blocks, and anything about speed.
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <cudnn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/backend.h"
#include "core/random.h"

// The linker's names of where all __shared__ variables lie. They are weak: a file may have none.
extern char shared_begin[] __asm__("__start_emulated_shared") __attribute__((weak));
extern char shared_end[] __asm__("__stop_emulated_shared") __attribute__((weak));

namespace tandem::emulated {

enum class Order { forward, backward, random };
inline Order order = Order::forward;

// ---- one block ------------------------------------------------------------------------------------------------------
class Block {
 public:
  Block(dim3 threads, std::function<void()> kernel) : kernel_(std::move(kernel)) {
    for (unsigned z = 0; z < threads.z; z++)
      for (unsigned y = 0; y < threads.y; y++)
        for (unsigned x = 0; x < threads.x; x++) threads_.push_back({.index = {x, y, z}});
    if (stacks_.size() < threads_.size() * stack) stacks_.resize(threads_.size() * stack);
  }

  void run() {
    Block* before = std::exchange(now_, this);
    // NaN: what this block has not written shows
    std::memset(shared_begin, 0xff, std::size_t(shared_end - shared_begin));
    for (std::size_t t = 0; t < threads_.size(); t++) prepare(threads_[t].context, stacks_.data() + t * stack);
    std::vector<std::size_t> turn(threads_.size());
    for (std::size_t t = 0; t < turn.size(); t++) turn[t] = t;
    if (order == Order::backward) std::reverse(turn.begin(), turn.end());
    for (bool any = true; any;) {
      any = false;
      if (order == Order::random)
        for (std::size_t t = turn.size(); t > 1; t--)
          std::swap(turn[t - 1], turn[Philox(1, Stream::test).word(draws_++) % t]);
      for (std::size_t t : turn)
        if (threads_[t].state == State::ready) {
          any = true;
          current_ = t;
          enter(threads_[t]);
        }
      any |= release();
    }
    now_ = before;
    for (const Thread& t : threads_)
      if (t.state != State::done) throw std::logic_error("a barrier or shuffle is not reached by all its threads");
  }

  static Block& here() { return *now_; }
  const uint3& thread() const { return threads_[current_].index; }
  void barrier() { wait(State::barrier); }
  // The value that the lane `from(lane)` of this warp brought to the same shuffle.
  template <class V>
  V exchange(V value, const std::function<unsigned(unsigned)>& from) {
    static_assert(sizeof(V) <= 8);
    const std::size_t me = current_, warp = me / 32 * 32;
    const int turn = threads_[me].shuffles++ % 2;  // a lane may be one shuffle ahead of another
    std::memcpy(&threads_[me].value[turn], &value, sizeof value);
    wait(State::shuffle);
    const unsigned other = from(unsigned(me - warp));
    if (other < 32) std::memcpy(&value, &threads_[warp + other].value[turn], sizeof value);
    return value;
  }

 private:
  static constexpr std::size_t stack = 64 << 10;
  enum class State { ready, barrier, shuffle, done };
  struct Thread {
    uint3 index;
    ucontext_t context{};  // to begin with
    jmp_buf place = {};    // to go on at: changing over by jumps costs no system call
    bool begun = false;
    State state = State::ready;
    int shuffles = 0;
    std::uint64_t value[2] = {};
  };

  static inline Block* now_ = nullptr;
  static inline std::vector<char> stacks_;
  static inline std::uint32_t draws_ = 0;
  void prepare(ucontext_t& context, char* memory) {
    getcontext(&context);
    context.uc_stack.ss_sp = memory;
    context.uc_stack.ss_size = stack;
    makecontext(&context, &Block::body, 0);
  }
  static void body() {
    here().kernel_();
    here().threads_[here().current_].state = State::done;
    _longjmp(here().scheduler_, 1);
  }
  __attribute__((noinline)) void enter(Thread& t) {
    if (_setjmp(scheduler_)) return;
    if (t.begun) _longjmp(t.place, 1);
    t.begun = true;
    setcontext(&t.context);
  }
  void wait(State what) {
    Thread& t = threads_[current_];
    t.state = what;
    if (!_setjmp(t.place)) _longjmp(scheduler_, 1);
  }
  // Lets go on who waits for nobody any more: a whole warp at a shuffle, all that are left at a barrier.
  bool release() {
    bool released = false;
    for (std::size_t warp = 0; warp < threads_.size(); warp += 32) {
      const std::size_t end = std::min(warp + 32, threads_.size());
      bool whole = end == warp + 32;
      for (std::size_t t = warp; t < end; t++) whole &= threads_[t].state == State::shuffle;
      for (std::size_t t = warp; whole && t < end; t++) threads_[t].state = State::ready, released = true;
    }
    if (released) return true;
    for (const Thread& t : threads_)
      if (t.state == State::shuffle) return false;
    for (Thread& t : threads_)
      if (t.state == State::barrier) t.state = State::ready, released = true;
    return released;
  }

  std::function<void()> kernel_;
  std::vector<Thread> threads_;
  jmp_buf scheduler_;
  std::size_t current_ = 0;
};

inline dim3 grid_now, block_now;
inline uint3 block_index_now;

inline void syncthreads() { Block::here().barrier(); }
template <class V>
V shfl_down(V value, int by) {
  return Block::here().exchange(value, [by](unsigned lane) { return lane + unsigned(by); });
}
template <class V>
V shfl_xor(V value, int mask) {
  return Block::here().exchange(value, [mask](unsigned lane) { return lane ^ unsigned(mask); });
}
inline bool any(bool mine) {
  for (int by = 16; by > 0; by /= 2) mine |= shfl_xor(mine, by);
  return mine;
}

inline std::string text_of(cudaError_t) { return "emulated"; }

// ---- memory ---------------------------------------------------------------------------------------------------------
// Memory that ends where a page begins that nobody may touch: reading or writing behind it ends the program. Aligned to
// 16 bytes, as the kernels' widest accesses need; `shift` elements further, to try them where they may not be used.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count, std::size_t shift = 0) : count_(count) {
    const std::size_t page = 4096, bytes = ((count + shift) * sizeof(T) + 15) / 16 * 16,
                      pages = (bytes + page - 1) / page;
    size_ = (pages + 1) * page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(base_) + pages * page, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(static_cast<char*>(base_) + pages * page - bytes) + shift;
    std::memset(static_cast<void*>(data_), 0xff, count * sizeof(T));  // NaN: what was never written shows
  }
  Buffer(const std::vector<double>& values, std::size_t shift = 0) : Buffer(values.size(), shift) {
    for (std::size_t i = 0; i < count_; i++) data_[i] = T(Accumulator<T>(values[i]));
  }
  ~Buffer() { munmap(base_, size_); }
  Buffer(const Buffer&) = delete;
  T* data() { return data_; }
  std::vector<double> values() const {
    std::vector<double> v;
    for (std::size_t i = 0; i < count_; i++) v.push_back(double(Accumulator<T>(data_[i])));
    return v;
  }
  std::size_t size() const { return count_; }

 private:
  void* base_;
  T* data_;
  std::size_t count_, size_;
};

}  // namespace tandem::emulated

namespace tandem {
// In place of cuda/launch.h's. Blocks run one after the other: what they share is global memory, which no kernel of
// ours reads where another block of the same kernel writes.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t, Arguments... arguments) {
  emulated::grid_now = blocks;
  emulated::block_now = threads;
  std::vector<uint3> all;
  for (unsigned y = 0; y < blocks.y; y++)
    for (unsigned x = 0; x < blocks.x; x++) all.push_back({x, y, 0});
  if (emulated::order == emulated::Order::backward) std::reverse(all.begin(), all.end());
  for (const uint3& b : all) {
    emulated::block_index_now = b;
    emulated::Block(threads, [&] { kernel(arguments...); }).run();
  }
}
template <class... Parameters>
int resident_blocks(void (*)(Parameters...), int) {
  return 4;
}
}  // namespace tandem

// The kernels' functors are in unnamed namespaces, and so is all that is made of them here.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"

// ---- the language ---------------------------------------------------------------------------------------------------
#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __launch_bounds__
#define __shared__ static __attribute__((section("emulated_shared")))
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define threadIdx ::tandem::emulated::Block::here().thread()
#define blockIdx ::tandem::emulated::block_index_now
#define blockDim ::tandem::emulated::block_now
#define gridDim ::tandem::emulated::grid_now
#define __syncthreads ::tandem::emulated::syncthreads
#define __shfl_down_sync(mask, value, by) ::tandem::emulated::shfl_down(value, by)
#define __shfl_xor_sync(mask, value, by) ::tandem::emulated::shfl_xor(value, by)
#define __any_sync(mask, value) ::tandem::emulated::any(value)
#define rsqrtf(x) (1 / std::sqrt(x))
#define cuda emulated  // the namespace: these are not the library's functions
