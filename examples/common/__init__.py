"""What the examples share: the run's folder, the training loop, checkpoints, tables and figures."""
