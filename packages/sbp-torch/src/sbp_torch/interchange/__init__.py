"""In and out: what other programs read and write, and people too.

`strategy_yaml` writes strategies as YAML that a person can read, compare and edit (no torch);
`dtensor` knows PyTorch's distributed tensors; `torch_states` the `state_dict()`s of models and
optimizers. Graphs and plans as JSON are `graph.serialize` and `compile.physical`.
"""
