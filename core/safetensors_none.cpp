// Linked where there is no JSON library.
#include "core/error.h"
#include "core/safetensors.h"

namespace tandem {
namespace {

[[noreturn]] void none(const std::filesystem::path& path) {
  refuse(path.string(), ": safetensors files need nlohmann-json, which was not there when this was built: ",
         "apt-get install nlohmann-json3-dev, then make again");
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) { none(path); }
SafetensorsFile::~SafetensorsFile() = default;
const SafetensorsFile::Entry& SafetensorsFile::at(const std::string&) const { none(path_); }
std::vector<std::byte> SafetensorsFile::bytes(const std::string&) const { none(path_); }
std::vector<double> SafetensorsFile::values(const std::string&) const { none(path_); }
Tensor SafetensorsFile::tensor(const std::string&, Backend&, DType) const { none(path_); }
void SafetensorsFile::read(const std::string&, Tensor&) const { none(path_); }
void SafetensorsWriter::add(std::string, const Tensor&) {}
void SafetensorsWriter::add(std::string, std::string, const Shape&, std::span<const std::byte>) {}
void SafetensorsWriter::write(const std::filesystem::path& path) const { none(path); }

}  // namespace tandem
