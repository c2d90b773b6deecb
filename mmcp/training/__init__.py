"""Training over ranks: steps, their exact loss, updates, checkpoints, metrics and grades."""
