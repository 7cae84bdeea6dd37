"""The model zoo and data sets of sbp."""
