// Open MPI's all-reduce, timed as tests/bench/network.cpp times ours.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int order(const void* a, const void* b) { return *(const double*)a < *(const double*)b ? -1 : 1; }

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int i = 1; i < argc; i++) {
    long bytes = atol(argv[i]), calls = (4 << 20) / bytes;
    if (calls < 1) calls = 1;
    if (calls > 500) calls = 500;
    float* x = calloc(bytes, 1);
    double seconds[7];
    for (int batch = -1; batch < 7; batch++) {
      MPI_Barrier(MPI_COMM_WORLD);
      double begin = MPI_Wtime();
      for (long k = 0; k < calls; k++) MPI_Allreduce(MPI_IN_PLACE, x, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (batch >= 0) seconds[batch] = (MPI_Wtime() - begin) / calls;
    }
    qsort(seconds, 7, sizeof *seconds, order);
    if (rank == 0) printf("%ld %.9f\n", bytes, seconds[3]);
    free(x);
  }
  MPI_Finalize();
  return 0;
}
