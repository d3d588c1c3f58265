"""StreamBP in two matrix products: the same gradients from a fraction of the intermediate values.

    Y = X W1,   Z = Y W2,   L = sum(Z)

The gradients are sums over the rows of X:  dW1 = sum_i X_i^T dY_i  and  dW2 = sum_i Y_i^T dZ_i. So nobody needs all of Y at
once: take a block of rows, compute its Y_i and dY_i, add its share to both sums, drop it, go on to the next block.
A decoder layer is streamed in the same way (docs/how-it-works.md); there, chunks of tokens also meet in attention.

Run it:  python examples/linear_example.py
"""

import torch

from streamgrad.bench.linear import streamed_linear_gradients
from streamgrad.memory.live_bytes import LiveBytes

ROWS, WIDTH = 4096, 64

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
        streamed = streamed_linear_gradients(x, w1, w2, partitions)
    error = max(
        ((ours - exact).norm() / exact.norm()).item() for ours, exact in ((streamed.dw1, w1.grad), (streamed.dw2, w2.grad))
    )
    assert error < 1e-12, f"the gradients differ by {error:.1e}"
    print(f"streamed, D = {partitions:3d}  peak {live.peak_bytes / 1e6:5.2f} MB, relative error of the gradients {error:.0e}")
