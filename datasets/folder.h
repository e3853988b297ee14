// A folder of picture files, one folder per class: DIR/cat/1.jpg, DIR/dog/1.png, …
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Classes are the names of the folders, sorted; pictures are what is below them (is_picture), other files are left alone.
// DIR has the class folders itself, and then a tenth of the pictures is held back for testing, or DIR/train has them and
// DIR/val or DIR/test the same ones. All is decoded at once, by all cores, into bytes in memory: as grey pictures when
// all are grey, else as RGB. Throws when they would not fit, and for a picture that cannot be decoded, with its path.
Dataset picture_folder(const std::filesystem::path& directory, const FolderOptions& options = {});

}  // namespace tandem
