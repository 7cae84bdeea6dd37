"""Mistakes that users make: the error message for each, its time, and whether it is helpful.

`python -m mistakes` makes all of them and prints every answer; the tests also judge the answers.
"""
