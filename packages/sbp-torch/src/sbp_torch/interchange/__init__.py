"""Convert states from and to formats of PyTorch: `DTensor`, and `state_dict()`.

`dtensor` converts placements and states to `DTensor`s and back; `torch_states` writes and reads the
`state_dict()`s of models and optimizers. For strategies as YAML, see `sbp_core.strategy_yaml`.
"""
