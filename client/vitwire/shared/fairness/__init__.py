"""Fairness between callers: who goes next (`shares`), who works (`places`), and what each may hold (`budgets`)."""
