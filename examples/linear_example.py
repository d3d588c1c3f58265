"""StreamBP in two matrix products: the same gradients from a fraction of the intermediate values.

    Y = X W1,   Z = Y W2,   L = sum(Z)

The gradients are sums over the rows of X:  dW1 = sum_i X_i^T dY_i  and  dW2 = sum_i Y_i^T dZ_i. So nobody needs all of Y at
once: take a block of rows, compute its Y_i and dY_i, add its share to both sums, drop it, go on to the next block.
A decoder layer is streamed in the same way (docs/how-it-works.md); there, chunks of tokens also meet in attention.

Run it:  python examples/linear_example.py
"""

import torch

from streamgrad.memory.live_bytes import LiveBytes

ROWS, WIDTH = 4096, 64


@torch.no_grad()
def streamed_gradients(x, w1, w2, partitions):
    """Return dW1 and dW2 of L = sum(X W1 W2), from one of `partitions` blocks of rows at a time."""
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
    for x_i in x.tensor_split(partitions):
        y_i = x_i @ w1
        dz_i = (y_i @ w2).fill_(1.0)  # L sums Z, so dZ is 1 everywhere
        dw1.addmm_(x_i.mT, dz_i @ w2.mT)
        dw2.addmm_(y_i.mT, dz_i)
        del y_i, dz_i  # before the next block's, or two blocks would be alive at a time
    return dw1, dw2


torch.manual_seed(0)
x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
w1 = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
w2 = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)

# Ordinary backpropagation: autograd keeps all of Y until the backward pass has used it.
with LiveBytes() as live:
    loss = (x @ w1 @ w2).sum()
    loss.backward()
print(f"autograd           peak {live.peak_bytes / 1e6:5.2f} MB above X, W1 and W2")

# Streamed: one block of rows at a time. Every number of blocks gives the same gradient.
for partitions in (1, 4, 16, 64):
    with LiveBytes() as live:
        dw1, dw2 = streamed_gradients(x, w1, w2, partitions)
    error = max(((ours - exact).norm() / exact.norm()).item() for ours, exact in ((dw1, w1.grad), (dw2, w2.grad)))
    assert error < 1e-12, f"the gradients differ by {error:.1e}"
    print(f"streamed, D = {partitions:3d}  peak {live.peak_bytes / 1e6:5.2f} MB, relative error of the gradients {error:.0e}")
