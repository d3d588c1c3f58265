"""The seams of Hugging Face models."""

from streamgrad.versions import check_version

check_version("transformers")
