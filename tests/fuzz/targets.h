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

using Bytes = std::vector<std::uint8_t>;

struct FuzzTarget {
  std::string name;
  void (*run)(std::span<const std::uint8_t>);
  std::vector<Bytes> seeds;  // small valid inputs
};
const std::vector<FuzzTarget>& fuzz_targets();

std::uint32_t crc32(std::span<const std::uint8_t> bytes);  // of gzip and PNG
// Small files in each format of pictures; the JPEG and the grey PNM have one channel.
Bytes small_jpeg(), cmyk_jpeg(), small_png(), small_bmp(), small_pnm(bool grey);
// An IDX file: its magic number, the sizes of its axes, what it holds.
Bytes idx(std::uint32_t magic, std::vector<std::uint32_t> sizes, const Bytes& elements);
// An .npy file of the given version of the format.
Bytes npy(const std::string& type, const std::string& shape, const Bytes& numel, int version = 1,
          const char* fortran = "False");

}  // namespace tandem::test
