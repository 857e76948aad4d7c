"""Fitting of budgets to traces and to the loads of a running server, and the command `vitwire-server budgets`."""
