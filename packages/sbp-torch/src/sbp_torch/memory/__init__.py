"""The exact memory of a plan, and what a session really holds.

`layout` says how results lie, which makes the prediction exact; `meter` counts tensors while a
session runs.
"""

__all__ = []
