"""For operators: metrics (`metrics/`), logs, traces and the status page."""
