// What reads bytes or text from outside, one function per format, for the mutations of test_fuzz.cpp and for libFuzzer
// (libfuzzer.cpp). Each may refuse its input (UsageError) or take it; anything else that it throws is a bug, and so is
// a crash, a report of a sanitizer, or more than seconds of work.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem::test {

int fuzz_idx(const std::uint8_t* data, std::size_t size);
int fuzz_cifar(const std::uint8_t* data, std::size_t size);
int fuzz_npy(const std::uint8_t* data, std::size_t size);
int fuzz_gzip(const std::uint8_t* data, std::size_t size);
int fuzz_image(const std::uint8_t* data, std::size_t size);
int fuzz_safetensors(const std::uint8_t* data, std::size_t size);
int fuzz_options(const std::uint8_t* data, std::size_t size);  // words, one a line
int fuzz_schedule(const std::uint8_t* data, std::size_t size);

using Bytes = std::vector<std::uint8_t>;

struct FuzzTarget {
  std::string name;
  int (*run)(const std::uint8_t*, std::size_t);
  std::vector<Bytes> seeds;  // small valid inputs
};
const std::vector<FuzzTarget>& fuzz_targets();

std::uint32_t crc32(std::span<const std::uint8_t> bytes);  // of gzip and PNG
// Small files in each format of pictures; the JPEG and the grey PNM have one channel.
Bytes small_jpeg(), cmyk_jpeg(), small_png(), small_bmp(), small_pnm(bool grey);
// An .npy file of the given version of the format.
Bytes npy(const std::string& type, const std::string& shape, const Bytes& numel, int version = 1,
          const char* fortran = "False");

}  // namespace tandem::test
