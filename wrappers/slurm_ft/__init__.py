"""Inside a job: launch, safe points, checkpoints, pause. Importing this imports no torch."""
