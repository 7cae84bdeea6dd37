"""Who starts the processes of a run, and how they meet.

`launchers` are the plugins; `launching` says which one a run means, starts the ranks, and sees that
all end; `rank` is one of them in a process of its own, with the file that it writes. Ranks that
torchrun, mpiexec or srun started learn of their run through `rendezvous`; `slurm_job` submits one.
What a launcher told this process is `sbp_launch.world`.
"""
