"""A watch as a callback of the libraries that run the loop: one module each, imported by its name."""
