// NumPy's .npy files: one array each.
#pragma once
#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// Reads an array into host memory, row-major. u8 and f32 are kept; integers of other widths (NumPy makes i64 labels)
// become i32. Throws for an integer that does not fit, Fortran order, big-endian numbers, other types, more than six
// axes, and a file longer or shorter than its header states. Supports versions 1 to 3 of the format.
Tensor read_npy(ByteSource& file);
// The classes that an array of whole numbers [N] names, as i32 [N]. Throws for a negative or very large number; `where`
// begins the message.
Tensor classes_in(const Tensor& numbers, const std::string& where);

// Reads pictures u8, or f32 within 0 … 1 (stored as bytes), of the shape [N, H, W] or [N, H, W, C], H = W, and labels
// [N] in the same folder: NAME.npy and NAME_labels.npy, or x_NAME.npy and y_NAME.npy. Test pictures are read from the
// files with "test" instead of "train" in their names; without such files, a tenth is held back. Training labels with a
// gap are refused, and so are test labels that the training labels lack: otherwise labels that start at 1, or are of a
// subset, would give classes without pictures.
Dataset npy_dataset(const std::filesystem::path& images);

// The two arrays as pictures; the number of classes is the largest label + 1.
Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels);

}  // namespace tandem
