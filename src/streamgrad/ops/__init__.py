"""Small differentiable pieces, which all that needs torch is made of."""

from streamgrad.versions import check_version

check_version("torch")
