"""Callbacks that run a watch in training libraries: one module for each library, imported by its name."""
