"""The `jaxcode bench` command: what is timed, against what, and how."""
