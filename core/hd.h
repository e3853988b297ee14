// TANDEM_HD marks functions that are compiled for both the host and the device.
#pragma once
#if defined(__CUDACC__)
#define TANDEM_HD __host__ __device__
#define TANDEM_TRAINS_F16 1
#else
#define TANDEM_HD
#endif
