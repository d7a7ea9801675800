"""A model by its folder: its shape, what each key of its configuration means, the names of its tensors."""
