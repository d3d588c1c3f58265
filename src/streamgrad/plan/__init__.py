"""What a training step will hold and take, from a model's configuration alone."""
