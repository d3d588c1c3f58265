"""The seams of Hugging Face models. Begin at `decoder`, which streams the layers, and `causal_lm`, which streams the head."""

from streamgrad.versions import check_version

check_version("transformers")
