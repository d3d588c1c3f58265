"""Small differentiable operations, from which the rest of the package is built."""

from streamgrad.versions import check_version

check_version("torch")
