// Linked where there is no protobuf library.
#include "layers/export/onnx.h"

namespace tandem {

std::string onnx_of(Module&, Backend&, const Shape&) {
  refuse("ONNX files need protobuf, which was not there when this was built: ",
         "apt-get install libprotobuf-dev protobuf-compiler, then make again");
}
void export_onnx(Module& model, Backend& backend, const Shape& picture, const std::string&) {
  onnx_of(model, backend, picture);
}

}  // namespace tandem
