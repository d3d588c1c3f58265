"""Updates of parameters within the backward pass: `optimizer_in_backward`, and where it is refused."""
