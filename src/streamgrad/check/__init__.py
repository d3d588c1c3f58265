"""Proof on the user's own machine that gradients are exact."""
