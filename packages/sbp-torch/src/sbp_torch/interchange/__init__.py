"""What PyTorch's own programs read and write: distributed tensors, and states by their names.

`dtensor` converts placements and states to `DTensor`s and back; `torch_states` writes and reads the
`state_dict()`s of models and optimizers. Strategies as YAML are `sbp_core.strategy_yaml`.
"""
