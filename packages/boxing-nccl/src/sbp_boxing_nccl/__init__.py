"""sbp boxing over MPI, and over NCCL through CuPy."""
