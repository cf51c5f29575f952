"""Null space of a network's Hessian: known null directions, their complement, and an approximate inverse on it."""
