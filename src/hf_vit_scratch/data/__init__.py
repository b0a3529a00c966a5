"""From image files to batches."""
