// Replaces onnx.cpp and tensorboard.cpp in a build without a protobuf library.
#include "layers/export/onnx.h"
#include "layers/export/tensorboard.h"

namespace tandem {
namespace {

[[noreturn]] void refuse_files(const std::string& kind) {
  refuse(kind, " files need protobuf, which was not there when this was built: ",
         "apt-get install libprotobuf-dev protobuf-compiler, then make again");
}

}  // namespace

std::string onnx_of(Module&, Backend&, const Shape&) { refuse_files("ONNX"); }
void export_onnx(Module&, Backend&, const Shape&, const std::string&) { refuse_files("ONNX"); }

EventFile::EventFile(const std::string& folder) { refuse_files(folder + ": TensorBoard"); }
void EventFile::scalars(std::int64_t, const std::vector<std::pair<std::string, double>>&) {}
void EventFile::histogram(std::int64_t, const std::string&, const Tensor&) {}

}  // namespace tandem
