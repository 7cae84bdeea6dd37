"""Weights in the formats of other programs.

| format | what |
|---|---|
| `safetensors` | one file, by the model's own names |
| `hf` | a folder of Hugging Face's libraries: `model.safetensors`, or shards and an index |

`index` says where tensors lie, without torch; `indexed` reads them, whole or in parts. A module a
format reads what it says into an index; `safetensors_writer` writes.
"""
