"""What a step of a model would hold and take, by its configuration alone: `estimate`, and `streamgrad plan` for the terminal."""
