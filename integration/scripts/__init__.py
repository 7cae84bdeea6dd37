"""Public training scripts, each in plain PyTorch or with DistributedDataParallel, and with sbp.

    mnist/
      parts.py     the model and the data, which both scripts use
      ddp.py       the usual script; plain.py if DistributedDataParallel does not fit
      ours.py      with parallelize: it prints the same losses

They follow examples of PyTorch, its tutorial on DDP, minGPT, DLRM and usual loops of fine-tuning
and diffusion, with small made-up data. `python -m scripts document` counts the lines that differ,
and writes docs/reference/scripts.md.
"""
