"""Public training scripts, each in plain PyTorch or with DistributedDataParallel, and with sbp.

    mnist/
      parts.py     the model and the data, which both use
      ddp.py       as one trains it today; plain.py where DistributedDataParallel does not fit
      ours.py      with parallelize: it prints the same losses

They are written after examples of PyTorch, its tutorial on DDP, minGPT, DLRM and usual loops of
fine-tuning and diffusion, with small data that are made up. `python -m scripts document` counts
the lines that differ, and writes docs/reference/scripts.md.
"""
