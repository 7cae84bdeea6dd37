"""The metric sinks of sbp-launch (plugins of kind `logger`), which store the metrics of a run."""
