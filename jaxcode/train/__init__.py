"""The `jaxcode train` command: one module for each thing a training run needs."""
