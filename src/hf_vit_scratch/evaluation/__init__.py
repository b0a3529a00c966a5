"""Metrics, figures, model cards and predictions."""
