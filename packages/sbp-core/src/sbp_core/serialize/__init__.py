r"""Serialisation: frozen dataclasses to JSON values and back, directed by their types.

| type | JSON |
|---|---|
| `bool`, `int`, `str`, `None` | itself; integers have 64 bits |
| `float` | a number, or `{"float": "inf"}`, `{"float": "-inf"}`, `{"float": "nan"}` |
| an enum | the value of the member |
| `tuple[X, ...]`, `tuple[X, Y]` | a list |
| `Mapping[str, X]`; of other keys | an object; a list of pairs |
| a dataclass | an object with a key for each field; fields with their default are left out |
| `X | Y` | the JSON value of either; for several dataclasses `{"type": "X", ...}` |
| `Any`, `object` | any JSON value |
| a type with a `JsonForm` | the type's own JSON value |

The caller passes the type, and the annotations of its fields determine the rest. A file names
neither classes nor modules, so reading it runs only code of the expected classes. Whatever a file
contains, reading it ends with a value, or with an `SbpError` that names the place.

Sizes are checked before memory is allocated, and paths in a file may not leave its folder
(`file_within`).

In order: `lines` (the line of each part of a file), `misfit` (errors in a value, with their place),
`plain` (numbers, text, any JSON value), `typed` (all other types), `file` (bytes and paths),
`document` (whole files with format and version), `yaml_text` (values in YAML).

>>> from sbp_core.cluster import Link
>>> dump(Link(latency_s=1e-6, bytes_per_s=1e9), Link)
{'latency_s': 1e-06, 'bytes_per_s': 1000000000.0}
>>> load({"latency_s": 0, "bytes_per_s": 5}, Link)
Link(latency_s=0.0, bytes_per_s=5.0)
>>> load({"latency_s": 0, "bytes_per_s": "much"}, Link, where="desk.json")
Traceback (most recent call last):
    ...
sbp_core.errors.SbpValueError: bytes_per_s is 'much'
  in desk.json
  accepted here: a number
"""

from sbp_core.serialize.document import Document, parse
from sbp_core.serialize.file import MOST_BYTES, file_within, open_file, read_bytes, read_text
from sbp_core.serialize.lines import Keys, Lines
from sbp_core.serialize.misfit import shown
from sbp_core.serialize.typed import JsonForm, dump, load
from sbp_core.serialize.yaml_text import pyyaml, read_yaml

__all__ = [
    "MOST_BYTES",
    "Document",
    "JsonForm",
    "Keys",
    "Lines",
    "dump",
    "file_within",
    "load",
    "open_file",
    "parse",
    "pyyaml",
    "read_bytes",
    "read_text",
    "read_yaml",
    "shown",
]
