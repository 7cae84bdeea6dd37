"""Start the processes of a run, and connect them.

`launchers` are the plugins; `launching` chooses one, starts the ranks, and waits for all of them;
`rank` is the program of one rank in its own process, with its log. Ranks that torchrun, mpiexec or
srun started get the run from rank 0 through `rendezvous`; `slurm_job` submits a job. The rank that
a launcher gave to this process is read by `sbp_launch.world`.
"""
