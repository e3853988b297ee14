// TANDEM_HD marks what both the host and the device compiler may use.
#pragma once
#if defined(__CUDACC__)
#define TANDEM_HD __host__ __device__
#define TANDEM_TRAINS_F16 1
#else
#define TANDEM_HD
#endif
