"""Weights in the formats of other programs, by the model's own names.

| format | what |
|---|---|
| `safetensors` | one file |
| `hf` | a folder of Hugging Face's libraries: `model.safetensors`, or shards and an index |
| `dcp` | a folder of `torch.distributed.checkpoint`, read without unpickling |

In order: `index` (where tensors lie), `safetensors_file`, `pickles`, `torch_file`,
`distributed_checkpoint` (what each format says, read into an index), none of which takes torch;
`indexed` (tensors of an index, whole or in parts), and `writers`.
"""
