"""From a model's name to filled parameters: folders, checkpoints, and where tensors go."""
