"""Mistakes that people make: what each is answered with, how fast, and whether it helps them.

`python -m mistakes` types all of them and prints every answer; the tests do the same and judge it.
"""
