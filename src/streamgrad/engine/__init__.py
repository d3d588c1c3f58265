"""The streamed layer, and what one call of it needs. Begin at `layer`."""
