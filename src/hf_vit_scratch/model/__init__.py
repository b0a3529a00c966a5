"""The model: configuration, forward pass, and the same mathematics in NumPy."""
