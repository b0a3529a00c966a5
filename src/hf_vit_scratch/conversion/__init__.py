"""Weights from and to other libraries, and how equal the results are."""
