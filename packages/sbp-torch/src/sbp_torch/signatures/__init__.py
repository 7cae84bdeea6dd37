"""Signatures and execution: calls of PyTorch's operators, verified claims, discovered signatures.

`torch_call` reads a call, `verify` runs every signature that is claimed for it (each one a `trial`
on `pieces`), `discover` finds those of an operator that nobody has described (`candidates`,
`study`, `isolate`; kept by `discovered`). `python -m sbp_torch.signatures` asks by hand.
"""
