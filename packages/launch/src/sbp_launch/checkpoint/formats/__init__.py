"""Readers and writers of weights in the formats of other libraries, by the model's own names.

| format | files |
|---|---|
| `safetensors` | one file |
| `hf` | a folder of Hugging Face's libraries: `model.safetensors`, or shards and an index |
| `dcp` | a folder of `torch.distributed.checkpoint`, read without unpickling |

In order: `index` (file and offset of every tensor); the readers of headers into an index, without
torch: `safetensors_file`, `pickles`, `torch_file`, `distributed_checkpoint`; `indexed` (tensors of
an index, whole or in slices); and `writers`.
"""
