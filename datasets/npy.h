// NumPy's .npy files: one array each.
#pragma once
#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// An array in host memory, row-major. u8 and f32 stay what they are; whole numbers of other widths (labels are i64 as
// NumPy makes them) become i32, and one that does not fit is refused. So are: Fortran order, big-endian numbers, other
// types, more than six axes, a file longer or shorter than its header says. Versions 1 to 3 of the format.
Tensor read_npy(ByteSource& file);

// Pictures u8, or f32 within 0 … 1 (kept as bytes), of the shape [N, H, W] or [N, H, W, C], H = W, and labels [N]
// beside them: NAME.npy and NAME_labels.npy, or x_NAME.npy and y_NAME.npy. Test pictures are read from the files that
// have "test" where these have "train"; where there are none, a tenth is held back.
[[noreturn]] void refuse_npz(const std::filesystem::path& path);  // an archive of arrays, with the line that unpacks it
Dataset npy_dataset(const std::filesystem::path& images);

// The two arrays as pictures; classes: the largest label + 1. npy_dataset refuses training labels with a gap, and test
// labels that training has not: otherwise labels from 1, or of a subset, would give classes without pictures.
Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels);

}  // namespace tandem
