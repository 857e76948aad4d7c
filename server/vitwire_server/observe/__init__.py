"""For operators: metrics (`metrics/`), logs and traces."""
