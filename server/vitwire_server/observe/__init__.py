"""What an operator sees: metrics (`metrics/`), logs, traces and the status page."""
