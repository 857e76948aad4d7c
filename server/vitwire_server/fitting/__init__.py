"""Fitting of budgets to traces, and the command `vitwire-server budgets`."""
