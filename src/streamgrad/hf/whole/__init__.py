"""Layers that run whole, with their ordinary graph, where there is memory for it: nothing is cut, and nothing runs again."""
