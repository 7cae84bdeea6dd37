"""Operators of ours, registered with PyTorch, and what executes an operator of a name.

`operators` finds what a name means. Registered are constants, random numbers that are drawn by
counting (`random`, `philox`), fused updates of one parameter, products in a wider dtype, and sums
for batch normalisation.
"""
