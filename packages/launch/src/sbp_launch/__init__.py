"""The Hydra apps, the trainer and the metrics of sbp."""
