"""Where evaluations happen: on a GPU, in a recording, or by estimate."""
