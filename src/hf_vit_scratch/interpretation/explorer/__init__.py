"""The web page of `vit-scratch explore`."""
