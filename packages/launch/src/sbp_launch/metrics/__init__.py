"""Where the metrics of a run go: the sinks that come with sbp-launch."""
