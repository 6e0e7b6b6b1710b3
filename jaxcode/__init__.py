"""The exact gradient of a training step from whichever workers answer, in few bytes."""
